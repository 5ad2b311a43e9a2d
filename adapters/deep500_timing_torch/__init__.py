"""Times regions of PyTorch programs, on the CPU and on the accelerator.

::

    import deep500_timing_torch as timer

    tmr = timer.CPUGPUTimer()
    for batch in tmr.steps(loader):
        with tmr.region(timer.TimeType.FORWARD, gpu=True):
            loss = criterion(model(batch))
    tmr.print_all_time_stats()

The names are those of ``deep500_timing``, with a :class:`CPUGPUTimer` that finds the accelerator itself.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import Any as _Any

try:
    import torch as _torch  # noqa: F401 (found missing here, with a remedy, rather than in a module below)
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    from deep500_timing.adapters import missing_package as _missing

    raise _missing("torch", extra="torch", caller="import deep500_timing_torch") from _error

from deep500_timing import (
    Clock,
    DeviceClock,
    DeviceUnavailableError,
    ExportError,
    HostClock,
    InvalidKeyError,
    MissingPackageError,
    NoTimesError,
    Region,
    RegionError,
    RegionMismatchError,
    RegionNotOpenError,
    RegionOpenError,
    RegionTimes,
    Snapshot,
    Timer,
    TimeStats,
    TimeType,
    TimingError,
    TimingWarning,
    compiled,
    read_rank_logs,
    trim_mean,
)
from deep500_timing_torch._clock import CudaEventClock
from deep500_timing_torch._compile import prepare as _prepare
from deep500_timing_torch._events import watch_all_captures as _watch_all_captures
from deep500_timing_torch._ranklog import global_timer
from deep500_timing_torch._recompute import prepare as _prepare_recomputation
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.event_timer import CudaEventTimer

__all__ = [
    "Autolog",  # pyright: ignore[reportUnsupportedDunderAll]
    "CPUGPUTimer",
    "Clock",
    "CudaEventClock",
    "CudaEventTimer",
    "DeviceClock",
    "DeviceUnavailableError",
    "ExportError",
    "HostClock",
    "InvalidKeyError",
    "MissingPackageError",
    "NoTimesError",
    "NoopTimer",  # pyright: ignore[reportUnsupportedDunderAll]
    "Region",
    "RegionError",
    "RegionMismatchError",
    "RegionNotOpenError",
    "RegionOpenError",
    "RegionTimes",
    "Snapshot",
    "SynchronizedWallClockTimer",  # pyright: ignore[reportUnsupportedDunderAll]
    "ThroughputTimer",  # pyright: ignore[reportUnsupportedDunderAll]
    "TimeStats",
    "TimeType",
    "Timer",
    "TimingError",
    "TimingWarning",
    "autolog",  # pyright: ignore[reportUnsupportedDunderAll]
    "compiled",
    "global_timer",
    "read_rank_logs",
    "trim_mean",
]

_prepare()
_prepare_recomputation()
_watch_all_captures()


def __getattr__(name: str) -> _Any:
    """Import the core's autolog and DeepSpeed's timers on first use."""
    if name in __all__:
        home = "deep500_timing" if name in ("Autolog", "autolog") else "deep500_timing_deepspeed.wallclock"
        return getattr(_import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
