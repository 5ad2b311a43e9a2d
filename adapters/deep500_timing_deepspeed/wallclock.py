"""DeepSpeed's named timers for PyTorch programs: the names of ``deepspeed.utils.timer``, over the device's events.

::

    from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer   # was: from deepspeed.utils.timer

Where PyTorch sees an accelerator, times are between events on its current stream; else on the host's clock. See
:mod:`deep500_timing.wallclock`.
"""

from __future__ import annotations

from functools import partial, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from deep500_timing import trim_mean  # noqa: F401 (public here too)
from deep500_timing import wallclock as _core
from deep500_timing.adapters import NamedTimer, timer_for
from deep500_timing.throughput import ThroughputTimer as _CoreThroughputTimer
from deep500_timing.wallclock import (
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_INNER_MICRO_TIMER,
    BACKWARD_MICRO_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
    BACKWARD_REDUCE_MICRO_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    STEP_GLOBAL_TIMER,
    STEP_MICRO_TIMER,
    NoopTimer,  # noqa: F401 (public here too)
)
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.event_timer import CudaEventTimer
from deep500_timing_torch.memory import TorchMemory

if TYPE_CHECKING:
    import torch

    from deep500_timing import Clock, DeviceClock, Timer
    from deep500_timing.memory import MemoryReader

__all__ = [
    "BACKWARD_TIMERS",
    "FORWARD_TIMERS",
    "PSUTILS_INSTALLED",
    "STEP_TIMERS",
    "TIME_EPSILON",
    "CudaEventTimer",
    "time_engine",
]
__all__ += _core.__all__

FORWARD_TIMERS = [FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER]
BACKWARD_TIMERS = [
    BACKWARD_MICRO_TIMER,
    BACKWARD_GLOBAL_TIMER,
    BACKWARD_INNER_MICRO_TIMER,
    BACKWARD_INNER_GLOBAL_TIMER,
    BACKWARD_REDUCE_MICRO_TIMER,
    BACKWARD_REDUCE_GLOBAL_TIMER,
]
STEP_TIMERS = [STEP_MICRO_TIMER, STEP_GLOBAL_TIMER]
TIME_EPSILON = 1e-6
"""Seconds that DeepSpeed adds to a time before it divides by it; nothing here needs it."""
PSUTILS_INSTALLED = find_spec("psutil") is not None


def _timer_for(
    timer: Timer | None, device: torch.device | str | None, clock: Clock | None, device_clock: DeviceClock | None
) -> Timer:
    # The timer given, or one of the accelerator that is there.
    if timer is not None and device is not None:
        raise ValueError("Making named timers with timer= and a device or clock: the timer has its own. Leave one out.")
    return timer_for(timer, clock, device_clock, partial(CPUGPUTimer, device))


class SynchronizedWallClockTimer(_core.SynchronizedWallClockTimer):
    """The core's :class:`deep500_timing.wallclock.SynchronizedWallClockTimer`, on the accelerator where there is one.

    ``device`` names it: None for the accelerator that is there, ``"cpu"`` for the host's clock. ``clock`` is the host
    clock of a new timer, and ``device_clock`` a device clock in place of ``device``. The rest is the core's.

    Raises:
        DeviceUnavailableError: The device that was named is not there.
    """

    memory_reader: MemoryReader | None = TorchMemory()

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(_timer_for(timer, device, clock, device_clock), **settings)


class ThroughputTimer(_CoreThroughputTimer):
    """The core's :class:`deep500_timing.throughput.ThroughputTimer`, on the accelerator where there is one.

    ``ThroughputTimer(config, batch_size=...)`` of DeepSpeed's later releases works too: ``config.enabled`` False makes
    it a no-op, and ``config.synchronized`` False takes the host's clock. No setting synchronizes at each step.
    ``device``, ``clock`` and ``device_clock`` are as for :class:`SynchronizedWallClockTimer`, the rest is the core's.
    """

    memory_reader: MemoryReader | None = TorchMemory()

    def __init__(
        self,
        *args: Any,
        device: torch.device | str | None = None,
        timer: Timer | None = None,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        **settings: Any,
    ) -> None:
        config = settings.pop("config", None)
        if args and hasattr(args[0], "enabled"):
            config, *args = args  # type: ignore[assignment]
        if config is not None and not getattr(config, "synchronized", True) and timer is None and device is None:
            device = "cpu"
        self._enabled = config is None or bool(config.enabled)
        super().__init__(*args, timer=_timer_for(timer, device, clock, device_clock), **settings)
        self.config = config

    def start(self) -> None:
        """As :meth:`deep500_timing.throughput.ThroughputTimer.start`."""
        if self._enabled:
            super().start()


def _start_nothing(self: object) -> None:
    """Stands for a start in a compiled function, where a clock would break the graph."""


def _stop_nothing(self: object, reset: bool = False, record: bool = False) -> None:
    """Stands for a stop in a compiled function."""


NamedTimer.start._torchdynamo_inline = _start_nothing  # type: ignore[attr-defined]
NamedTimer.stop._torchdynamo_inline = _stop_nothing  # type: ignore[attr-defined]


def time_engine(engine: Any, timers: _core.SynchronizedWallClockTimer | None = None) -> Any:
    """Replace the timers of a DeepSpeed engine.

    The engine logs its ``wall_clock_breakdown`` through them from then on. Nested starts of one name, as
    ``PipelineEngine`` makes them, time the outermost pair; its gradient reduction, which it does not time itself, is
    timed as ``bwd_allreduce``.

    Args:
        engine: The result of ``deepspeed.initialize``, also a ``PipelineEngine``.
        timers: The timers to put in; reentrant ones are made if None.

    Returns:
        The timers.
    """
    own = engine.timers
    timers = SynchronizedWallClockTimer(reentrant=True) if timers is None else timers
    engine.timers = timers
    # Optimizers were handed the engine's timers when they were made.
    optimizer: Any = getattr(engine, "optimizer", None)
    for holder in (optimizer, getattr(optimizer, "parameter_offload", None)):
        if holder is not None and getattr(holder, "timers", None) is own:
            holder.timers = timers
    if hasattr(engine, "_exec_reduce_grads"):
        # A pipeline's schedule looks its instructions up in a table of the class's functions.
        engine._INSTRUCTION_MAP = {
            instruction: _timed_reduction(function, timers)
            if getattr(function, "__name__", "") == "_exec_reduce_grads"
            else function
            for instruction, function in engine._INSTRUCTION_MAP.items()
        }
    return timers


def _timed_reduction(function: Any, timers: _core.SynchronizedWallClockTimer) -> Any:
    @wraps(function)
    def timed(engine: Any, *args: Any, **kwargs: Any) -> Any:
        names = (BACKWARD_REDUCE_MICRO_TIMER, BACKWARD_REDUCE_GLOBAL_TIMER) if engine.wall_clock_breakdown() else ()
        for name in names:
            timers(name).start()
        try:
            return function(engine, *args, **kwargs)
        finally:
            for name in names:
                timers(name).stop()

    return timed
