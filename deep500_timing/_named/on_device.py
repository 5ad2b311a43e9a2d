"""The times of a named timer between events on a device."""

from __future__ import annotations

from threading import RLock, get_ident
from time import sleep
from typing import TYPE_CHECKING, Any

from deep500_timing._named.totals import Totals
from deep500_timing.devices._queue import EventPair

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing.devices._null import Device

_LOOKS = 100


class Arrival:
    """Where the time of one stretch goes when the device has passed it: into the region's intervals and the totals.

    The pool of events hands the time over as it arrives, whatever the timer below keeps of it.
    """

    __slots__ = ("_totals", "owner")

    def __init__(self, store: Intervals, totals: tuple[Totals, ...]) -> None:
        """For the intervals of a region on the device, and for these totals."""
        self.owner: Any = store
        """By which the pool finds what is on its way for the region."""
        self._totals = totals

    def append(self, start_ns: int, end_ns: int) -> None:
        """Take the time."""
        self.owner.append(start_ns, end_ns)
        for totals in self._totals:
            totals.add(end_ns - start_ns)

    def _give_up(self) -> None:
        for totals in self._totals:
            totals.missing += 1

    @property
    def failed(self) -> int:
        """Write-only counter: adding to it reports that no device time is available."""
        return 0

    @failed.setter
    def failed(self, value: int) -> None:
        self.owner.failed += value
        self._give_up()

    @property
    def captured(self) -> int:
        """Write-only counter: adding to it reports a capture into a graph, where nothing is timed."""
        return 0

    @captured.setter
    def captured(self, value: int) -> None:
        self.owner.captured += value
        self._give_up()


class DeviceTimes:
    """Adds up a named timer's stretches as they arrive from the device."""

    __slots__ = (
        "_lifetime",
        "_lock",
        "_now",
        "_recorded",
        "_running",
        "_starter",
        "_store",
        "_totals",
        "device",
        "name",
    )

    def __init__(self, name: str, device: Device, now: Callable[[], int]) -> None:
        """Nothing has come yet.

        Args:
            name: What is timed, for warnings.
            device: The pool of events.
            now: The host's clock, on whose timeline the times are placed.
        """
        self.name = name
        self.device = device
        self._now = now
        self._totals = Totals()
        self._lifetime = Totals(kept=0)
        self._recorded = Totals()
        self._lock = RLock()  # Held for a few instructions.
        self._running: EventPair | None = None
        self._starter = 0
        self._store: Intervals | None = None

    def start(self) -> None:
        """Queue the first event on the current stream."""
        self.forget_running()
        self._starter = get_ident()
        pair = EventPair(self.name, self._now)
        self.device.begin(pair)
        self._running = pair

    def stop(self, store: Intervals, start_ns: int, end_ns: int, record: bool) -> None:
        """Queue the second event.

        Args:
            store: The region's intervals on the device, which take the time as well.
            start_ns: When the stretch began on the host.
            end_ns: When it ended there.
            record: Keep the time for ``recorded`` as well.
        """
        pair, self._running = self._running, None
        if pair is None:
            return
        self._store = store
        with self._lock:
            # Who takes the totals away after this waits for the time; who did so before has no part in it.
            totals = (self._totals, self._lifetime, *((self._recorded,) if record else ()))
            for each in totals:
                each.expected += 1
        arrival = Arrival(store, totals)
        try:
            self.device.end(pair, arrival, start_ns, end_ns)
        except BaseException:
            arrival.failed += 1
            self.device.drop(pair)  # What the pool has taken over it gives back by itself.
            raise

    def started_here(self) -> bool:
        """Whether the calling thread has started the stretch that is running."""
        return self._starter == get_ident()

    def wait(self, totals: Totals | None = None) -> None:
        """Wait for the times that are on their way, and for nothing queued after them."""
        if self._store is None:
            return
        for _ in range(_LOOKS):
            self.device.collect_for(self._store)
            if totals is None or totals.complete:
                return
            # Another thread is amid a stop that is to be in them; or the device does not answer.
            if not self.device.pending().get(id(self._store), 0):
                sleep(0)
            else:
                return

    def collect(self) -> None:
        """Take in what has arrived, without waiting."""
        if not self._totals.complete:
            self.device.collect(wait=False)

    def read(self, *, reset: bool = False) -> Totals:
        """What came since the last reset, waiting for what is on its way.

        Args:
            reset: Begin anew from zero, in one step: later stops are not in it.
        """
        totals = self.take() if reset else self._totals
        self.wait(totals)
        return totals if reset else totals.copy()

    def take(self) -> Totals:
        """What came since the last reset, beginning anew; times on their way still go to what is returned."""
        with self._lock:
            totals, self._totals = self._totals, Totals()
        return totals

    def lifetime(self) -> Totals:
        """What ever came, waiting for what is on its way; only its sums."""
        self.wait()
        return self._lifetime

    def recorded(self, *, reset: bool = False) -> Totals:
        """What ``stop(record=True)`` kept, without waiting."""
        with self._lock:
            totals = self._recorded
            if reset:
                self._recorded = Totals()
        return totals if reset else totals.copy()

    def forget_running(self) -> None:
        """Take back the first event of a stretch that will have no end."""
        pair, self._running = self._running, None
        if pair is not None:
            self.device.drop(pair)
