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
from importlib import import_module as _import_module

if _os.environ.get("DEEP500_TIMING_PURE"):  # before any module that has a compiled form
    from pathlib import Path as _Path

    from deep500_timing._base.plain import load_plain as _load_plain

    _load_plain(
        __name__,
        _Path(__file__).parent,
        ("_base/stack", "_recording/intervals", "_recording/recorder", "devices/_device", "devices/_pool", "timer"),
    )

from deep500_timing._base.lazy import homes_in as _homes_in
from deep500_timing._base.lazy import lazy_names as _lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.names import TimeType
    from deep500_timing._base.protocols import Clock, DeviceClock, HostClock
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


# Each name is imported when it is first asked for: `deep500-timing run` imports this package before the user's program,
# which may need none of them.
_HOMES = {
    "_base.names": "TimeType",
    "_base.protocols": "Clock DeviceClock HostClock",
    "_launch.autolog": "Autolog autolog",
    "_recording.recorder": "Region",
    "_summary.snapshot": "RegionTimes Snapshot",
    "_summary.stats": "TimeStats trim_mean",
    "exceptions": " ".join(name for name in __all__ if name.endswith(("Error", "Warning"))),
    "ranklog": "global_timer read_rank_logs",
    "timer": "CPUGPUTimer Timer",
}
_COMPILED = {"compiled": lambda: _import_module(f"{__name__}._recording.recorder").COMPILED}
__getattr__, __dir__ = _lazy_names(__name__, __all__, _homes_in(__name__, _HOMES) | _COMPILED)


def load_ipython_extension(ipython: object) -> None:
    """Time the notebook from here on, for ``%load_ext deep500_timing``."""
    from deep500_timing._launch.autolog import autolog

    autolog()


def unload_ipython_extension(ipython: object) -> None:
    """End the timing and show the table, for ``%unload_ext deep500_timing``."""
    from deep500_timing._launch.autolog import autolog

    autolog().close()
