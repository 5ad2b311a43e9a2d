"""Named wall-clock timers in the shape of DeepSpeed's ``deepspeed.utils.timer``.

A script switches by changing the import::

    from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer  # device events where there is a device
    from deep500_timing.wallclock import SynchronizedWallClockTimer            # the host's clock, no framework needed

    timers = SynchronizedWallClockTimer()
    timers("fwd").start()
    ...
    timers("fwd").stop()
    timers.log(["fwd"])              # [Rank 0] time (ms) | fwd: 12.34

Times are in milliseconds throughout, as there; in ``get_mean`` too. Nothing waits for the device until a value is
read, and then only for the events that the value is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from deep500_timing._base.lazy import lazy_names as _lazy_names
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.launchers import rank_and_world, wants
from deep500_timing._named import DeepSpeedAttributes, check_normalizer, timer_for
from deep500_timing.exceptions import MissingPackageError
from deep500_timing.memory import HostMemory, MemoryReader, format_usage, read_or_none
from deep500_timing.throughput import ThroughputTimer

if TYPE_CHECKING:
    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing._summary.stats import trim_mean as trim_mean
    from deep500_timing.timer import Timer as Engine

__all__ = [
    "BACKWARD_GLOBAL_TIMER",
    "BACKWARD_INNER_GLOBAL_TIMER",
    "BACKWARD_INNER_MICRO_TIMER",
    "BACKWARD_MICRO_TIMER",
    "BACKWARD_REDUCE_GLOBAL_TIMER",
    "BACKWARD_REDUCE_MICRO_TIMER",
    "FORWARD_GLOBAL_TIMER",
    "FORWARD_MICRO_TIMER",
    "STEP_GLOBAL_TIMER",
    "STEP_MICRO_TIMER",
    "NoopTimer",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "trim_mean",
]

# Micro timers are of one micro-batch, global ones of a whole step with its accumulated micro-batches.
FORWARD_MICRO_TIMER = "fwd_microstep"
FORWARD_GLOBAL_TIMER = "fwd"
BACKWARD_MICRO_TIMER = "bwd_microstep"
BACKWARD_GLOBAL_TIMER = "bwd"
BACKWARD_INNER_MICRO_TIMER = "bwd_inner_microstep"
BACKWARD_INNER_GLOBAL_TIMER = "bwd_inner"
BACKWARD_REDUCE_MICRO_TIMER = "bwd_allreduce_microstep"
BACKWARD_REDUCE_GLOBAL_TIMER = "bwd_allreduce"
STEP_MICRO_TIMER = "step_microstep"
STEP_GLOBAL_TIMER = "step"


# ``trim_mean`` stands here for those who switch; it needs numpy, so it is imported on first use.
__getattr__, __dir__ = _lazy_names(__name__, __all__, {"trim_mean": "deep500_timing._summary.stats"})


class SynchronizedWallClockTimer:
    """A group of named timers.

    Args:
        timer: Your timer, which records the times as regions, for its snapshots and exporters; a new one (see
            :attr:`timer`) if None.
        clock: The host clock of a new timer; the system's monotonic clock if None.
        device_clock: The device clock of a new timer; the host's clock if None.
        reentrant: Starting a timer that runs is counted instead of being an error, and the time ends with the last
            stop. DeepSpeed's ``PipelineEngine`` nests starts of the same name.
        memory: Read the memory at every stop: True, or what reads it. It stands in the snapshots.
        logging_fn: Called by ``log`` with its line; ``print`` if None.
    """

    memory_reader: MemoryReader | None = None
    """What ``memory_usage`` asks; the host's memory if None. The torch adapter's subclass asks the device as well."""

    class Timer(DeepSpeedAttributes):
        """One named timer. Times are in milliseconds.

        ``start()`` and ``stop(reset=False, record=False)`` are errors where the timer runs already, or does not run.
        With ``reset`` a stop forgets earlier times. With ``record`` it keeps its time for ``mean``, which then
        stands on such times only, and which keeps them when ``elapsed`` or ``log`` resets the timer.
        """

        __slots__ = ()

        def elapsed(self, reset: bool = True) -> float:
            """The time since the last reset in ms, with the time of a running timer so far."""
            return self.read(reset=reset).total_ns / 1e6

        def mean(self) -> float:
            """The mean of the times since the last reset in ms, without the largest and smallest tenth of them.

            0.0 if there are none. It uses the latest 65 536 times at most, or only the times of ``stop(record=True)``
            if there are any.
            """
            return self._mean(reset=False)

        def _mean(self, *, reset: bool) -> float:
            from deep500_timing._summary.stats import TRIM, trim_mean

            totals = self.read(reset=reset)
            recorded = self.recorded(reset=reset)
            chosen = recorded if recorded.count else totals
            return trim_mean([duration_ns / 1e6 for duration_ns in chosen.durations_ns], TRIM)

        def reset(self) -> None:
            """Forget everything, the start of a timer that runs included."""
            self.forget_running()
            self.take()
            self.recorded(reset=True)

    def __init__(
        self,
        timer: Engine | None = None,
        *,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        reentrant: bool = False,
        memory: bool | MemoryReader = False,
        logging_fn: Callable[[str], object] | None = None,
    ) -> None:
        self.timer = timer_for(timer, clock, device_clock)
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}
        self._reentrant = reentrant
        self._logging_fn = logging_fn
        if memory is True:
            memory = self.memory_reader or HostMemory()
        self._memory: Any = None if memory is False else memory

    def __call__(self, name: str) -> Timer:
        """The timer of that name, made if there is none yet."""
        try:
            return self.timers[name]
        except KeyError:
            timer = self.Timer(name, self.timer, reentrant=self._reentrant, memory=self._memory)
            return self.timers.setdefault(name, timer)

    def get_timers(self) -> dict[str, Timer]:
        """The timers by name."""
        return self.timers

    @classmethod
    def memory_usage(cls) -> str:
        """The memory in use now, as a line that begins with `` | ``.

        It has DeepSpeed's four numbers where a device is known, with 1024³ bytes to the GB, and the host's. Peaks are
        those since the program last reset its framework's counters; nothing resets them here.
        """
        reader = cls.memory_reader
        if reader is None:
            try:
                reader = HostMemory()
            except MissingPackageError as error:
                warn_once(str(error))
                return format_usage(None)
        return format_usage(read_or_none(reader))

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Log the times of some timers in one line, in ms.

        Args:
            names: The timers; one that does not exist is left out.
            normalizer: What to divide each time by, such as the number of steps since the last log.
            reset: Restart from zero.
            memory_breakdown: Add the memory in use now.
            ranks: Where to log: rank 0 if None, every rank if -1 is among them.

        Raises:
            ValueError: ``normalizer`` is not positive.
        """
        check_normalizer("log", normalizer)
        here = wants(ranks)
        line = "time (ms)"
        for name in names:
            if name in self.timers:
                totals = self.timers[name].read(reset=reset, wait=here)
                line += f" | {name}: {totals.total_ns / 1e6 / normalizer:.2f}"
                if totals.missing:
                    line += f" ({totals.missing} of {totals.expected} not timed)"
        if not here:
            return
        if memory_breakdown:
            line += self.memory_usage()
        (self._logging_fn or print)(f"[Rank {rank_and_world()[0]}] {line}")

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """The means of some timers in ms, see :meth:`Timer.mean`; arguments as for :meth:`log`."""
        check_normalizer("get_mean", normalizer)
        return {name: self.timers[name]._mean(reset=reset) / normalizer for name in names if name in self.timers}


class NoopTimer:
    """A group of timers that does nothing: a script runs unchanged with timing off.

    Every time it is asked for is 0, as in the original, and ``get_mean`` is empty.
    """

    class Timer:
        """A timer that does nothing."""

        name_ = "no-op"
        started_ = False

        def start(self, *_: object, **__: object) -> None:
            """Do nothing, with any arguments."""

        stop = reset = start

        def elapsed(self, reset: bool = True) -> float:
            """Nothing was timed: 0."""
            return 0

        mean = elapsed

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """The one timer, for any name."""
        return self.timer

    def get_timers(self) -> dict[str, Timer]:
        """No timer."""
        return {}

    @staticmethod
    def memory_usage() -> str:
        """Nothing."""
        return ""

    def log(self, *args: object, **settings: object) -> None:
        """Log nothing."""

    def get_mean(self, *args: object, **settings: object) -> dict[str, float]:
        """No means."""
        return {}
