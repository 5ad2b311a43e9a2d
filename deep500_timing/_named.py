"""Timers by name, as training frameworks have them: started and stopped on any thread, read and reset in between.

One :class:`NamedTimer` is one region of a timer. Unlike a region it belongs to no thread (backward passes end on
autograd's threads), and it sums the times since its last reset. The timer below owns clock, intervals and events, so
the same times are in its snapshots and reports.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from threading import RLock, get_ident
from time import perf_counter_ns, sleep
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from deep500_timing.devices._device import Device, EventPair
from deep500_timing.devices._lazy import LazyDevice
from deep500_timing.exceptions import RegionNotOpenError, RegionOpenError
from deep500_timing.timer import CPUGPUTimer, Timer

if TYPE_CHECKING:
    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing.memory import MemoryReader

KEEP_LAST = 1024
"""Intervals that named timers' own timer keeps one by one."""
KEPT_SINCE_RESET = 65_536
"""Number of times that a mean uses at most, the latest ones. Sums and counts use all."""
_UNDRAINED = 1024
"""Stops that may wait to be added up before a stop does it."""
_LOOKS = 100


def timer_for(
    timer: Timer | None, clock: Clock | None, device_clock: DeviceClock | None, make: Callable[..., Timer] = CPUGPUTimer
) -> Timer:
    """Return the given timer, or make one that keeps a bounded number of intervals."""
    if timer is None:
        return make(clock=clock, device_clock=device_clock, keep_last=KEEP_LAST)
    if clock is not None or device_clock is not None:
        raise ValueError("Making named timers with timer= and a clock: the timer has a clock already. Leave one out.")
    return timer


def check_timer(call: str, timer: object) -> None:
    """Raise a TypeError with the remedy, unless the argument of that call is a timer."""
    if not isinstance(timer, Timer):
        given = type(timer).__name__
        raise TypeError(f"{call}: pass the timer that keeps the times, such as CPUGPUTimer(), not {given}.")


def check_normalizer(method: str, normalizer: float) -> None:
    if not normalizer > 0.0:
        raise ValueError(f"{method}(normalizer={normalizer!r}): it divides the times, so it must be above 0.")


@dataclass(slots=True)
class Totals:
    """The times since a reset: their exact sum, and the latest of them one by one."""

    durations_ns: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT_SINCE_RESET))
    total_ns: int = 0
    count: int = 0
    """Times that have arrived."""
    expected: int = 0
    """Times that were stopped, and have arrived or will."""
    missing: int = 0
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
        return replace(self, durations_ns=self.durations_ns.copy())


class _Counter:
    """A counter of the store, only to be added to: a time will not come, as it failed or was captured into a graph."""

    def __set_name__(self, owner: type[Arrival], name: str) -> None:
        self._name = name

    def __get__(self, arrival: Arrival, kind: type[Arrival]) -> int:
        return 0

    def __set__(self, arrival: Arrival, value: int) -> None:
        setattr(arrival.owner, self._name, getattr(arrival.owner, self._name) + value)
        for totals in arrival.totals:
            totals.missing += 1


class Arrival:
    """Receives the time of one stretch when the device has passed it, for the region's intervals and the totals."""

    __slots__ = ("owner", "totals")
    failed = _Counter()
    captured = _Counter()

    def __init__(self, store: Intervals, totals: tuple[Totals, ...]) -> None:
        self.owner: Any = store
        """The pool finds the events of a region by this object."""
        self.totals = totals

    def append(self, start_ns: int, end_ns: int, host_start_ns: int, host_end_ns: int) -> None:
        self.owner.append(start_ns, end_ns, host_start_ns, host_end_ns)
        for totals in self.totals:
            totals.add(end_ns - start_ns)


class NamedTimer:
    """One named timer, in nanoseconds. The APIs of training frameworks add units and their own rules.

    Reading it from another thread than the one that trains stops, restarts and changes nothing that the training uses.

    A stop on the host appends its interval to a queue, one atomic step, and never waits; readers add up under a lock.
    A stop on a device expects a time, which is added up when it arrives from the device.

    Args:
        name: The region's name.
        timer: The timer that records; a new one if None.
        reentrant: Count a start of a running timer, and end with the last stop. Otherwise such a start is an error.
        memory: Reads the memory at each stop, if not None.
    """

    def __init__(
        self, name: str, timer: Timer | None = None, *, reentrant: bool = False, memory: MemoryReader | None = None
    ) -> None:
        self.name = name
        self._timer = timer = timer_for(timer, None, None)
        self._now = perf_counter_ns if timer._clock is None else timer.now_ns
        self._number = 0
        region = timer._shared_region(name, 0)
        # Two named timers of one name over one timer have a region each, so they may run at the same time. A new one
        # reuses the region of a dropped one.
        while _users.setdefault(id(region), self) is not self:
            self._number += 1
            region = timer._shared_region(name, self._number)
        self._region = region
        self._generation = timer._generation
        self._reentrant = reentrant
        self._memory = memory
        self._depth = 0
        device = timer.device
        self._find_device = isinstance(device, LazyDevice) and device.for_named_timers
        self._device = None if device.is_null else device
        self._forget_times()

    def _forget_times(self) -> None:
        self._lock = RLock()
        self._totals = Totals()
        self._on_device = Totals(deque(maxlen=0))
        self._recorded = Totals()
        # Intervals on the host that are not added up yet: start and end in ns, and whether to record them.
        self._fresh: deque[tuple[int, int, bool]] = deque()
        self._ended_ns = 0
        # Of intervals that were read while they ran: their start, and the time up to which they are counted. They may
        # be several: the thread that trains goes on between two looks at the queue.
        self._counted: dict[int, int] = {}
        self._pair: EventPair | None = None
        self._starter = 0
        self._store: Intervals | None = None

    def __reduce__(self) -> Any:
        """Copy and pickle the settings; the copy is an independent timer without times."""
        return partial(type(self), reentrant=self._reentrant, memory=self._memory), (self.name, self._timer)

    # --- timing -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return bool(self._region.is_open)

    def start(self) -> None:
        if self._timer._generation != self._generation:
            self._catch_up()
        if not self._timer.enabled:
            return
        region = self._region
        if not region.is_open:
            self._depth = 0
            if self._find_device:
                device = self._timer.device.find()
                self._find_device = False
                if not device.is_null:
                    self._device = self._timer._device = device
            if self._device is not None:
                self._start_on_device(self._device)
            region._open_at(self._now())
        elif self._reentrant:
            self._depth += 1
        else:
            raise RegionOpenError(
                f"Starting timer {self.name!r}: it is running already, since "
                f"{(self._now() - region._start_ns) / 1e9:.6g} s. Stop it first, or forget it with reset()."
            )

    def _catch_up(self) -> None:
        # The timer below was switched on or off, or this process was forked.
        self._generation = self._timer._generation
        region = self._timer._shared_region(self.name, self._number)
        if region is not self._region:
            # After a fork the recorder drops the regions of other threads; the parent reports their times.
            self._region = region
            _users[id(region)] = self
            self._forget_times()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop.

        Args:
            reset: Forget earlier times first.
            record: Add this time to :meth:`recorded` too, which other resets leave alone.
        """
        now_ns = self._now()
        region = self._region
        if not region.is_open:
            # Disabling and enabling may have closed it in between.
            if self._timer.enabled and not region._ignores_end():
                raise RegionNotOpenError(
                    f"Stopping timer {self.name!r}: it is not running. Start it first, and stop it once for each start."
                )
        elif self._depth:
            self._depth -= 1
        else:
            if reset:
                self.take()
            self._finish(now_ns, record)

    def _finish(self, now_ns: int, record: bool) -> None:
        start_ns = self._region._keep_until(now_ns)
        if self._device is not None:
            self._stop_on_device(self._device, start_ns, now_ns, record)
        else:
            self._fresh.append((start_ns, now_ns, record))
            if len(self._fresh) > _UNDRAINED and self._lock.acquire(blocking=False):
                try:
                    self._settle()
                finally:
                    self._lock.release()
        if self._memory is not None:
            from deep500_timing.memory import sample_region

            sample_region(self._timer, self.name, self._memory)

    def _start_on_device(self, device: Device) -> None:
        self._drop_pair(device)
        self._starter = get_ident()
        pair = EventPair(self.name, self._now)
        device.begin(pair)
        self._pair = pair

    def _stop_on_device(self, device: Device, start_ns: int, end_ns: int, record: bool) -> None:
        pair, self._pair = self._pair, None
        if pair is None:
            return
        self._store = self._region._device_store()
        with self._lock:
            # A reader that takes the totals after this line waits for the time.
            totals = (self._totals, self._on_device, *((self._recorded,) if record else ()))
            for each in totals:
                each.expected += 1
        arrival = Arrival(self._store, totals)
        try:
            device.end(pair, arrival, start_ns, end_ns)
        except BaseException:
            arrival.failed += 1
            device.drop(pair)
            raise

    def _drop_pair(self, device: Device) -> None:
        # The first event of a stretch that will have no end.
        pair, self._pair = self._pair, None
        if pair is not None:
            device.drop(pair)

    def forget_running(self) -> None:
        if self.running:
            self._timer._discard_all(self._region)
            if self._device is not None:
                self._drop_pair(self._device)
                store = self._region._device_store()
                store.discarded += 1

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(self, *, reset: bool = False, wait: bool = True) -> Totals:
        """The times since the last reset, after a wait for those on their way from the device.

        The time of a running timer so far is included. On a device that takes two events on the current stream, so a
        timer that another thread started there is left alone: its time is included after its stop.

        Args:
            reset: Restart from zero, in one step: a concurrent stop is in this answer or in the next.
            wait: False never waits and is for a reset: the times on their way arrive in the answer later.
        """
        device = self._device
        if device is None:
            with self._lock:
                self._settle()
                self._count_running()
                return self.take() if reset else self._totals.copy()
        split = self.running and self._starter == get_ident()
        if split:
            self._finish(self._now(), False)
        totals = self.take() if reset else self._totals
        if wait:
            self.wait()
        totals = totals if reset else totals.copy()
        if split:
            self._start_on_device(device)
            self._region._open_at(self._now())
        return totals

    def _settle(self) -> None:
        """Add up the finished stops on the host; the lock is held."""
        while self._fresh:
            start_ns, end_ns, record = self._fresh.popleft()
            self._ended_ns = max(self._ended_ns, end_ns)
            duration_ns = max(end_ns - start_ns, 0)  # a custom clock may run backwards
            if start_ns in self._counted:
                # Negative if the reader read its clock after the stop.
                duration_ns = end_ns - self._counted[start_ns]
                # Those that began before it and are still here were discarded.
                self._counted = {start: until for start, until in self._counted.items() if start > start_ns}
            self._add(duration_ns, record)

    def _add(self, duration_ns: int, record: bool) -> None:
        for totals in (self._totals, *((self._recorded,) if record else ())):
            if duration_ns < 0:  # corrects the sum, and is no time that a mean could use
                totals.total_ns += duration_ns
            else:
                totals.add(duration_ns)
                totals.expected += 1

    def _count_running(self) -> None:
        """Count the time of a running timer so far, to be left out of its interval when that arrives."""
        start_ns = self._region._start_ns
        from_ns = self._counted.get(start_ns, start_ns if start_ns >= self._ended_ns else None)
        if from_ns is None or not self._region.is_open:
            return
        now_ns = self._now()
        self._add(max(now_ns - from_ns, 0), False)
        self._counted[start_ns] = now_ns

    def take(self) -> Totals:
        """Return the finished times since the last reset and restart from zero, without waiting.

        Times on their way from the device still go to the returned object.
        """
        with self._lock:
            self._settle()
            totals, self._totals = self._totals, Totals()
        return totals

    def recorded(self, *, reset: bool = False) -> Totals:
        with self._lock:
            self._settle()
            totals = self._recorded
            if reset:
                self._recorded = Totals()
        return totals if reset else totals.copy()

    def wait(self) -> None:
        """Wait for the times on their way from the device, and for no later work."""
        if self._device is None or self._store is None:
            return
        for _ in range(_LOOKS):
            self._device.collect_for(self._store)
            if self._on_device.complete or self._device.pending().get(id(self._store), 0):
                return  # Still pending after the wait: the device does not answer.
            sleep(0)  # Another thread is inside a stop that belongs to these totals.


_users: WeakValueDictionary[int, NamedTimer] = WeakValueDictionary()
"""Which named timer uses a region, by its ``id``. The timer below keeps the region for good."""


class ElapsedTime(NamedTuple):
    """A known time between two events on the device."""

    ms: float

    def get_elapsed_msec(self) -> float:
        return self.ms


class DeepSpeedAttributes(NamedTimer):
    """A named timer with DeepSpeed's attributes, read-only.

    Like ``elapsed()`` they wait for times on their way from the device and include the time of a running timer so far.
    """

    __slots__ = ()

    @property
    def name_(self) -> str:
        return self.name

    @property
    def started_(self) -> bool:
        return self.running

    @property
    def use_host_timer(self) -> bool:
        """Whether the times are the host's. With a lazy device this is known after the first start."""
        return self._device is None

    @property
    def start_event(self) -> None:
        """None: the events belong to a pool and are reused as soon as they have been read."""
        return

    @property
    def start_time(self) -> float:
        """When it was last started, in s on the clock of the timer below; 0.0 before, and on a device."""
        return self._region._start_ns / 1e9 if self._device is None else 0.0

    @property
    def end_time(self) -> float:
        """When it was last stopped, in s on the clock of the timer below; 0.0 before, and on a device."""
        with self._lock:
            self._settle()
        return self._ended_ns / 1e9

    @property
    def event_timers(self) -> list[float] | list[ElapsedTime]:
        """The times since the last reset: in s on the host, objects with ``get_elapsed_msec()`` on a device."""
        durations_ns = self.read().durations_ns
        if self._device is None:
            return [duration_ns / 1e9 for duration_ns in durations_ns]
        return [ElapsedTime(duration_ns / 1e6) for duration_ns in durations_ns]

    @property
    def elapsed_records(self) -> list[float] | None:
        """The times since the last reset in ms, the latest 65 536 of them; None if there is none."""
        return [duration_ns / 1e6 for duration_ns in self.read().durations_ns] or None

    def _get_elapsed_msec(self) -> float:
        return self.read().total_ns / 1e6
