"""The sums of a named timer: on the host's clock, or between events on a device."""

from __future__ import annotations

from collections import deque
from threading import RLock, get_ident
from time import sleep
from typing import TYPE_CHECKING, Any

from deep500_timing.devices._device import EventPair

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Region
    from deep500_timing.devices._device import Device

KEPT_SINCE_RESET = 65_536
"""Number of times that a mean uses at most, the latest ones. Sums and counts use all."""
_UNDRAINED = 1024
"""Stops that may wait to be added up before a stop does it."""
_LOOKS = 100


class Totals:
    """The times since a reset: their exact sum, and the latest of them one by one."""

    __slots__ = ("count", "durations_ns", "expected", "missing", "total_ns")

    def __init__(self, kept: int = KEPT_SINCE_RESET) -> None:
        self.durations_ns: deque[int] = deque(maxlen=kept)
        self.total_ns = 0
        self.count = 0
        """Times that have arrived."""
        self.expected = 0
        """Times that were stopped, and have arrived or will."""
        self.missing = 0
        """Expected times that the device could not give."""

    def add(self, duration_ns: int) -> None:
        self.durations_ns.append(duration_ns)
        self.total_ns += duration_ns
        self.count += 1

    @property
    def complete(self) -> bool:
        """Whether every expected time has arrived or is missing."""
        return self.count + self.missing >= self.expected

    def copy(self) -> Totals:
        copied = Totals()
        copied.durations_ns = self.durations_ns.copy()
        copied.total_ns, copied.count = self.total_ns, self.count
        copied.expected, copied.missing = self.expected, self.missing
        return copied


class _Times:
    """Sums since the last reset, since the beginning, and of ``stop(record=True)``."""

    __slots__ = ("_lifetime", "_lock", "_recorded", "_totals")

    def __init__(self) -> None:
        self._totals = Totals()
        self._lifetime = Totals(kept=0)
        self._recorded = Totals()
        self._lock = RLock()

    def _settle(self) -> None:
        """Add up finished stops; the lock is held."""

    def take(self) -> Totals:
        """Return the times since the last reset and restart from zero, without waiting.

        Times on their way from a device still go to the returned object. The time of a running timer is not included.
        """
        with self._lock:
            self._settle()
            totals, self._totals = self._totals, Totals()
        return totals

    def lifetime(self) -> Totals:
        """The sums of all times; waits for times on their way."""
        with self._lock:
            self._settle()
        return self._lifetime

    def recorded(self, *, reset: bool = False) -> Totals:
        with self._lock:
            self._settle()
            totals = self._recorded
            if reset:
                self._recorded = Totals()
        return totals if reset else totals.copy()


class HostTimes(_Times):
    """Sums of times on the host's clock.

    A stop appends its interval to ``fresh``, one atomic step, and never waits. Readers add up under a lock. Reading a
    running timer does not stop it: its time so far is counted, and left out of its interval when that arrives.
    """

    __slots__ = ("_counted_from", "_drained", "_ended_ns", "_inside", "fresh")

    def __init__(self) -> None:
        super().__init__()
        self.fresh: deque[tuple[int, int, bool]] = deque()
        """Intervals that are not added up yet: start and end in ns, and whether it was ``stop(record=True)``."""
        self._inside = False
        self._drained: tuple[int, int, bool] | None = None  # The interval that was added up last.
        self._ended_ns = 0
        # Start of the running interval that was read, and the time up to which it is counted.
        self._counted_from: tuple[int, int] | None = None

    def add(self, start_ns: int, end_ns: int, record: bool) -> None:
        self.fresh.append((start_ns, end_ns, record))
        if len(self.fresh) > _UNDRAINED and self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        # A signal handler or finalizer may run here on this thread; the outer call finishes its work.
        if self._inside:
            return
        self._inside = True
        try:
            while self.fresh:
                interval = self.fresh[0]
                # An interrupt may come between adding it up and removing it.
                if interval is not self._drained:
                    self._count(*interval)
                    self._drained = interval
                self.fresh.popleft()
        finally:
            self._inside = False

    def _count(self, start_ns: int, end_ns: int, record: bool) -> None:
        self._ended_ns = max(self._ended_ns, end_ns)
        counted, self._counted_from = self._counted_from, None
        duration_ns = max(end_ns - start_ns, 0)  # a custom clock may run backwards
        if counted is not None and counted[0] == start_ns:
            duration_ns = end_ns - counted[1]  # negative if the reader read its clock after the stop
        self._add(duration_ns, (self._recorded,) if record else ())

    def _add(self, duration_ns: int, recorded: tuple[Totals, ...] = ()) -> None:
        for totals in (self._totals, self._lifetime, *recorded):
            if duration_ns < 0:  # corrects the sum, and is no time that a mean could use
                totals.total_ns += duration_ns
            else:
                totals.add(duration_ns)
                totals.expected += 1

    def read(
        self,
        region: Region,
        now: Callable[[], int],
        *,
        reset: bool = False,
        before_restart: Callable[[], object] | None = None,
    ) -> Totals:
        with self._lock:
            self._settle()
            start_ns, counted = region._opened_ns(), self._counted_from
            known = counted is not None and counted[0] == start_ns
            if region.is_open and (known or start_ns >= self._ended_ns):
                now_ns = now()
                self._add(max(now_ns - (counted[1] if counted is not None and known else start_ns), 0))
                if before_restart is not None:
                    before_restart()
                    now_ns = now()
                self._counted_from = (start_ns, now_ns)
            return self.take() if reset else self._totals.copy()

    def ended_ns(self) -> int:
        """The latest end of an interval, 0 before the first."""
        with self._lock:
            self._settle()
            return self._ended_ns


class Arrival:
    """Receives the time of one stretch when the device has passed it, for the region's intervals and the totals."""

    __slots__ = ("_totals", "owner")

    def __init__(self, store: Intervals, totals: tuple[Totals, ...]) -> None:
        self.owner: Any = store
        """The pool finds the events of a region by this object."""
        self._totals = totals

    def append(self, start_ns: int, end_ns: int) -> None:
        self.owner.append(start_ns, end_ns)
        for totals in self._totals:
            totals.add(end_ns - start_ns)

    @property
    def failed(self) -> int:
        """Write-only counter: adding to it reports that there is no device time."""
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

    def _give_up(self) -> None:
        for totals in self._totals:
            totals.missing += 1


class DeviceTimes(_Times):
    """Sums of times between events, added up as they arrive from the device."""

    __slots__ = ("_now", "_running", "_starter", "_store", "device", "name")

    def __init__(self, name: str, device: Device, now: Callable[[], int]) -> None:
        super().__init__()
        self.name = name
        self.device = device
        self._now = now
        self._running: EventPair | None = None
        self._starter = 0
        self._store: Intervals | None = None

    def start(self) -> None:
        self.forget_running()
        self._starter = get_ident()
        pair = EventPair(self.name, self._now)
        self.device.begin(pair)
        self._running = pair

    def stop(self, store: Intervals, start_ns: int, end_ns: int, record: bool) -> None:
        pair, self._running = self._running, None
        if pair is None:
            return
        self._store = store
        with self._lock:
            # A reader that takes the totals after this line waits for the time.
            totals = (self._totals, self._lifetime, *((self._recorded,) if record else ()))
            for each in totals:
                each.expected += 1
        arrival = Arrival(store, totals)
        try:
            self.device.end(pair, arrival, start_ns, end_ns)
        except BaseException:
            arrival.failed += 1
            self.device.drop(pair)
            raise

    def started_here(self) -> bool:
        """Whether the calling thread started the running stretch."""
        return self._starter == get_ident()

    def wait(self, totals: Totals | None = None) -> None:
        """Wait for the times on their way, and for no later work."""
        for _ in range(0 if self._store is None else _LOOKS):
            self.device.collect_for(self._store)
            if totals is None or totals.complete or self.device.pending().get(id(self._store), 0):
                return  # Still pending after the wait: the device does not answer.
            sleep(0)  # Another thread is inside a stop that belongs to these totals.

    def read(self, *, reset: bool = False) -> Totals:
        totals = self.take() if reset else self._totals
        self.wait(totals)
        return totals if reset else totals.copy()

    def lifetime(self) -> Totals:
        self.wait()
        return self._lifetime

    def forget_running(self) -> None:
        """Drop the first event of a stretch that will have no end."""
        pair, self._running = self._running, None
        if pair is not None:
            self.device.drop(pair)
