"""Times for TensorFlow and for Keras on any backend: the core's public face, a GPU timer over CuPy, a Keras callback.

::

    import deep500_timing_tensorflow as timer

    tmr = timer.CPUGPUTimer()
    model.fit(x, y, callbacks=[timer.TimerCallback(tmr)])
    tmr.print_all_time_stats()

Importing it imports neither TensorFlow nor Keras nor CuPy: CuPy is looked for when a ``CPUGPUTimer`` is made, Keras
when ``TimerCallback`` is first named, TensorFlow when a Keras model that runs on it trains.
"""

from __future__ import annotations

import deep500_timing as _core
from deep500_timing import (
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
    Timer,
    TimeType,
    TimingError,
    TimingWarning,
    compiled,
)
from deep500_timing_tensorflow._timer import CPUGPUTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing import (
        Clock,
        DeviceClock,
        RegionTimes,
        Snapshot,
        TimeStats,
        global_timer,
        read_rank_logs,
        trim_mean,
    )
    from deep500_timing_tensorflow._clock import CupyEventClock
    from deep500_timing_tensorflow._keras import TimerCallback
    from deep500_timing_tensorflow._timed_step import timed_step

__all__ = [
    "CPUGPUTimer",
    "Clock",
    "CupyEventClock",
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
    "TimerCallback",
    "TimingError",
    "TimingWarning",
    "compiled",
    "global_timer",
    "read_rank_logs",
    "timed_step",
    "trim_mean",
]

_LAZY = {"CupyEventClock": "_clock", "timed_step": "_timed_step"}
_LAZY_IN_CORE = {
    "Clock",
    "DeviceClock",
    "RegionTimes",
    "Snapshot",
    "TimeStats",
    "global_timer",
    "read_rank_logs",
    "trim_mean",
}


def __getattr__(name: str) -> Any:
    """Import on first use; ``TimerCallback`` derives from a class of the Keras that is there."""
    value: Any
    if name == "TimerCallback":
        from deep500_timing_tensorflow._keras import callback_class

        value = callback_class()
    elif name in _LAZY:
        from importlib import import_module

        value = getattr(import_module(f"deep500_timing_tensorflow.{_LAZY[name]}"), name)
    elif name in _LAZY_IN_CORE:
        value = getattr(_core, name)
    else:
        raise AttributeError(f"module 'deep500_timing_tensorflow' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names, imported yet or not."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
