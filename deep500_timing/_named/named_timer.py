"""Timers by name, as training frameworks have them: started and stopped on any thread, read and reset in between.

One :class:`NamedTimer` is one region of a timer. Unlike a region it belongs to no thread (backward passes end on
autograd's threads), and it sums the times since its last reset (``sums.py``). The timer below owns clock, intervals
and events, so the same times are in its snapshots and reports.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from deep500_timing._named.sums import DeviceTimes, HostTimes, Totals
from deep500_timing.exceptions import RegionNotOpenError, RegionOpenError
from deep500_timing.timer import CPUGPUTimer, Timer

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing.memory import MemoryReader

KEEP_LAST = 1024
"""Intervals that named timers' own timer keeps one by one."""


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


class NamedTimer:
    """One named timer, in nanoseconds. The APIs of training frameworks add units and their own rules.

    Reading it from another thread than the one that trains stops, restarts and changes nothing that the training uses.

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
        # Depends on whether the timer below is enabled; updated when its generation changes.
        self._generation = timer._generation
        self._reentrant = reentrant
        self._memory = memory
        self._depth = 0
        self._find_device = timer.device.is_lazy and timer.device.for_named_timers
        self._on_host = HostTimes()
        self._on_device = (
            None if timer.device.is_null or self._find_device else DeviceTimes(name, timer.device, self._now)
        )
        self._plain = self._is_plain()

    def _is_plain(self) -> bool:
        # Whether a start and a stop only read the host's clock.
        special = self._on_device is not None or self._find_device or self._memory is not None or self._reentrant
        return self._timer.enabled and not special

    def __reduce__(self) -> Any:
        """Copy and pickle the settings; the copy is an independent timer without times."""
        return partial(type(self), reentrant=self._reentrant, memory=self._memory), (self.name, self._timer)

    # --- timing -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return bool(self._region.is_open)

    def start(self) -> None:
        region = self._region
        if self._plain and not region.is_open and self._timer._generation == self._generation:
            region._open_at(self._now())
            return
        if self._timer._generation != self._generation:
            self._catch_up()
            region = self._region
        if not self._timer.enabled:
            return
        if self._find_device:
            device = self._timer.device.find()
            self._find_device = False
            self._on_device = None if device.is_null else DeviceTimes(self.name, device, self._now)
            self._plain = self._is_plain()
        if not region.is_open:
            self._depth = 0
            if self._on_device is not None:
                self._on_device.start()
            region._open_at(self._now())
        elif self._reentrant:
            self._depth += 1
        else:
            raise RegionOpenError(
                f"Starting timer {self.name!r}: it is running already, since "
                f"{(self._now() - region._opened_ns()) / 1e9:.6g} s. Stop it first, or forget it with reset()."
            )

    def _catch_up(self) -> None:
        # The timer below was switched on or off, or this process was forked.
        timer = self._timer
        self._generation = timer._generation
        self._plain = self._is_plain()
        region = timer._shared_region(self.name, self._number)
        if region is not self._region:
            # After a fork the recorder drops the regions of other threads; the parent reports their times.
            self._region = region
            _users[id(region)] = self
            self._on_host = HostTimes()
            if self._on_device is not None:
                self._on_device = DeviceTimes(self.name, self._on_device.device, self._now)

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """Stop.

        Args:
            reset: Forget earlier times first.
            record: Add this time to :meth:`recorded` too, which other resets leave alone.
        """
        now_ns = self._now()
        region = self._region
        if self._plain and region.is_open and not reset and not record:
            self._on_host.add(region._keep_until(now_ns), now_ns, False)
        elif not region.is_open:
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
        region = self._region
        start_ns = region._keep_until(now_ns)
        if self._on_device is None:
            self._on_host.add(start_ns, now_ns, record)
        else:
            self._on_device.stop(region._device_store(), start_ns, now_ns, record)
        if self._memory is not None:
            from deep500_timing.memory import sample_region

            sample_region(self._timer, self.name, self._memory)

    def forget_running(self) -> None:
        if self.running:
            self._timer._discard_all(self._region)
            if self._on_device is not None:
                self._on_device.forget_running()
                store = self._region._device_store()
                store.discarded += 1

    # --- reading ------------------------------------------------------------------------------------------------------

    def read(
        self, *, reset: bool = False, wait: bool = True, before_restart: Callable[[], object] | None = None
    ) -> Totals:
        """The times since the last reset, after a wait for those on their way from the device.

        The time of a running timer so far is included. On a device that takes two events on the current stream, so a
        timer that another thread started there is left alone: its time is included after its stop.

        Args:
            reset: Restart from zero, in one step: a concurrent stop is in this answer or in the next.
            wait: False never waits and is for a reset: the times on their way arrive in the answer later.
            before_restart: Called before the time of a running timer continues.
        """
        if self._on_device is None:
            return self._on_host.read(self._region, self._now, reset=reset, before_restart=before_restart)
        split = self.running and self._on_device.started_here()
        if split:
            self._finish(self._now(), False)
        totals = self._on_device.read(reset=reset) if wait else self._on_device.take() if reset else Totals()
        if split:
            if before_restart is not None:
                before_restart()
            self._on_device.start()
            self._region._open_at(self._now())
        return totals

    @property
    def _times(self) -> HostTimes | DeviceTimes:
        return self._on_host if self._on_device is None else self._on_device

    def take(self) -> Totals:
        """Return the finished times since the last reset and restart from zero, without waiting.

        Times on their way from the device still go to the returned object.
        """
        return self._times.take()

    def lifetime(self) -> Totals:
        return self._times.lifetime()

    def recorded(self, *, reset: bool = False) -> Totals:
        return self._times.recorded(reset=reset)

    def wait(self) -> None:
        if self._on_device is not None:
            self._on_device.wait()


_users: WeakValueDictionary[int, NamedTimer] = WeakValueDictionary()
"""Which named timer uses a region, by its ``id``. The timer below keeps the region for good."""


class ElapsedTime:
    """A known time between two events on the device."""

    __slots__ = ("_ms",)

    def __init__(self, ms: float) -> None:
        self._ms = ms

    def get_elapsed_msec(self) -> float:
        return self._ms


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
        return self._on_device is None

    @property
    def start_event(self) -> None:
        """None: the events belong to a pool and are reused as soon as they have been read."""
        return

    @property
    def start_time(self) -> float:
        """When it was last started, in s on the clock of the timer below; 0.0 before, and on a device."""
        return self._region._opened_ns() / 1e9 if self._on_device is None else 0.0

    @property
    def end_time(self) -> float:
        """When it was last stopped, in s on the clock of the timer below; 0.0 before, and on a device."""
        return self._on_host.ended_ns() / 1e9 if self._on_device is None else 0.0

    @property
    def event_timers(self) -> list[float] | list[ElapsedTime]:
        """The times since the last reset: in s on the host, objects with ``get_elapsed_msec()`` on a device."""
        durations_ns = self.read().durations_ns
        if self._on_device is None:
            return [duration_ns / 1e9 for duration_ns in durations_ns]
        return [ElapsedTime(duration_ns / 1e6) for duration_ns in durations_ns]

    @property
    def elapsed_records(self) -> list[float] | None:
        """The times since the last reset in ms, the latest 65 536 of them; None if there is none."""
        return [duration_ns / 1e6 for duration_ns in self.read().durations_ns] or None

    def _get_elapsed_msec(self) -> float:
        return self.read().total_ns / 1e6
