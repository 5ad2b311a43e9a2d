"""Timers by name, as training frameworks know them: started and stopped from anywhere, read and reset in between.

One :class:`NamedTimer` is one region of a timer. Other than a region it belongs to no thread (backward passes end on
autograd's threads), and it keeps account of what came since it was last reset. Clock, intervals and events are the
timer's own, so that the same times stand in its snapshots and reports.
"""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING

from deep500_timing.exceptions import RegionNotOpenError, RegionOpenError
from deep500_timing.timer import CPUGPUTimer

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from deep500_timing._ground.protocols import Clock, DeviceClock
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing.memory import MemoryReader
    from deep500_timing.timer import Timer

KEPT_SINCE_RESET = 65_536
"""Times that a mean stands on at most, the latest ones; sums and counts stand on all."""
_KEEP_LAST = 1024
_UNSETTLED = 1024


def engine_for(timer: Timer | None, clock: Clock | None, device_clock: DeviceClock | None) -> Timer:
    """The timer that records: the one given, or one of its own that keeps a bounded number of intervals.

    Raises:
        ValueError: A clock is given beside a timer, which has its own.
    """
    if timer is None:
        return CPUGPUTimer(clock=clock, device_clock=device_clock, keep_last=_KEEP_LAST)
    if clock is not None or device_clock is not None:
        raise ValueError("Making named timers with timer= and a clock: the timer has clocks of its own. Leave one out.")
    return timer


class Account:
    """What came in since the last reset: the sum exactly, and the latest times one by one."""

    __slots__ = ("count", "durations_ns", "missing", "stops", "total_ns")

    def __init__(self, kept: int = KEPT_SINCE_RESET) -> None:
        """Start empty; keep so many times one by one."""
        self.durations_ns: deque[int] = deque(maxlen=kept)
        self.total_ns = 0
        self.count = 0
        """Times that have arrived."""
        self.stops = 0
        """Times that are to be expected."""
        self.missing = 0
        """Those of them that the device could not give."""

    def take(self, duration_ns: int) -> None:
        """Take in one time."""
        self.durations_ns.append(duration_ns)
        self.total_ns += duration_ns
        self.count += 1

    @property
    def complete(self) -> bool:
        """Whether nothing is on its way any more."""
        return self.count + self.missing >= self.stops


class NamedTimer:
    """One named timer, in nanoseconds. The faces over it add units and the originals' manners.

    Args:
        name: The region's name.
        engine: The timer that records.
        reentrant: A start while it runs is counted, and the time ends with the last stop; else it is an error.
        memory: What reads the memory at each stop, if anything does.
    """

    __slots__ = (
        "_account",
        "_awaited",
        "_depth",
        "_engine",
        "_find_device",
        "_fresh",
        "_generation",
        "_known_count",
        "_last_stamp",
        "_ledger",
        "_lifetime",
        "_memory",
        "_now",
        "_plain",
        "_reentrant",
        "_region",
        "_simple",
        "_store",
        "_taken_ns",
        "name",
        "recorded",
    )

    def __init__(
        self, name: str, engine: Timer, *, reentrant: bool = False, memory: MemoryReader | None = None
    ) -> None:
        """See the class."""
        self.name = name
        self._engine = engine
        self._now = perf_counter_ns if engine._clock is None else engine.now_ns
        self._region = engine._shared_region(name)
        # What follows from whether the timer below is enabled is asked anew when its generation changes.
        self._generation = engine._generation
        self._reentrant = reentrant
        self._memory = memory
        self._depth = 0
        self._account = Account()
        self._lifetime = Account(kept=0)
        self.recorded = Account()
        """What ``stop(record=True)`` kept."""
        # On the host's clock a stop only leaves its time here, for whoever reads or for a later stop to account for.
        self._fresh: deque[int] = deque()
        # A device that is looked for when it is first used is looked for at the first start.
        self._find_device = engine.device.is_late and engine.device.for_named_timers
        self._ledger = None if engine.device.is_null else engine.device
        # Times on their way from the device, by the start that they will bear, with the accounts that they are for.
        self._awaited: dict[int, tuple[Account, ...]] = {}
        self._last_stamp = 0
        self._store: Intervals | None = None
        self._known_count = 0
        self._taken_ns = 0
        self._simple = self._ledger is None and memory is None and not reentrant and not self._find_device
        self._plain = self._simple and engine.enabled

    @property
    def account(self) -> Account:
        """What came since the last reset."""
        self._settle()
        return self._account

    @property
    def lifetime(self) -> Account:
        """What ever came; only its sums."""
        self._settle()
        return self._lifetime

    def _settle(self) -> None:
        # Account for what stops have left, on any thread.
        fresh = self._fresh
        while fresh:
            try:
                duration_ns = max(fresh.popleft(), 0)  # a clock of the user's own may run backwards
            except IndexError:  # another thread was faster
                return
            self._account.stops += 1
            self._account.take(duration_ns)
            self._lifetime.take(duration_ns)

    @property
    def running(self) -> bool:
        """Whether it is started."""
        return bool(self._region.is_open)

    def start(self) -> None:
        """Start.

        Raises:
            RegionOpenError: It is running already (and not reentrant).
        """
        region = self._region
        if self._plain and not region.is_open and self._engine._generation == self._generation:
            region._open_at(self._now())
            return
        if self._engine._generation != self._generation:
            self._catch_up()
            region = self._region
        if not self._engine.enabled:
            return
        if self._find_device:
            self._look_for_device()
        if not region.is_open:
            self._depth = 0
            self._begin()
        elif self._reentrant:
            self._depth += 1
        else:
            raise RegionOpenError(
                f"Starting timer {self.name!r}: it is running already, since "
                f"{(self._now() - region._opened_ns()) / 1e9:.6g} s. Stop it first, or forget it with reset()."
            )

    def _look_for_device(self) -> None:
        device = self._engine.device.find()
        self._find_device = False
        self._ledger = None if device.is_null else device
        self._simple = device.is_null and self._memory is None and not self._reentrant
        self._plain = self._simple and self._engine.enabled

    def _catch_up(self) -> None:
        # The timer below was switched on or off, or this process was forked.
        engine = self._engine
        self._generation = engine._generation
        self._plain = engine.enabled and self._simple
        region = engine._shared_region(self.name)
        if region is not self._region:
            # After a fork the recorder drops all regions but the calling thread's; the parent reports what it timed.
            self._region = region
            self._fresh.clear()
            self._awaited.clear()
            self._account, self._lifetime, self.recorded = Account(), Account(kept=0), Account()

    def _begin(self) -> None:
        if self._ledger is None:
            self._region._open_at(self._now())
        else:
            self._engine._start_on_device(self._region)

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop.

        Args:
            reset: Forget what was timed before, so that this time stands alone.
            record: Keep this time in an account of its own as well, which outlives resets of the other.

        Raises:
            RegionNotOpenError: It is not running.
        """
        now_ns = self._now()
        region = self._region
        if self._plain and region.is_open and not reset and not record:
            start_ns = region._keep_until(now_ns)
            fresh = self._fresh
            fresh.append(now_ns - start_ns)
            if len(fresh) > _UNSETTLED:
                self._settle()
        elif not region.is_open:
            self._stop_of_stopped()
        elif self._depth:
            self._depth -= 1
        else:
            if reset:
                self.renew()
            self._finish(now_ns, self.recorded if record else None)

    def _stop_of_stopped(self) -> None:
        # Disabling and enabling may have closed it in between.
        if not self._engine.enabled or self._region._ignores_end():
            return
        raise RegionNotOpenError(
            f"Stopping timer {self.name!r}: it is not running. Start it first, and stop it once for each start."
        )

    def _finish(self, now_ns: int, also: Account | None) -> None:
        region = self._region
        self._settle()
        accounts = (self._account, self._lifetime) if also is None else (self._account, self._lifetime, also)
        self._account.stops += 1
        if self._ledger is not None:
            self._finish_on_device(accounts)
        else:
            for account in accounts:
                account.take(max(now_ns - region._opened_ns(), 0))
        region._keep_until(now_ns)
        if self._memory is not None:
            from deep500_timing.memory import sample_region

            sample_region(self._engine, self.name, self._memory)

    def _finish_on_device(self, accounts: tuple[Account, ...]) -> None:
        region = self._region
        store = region._device_store()
        if store is not self._store:
            # The first time, or the timer below was reset, and what was on its way to it is not to be had any more.
            self._lose(len(self._awaited))
            self._store, self._known_count, self._taken_ns = store, 0, 0
        # The ledger hands a time over with the host's start of its region, by which it is found again. On a clock that
        # stands still two starts may be the same.
        self._last_stamp = stamp = max(region._opened_ns(), self._last_stamp + 1)
        self._awaited[stamp] = accounts
        lost = store.failed + store.captured
        self._engine._close_on_device(region, stamp)
        if store.failed + store.captured != lost and self._awaited.pop(stamp, None) is not None:
            for account in accounts:
                account.missing += 1
        elif store.count != self._known_count:
            self.take_arrived()

    def take_arrived(self) -> int:
        """Take over the times that have arrived from the device, without waiting; return how many."""
        store = self._store
        if store is None or store.count == self._known_count:
            return 0
        copied = store.copy()
        kept = sum(map(len, copied["pairs"])) // 2
        new: int = copied["aggregated"] + kept - self._known_count
        arrived = _last_pairs(copied["pairs"], min(new, kept))
        folded = new - len(arrived)
        if folded:
            # The timer keeps so few that some are folded already: they are the oldest, and their sum is known.
            rest_ns = copied["total_ns"] - self._taken_ns
            arrived[:0] = [(stamp, stamp + rest_ns // folded) for stamp in list(self._awaited)[:folded]]
        self._known_count += new
        for start_ns, end_ns in arrived:
            self._taken_ns += end_ns - start_ns
            for account in self._awaited.pop(start_ns, ()):
                account.take(end_ns - start_ns)
        return new

    def _lose(self, number: int) -> None:
        # The oldest of those that are awaited will not come.
        for stamp in list(self._awaited)[:number]:
            for account in self._awaited.pop(stamp):
                account.missing += 1

    def take_or_lose(self) -> None:
        """As :meth:`take_arrived`, and give up those that the device could not give."""
        if self._ledger is not None and self._store is not None:
            awaited = len(self._awaited)
            pending = self._ledger.pending().get(id(self._store), 0)
            self._lose(awaited - pending - self.take_arrived())

    def read(self, before_restart: Callable[[], object] | None = None) -> Account:
        """What came since the last reset, waiting for what is on its way from the device, and for nothing else.

        A timer that is running is stopped for it, and started again.

        Args:
            before_restart: Called before it is started again.
        """
        split = self.running
        if split:
            self._finish(self._now(), None)
        account = self.account
        self.wait()
        if split:
            if before_restart is not None:
                before_restart()
            self._begin()
        return account

    def split(self) -> None:
        """As :meth:`read`, without waiting: a timer that is running is stopped, and started again."""
        if self.running:
            self._finish(self._now(), None)
            self._begin()

    def wait(self) -> None:
        """Wait for the times that are on their way from the device."""
        if self._ledger is not None and self._store is not None:
            self._ledger.collect_for(self._store)
            self.take_or_lose()

    def renew(self) -> Account:
        """Open a new account, to which nothing belongs that was stopped before; return the old one.

        Times that are on their way still go to the old one.
        """
        account, self._account = self.account, Account()
        return account

    def forget_running(self) -> None:
        """Forget the start, if it is running."""
        if self.running:
            self._engine._discard(self._region)
        self._depth = 0


def _last_pairs(parts: list[array[int]], number: int) -> list[tuple[int, int]]:
    # The last intervals of arrays in which start and end alternate, oldest first.
    found: list[tuple[int, int]] = []
    for part in reversed(parts):
        missing = number - len(found)
        if missing <= 0:
            break
        last = part[max(len(part) - 2 * missing, 0) :]
        found[:0] = zip(last[::2], last[1::2], strict=True)
    return found
