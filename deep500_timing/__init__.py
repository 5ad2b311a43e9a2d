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

from deep500_timing._base.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from deep500_timing._base.protocols import Clock, DeviceClock, HostClock
    from deep500_timing._base.time_type import TimeType
    from deep500_timing._launch.autolog import Autolog, autolog
    from deep500_timing._recording.recorder import COMPILED as compiled  # noqa: N811 (an adjective in the public API)
    from deep500_timing._recording.recorder import Region
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot
    from deep500_timing._summary.stats import TimeStats, trim_mean
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
    from deep500_timing.ranklog import global_timer, read_rank_logs
    from deep500_timing.timer import CPUGPUTimer, Timer

__all__ = [
    "Autolog",
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
    "autolog",
    "compiled",
    "global_timer",
    "read_rank_logs",
    "trim_mean",
]


def _is_compiled() -> bool:
    from deep500_timing._recording.recorder import COMPILED

    return COMPILED


# Each name is imported when it is first asked for: `deep500-timing run` imports this package before the user's program,
# which may need none of them.
_LAZY: dict[str, str | Callable[[], Any]] = {
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "deep500_timing.exceptions"),
    "Autolog": "deep500_timing._launch.autolog",
    "CPUGPUTimer": "deep500_timing.timer",
    "Clock": "deep500_timing._base.protocols",
    "DeviceClock": "deep500_timing._base.protocols",
    "HostClock": "deep500_timing._base.protocols",
    "Region": "deep500_timing._recording.recorder",
    "RegionTimes": "deep500_timing._summary.snapshot",
    "Snapshot": "deep500_timing._summary.snapshot",
    "TimeStats": "deep500_timing._summary.stats",
    "TimeType": "deep500_timing._base.time_type",
    "Timer": "deep500_timing.timer",
    "TimingWarning": "deep500_timing.exceptions",
    "autolog": "deep500_timing._launch.autolog",
    "compiled": _is_compiled,
    "global_timer": "deep500_timing.ranklog",
    "read_rank_logs": "deep500_timing.ranklog",
    "trim_mean": "deep500_timing._summary.stats",
}

__getattr__, __dir__ = _lazy_names(__name__, __all__, _LAZY)


def load_ipython_extension(ipython: object) -> None:
    """Time the notebook from here on, for ``%load_ext deep500_timing``."""
    from deep500_timing._launch.autolog import autolog

    autolog()


def unload_ipython_extension(ipython: object) -> None:
    """End the timing and show the table, for ``%unload_ext deep500_timing``."""
    from deep500_timing._launch.autolog import autolog

    autolog().close()
