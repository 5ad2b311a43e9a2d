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
    from deep500_timing._base import plain as plain  # before any module that has a compiled form

from deep500_timing._base.clock import HostClock
from deep500_timing._base.lazy import lazy_names as _lazy_names
from deep500_timing._base.time_type import TimeType
from deep500_timing._recording.recorder import COMPILED as compiled  # noqa: N811 (part of the public face, where it reads as an adjective)
from deep500_timing._recording.recorder import Region
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
from deep500_timing.timer import CPUGPUTimer, Timer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.protocols import Clock, DeviceClock
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot
    from deep500_timing._summary.stats import TimeStats, trim_mean
    from deep500_timing.ranklog import global_timer, read_rank_logs

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
    "global_timer",
    "read_rank_logs",
    "trim_mean",
]

# What needs numpy or typing is imported when it is asked for, so that importing the package costs next to nothing.
_LAZY = {
    "Clock": "deep500_timing._base.protocols",
    "DeviceClock": "deep500_timing._base.protocols",
    "RegionTimes": "deep500_timing._summary.snapshot",
    "Snapshot": "deep500_timing._summary.snapshot",
    "TimeStats": "deep500_timing._summary.stats",
    "global_timer": "deep500_timing.ranklog",
    "read_rank_logs": "deep500_timing.ranklog",
    "trim_mean": "deep500_timing._summary.stats",
}


__getattr__, __dir__ = _lazy_names(__name__, __all__, _LAZY)
