"""A timer that people leave switched on in their training runs.

::

    import deep500_timing as timer

    tmr = timer.Timer()
    with tmr.region(timer.TimeType.BATCH):
        ...
    tmr.print_all_time_stats()

For times on a GPU import ``deep500_timing_torch`` or ``deep500_timing_tensorflow`` instead; the names are the same.
"""

from __future__ import annotations

import os as _os

if _os.environ.get("DEEP500_TIMING_PURE"):
    from deep500_timing import _pure as _pure  # before any module that has a compiled form

from deep500_timing._clock import HostClock
from deep500_timing._recorder import COMPILED as compiled  # noqa: N811 (part of the public face, where it reads as an adjective)
from deep500_timing._recorder import Region
from deep500_timing._time_type import TimeType
from deep500_timing._timer import CPUGPUTimer, Timer
from deep500_timing.exceptions import (
    DeviceUnavailableError,
    ExportError,
    InvalidKeyError,
    MissingPackageError,
    NoTimesError,
    RegionError,
    RegionMismatchError,
    RegionNotOpenError,
    RegionOpenError,
    TimingError,
    TimingWarning,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing._protocols import Clock, DeviceClock
    from deep500_timing._snapshot import RegionTimes, Snapshot
    from deep500_timing._stats import TimeStats, trim_mean

__all__ = [
    "CPUGPUTimer",
    "Clock",
    "DeviceClock",
    "DeviceUnavailableError",
    "ExportError",
    "HostClock",
    "InvalidKeyError",
    "MissingPackageError",
    "NoTimesError",
    "Region",
    "RegionError",
    "RegionMismatchError",
    "RegionNotOpenError",
    "RegionOpenError",
    "RegionTimes",
    "Snapshot",
    "TimeStats",
    "TimeType",
    "Timer",
    "TimingError",
    "TimingWarning",
    "compiled",
    "trim_mean",
]

# What needs numpy or typing is imported when it is asked for, so that importing the package costs next to nothing.
_LAZY = {
    "Clock": "_protocols",
    "DeviceClock": "_protocols",
    "RegionTimes": "_snapshot",
    "Snapshot": "_snapshot",
    "TimeStats": "_stats",
    "trim_mean": "_stats",
}


def __getattr__(name: str) -> Any:
    """Import the names of ``_LAZY`` on first use."""
    if name in _LAZY:
        from importlib import import_module

        value = getattr(import_module(f"deep500_timing.{_LAZY[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'deep500_timing' has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted(set(__all__) | {name for name in globals() if name.startswith("__")})
