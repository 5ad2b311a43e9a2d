"""Times for TensorFlow and for Keras on any backend: the core's public names, a GPU timer over CuPy, a Keras callback.

::

    import deep500_timing_tensorflow as timer

    tmr = timer.CPUGPUTimer()
    model.fit(x, y, callbacks=[timer.TimerCallback(tmr)])
    tmr.print_all_time_stats()

Importing it imports neither TensorFlow nor Keras nor CuPy: CuPy is looked for at the first ``gpu=True``, Keras
when ``TimerCallback`` is first named, TensorFlow when a Keras model that runs on it trains.
"""

from __future__ import annotations

from importlib import import_module as _import_module

import deep500_timing as _core
from deep500_timing.adapters import lazy_names as _lazy_names
from deep500_timing_tensorflow._clock import CPUGPUTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from deep500_timing import *  # type: ignore[assignment]  # noqa: F403 (its own names are the next ones)
    from deep500_timing_tensorflow._callback import TimerCallback
    from deep500_timing_tensorflow._clock import CPUGPUTimer, CupyEventClock
    from deep500_timing_tensorflow._timed_step import timed_step

__all__ = ["CPUGPUTimer", "CupyEventClock", "TimerCallback", "timed_step"]
__all__ += _core.__all__
__all__[:] = sorted({*__all__})  # pyright: ignore[reportUnsupportedDunderAll]

# Names that the core imports lazily; ``TimerCallback`` derives from a class of the Keras that is installed.
_HOMES: dict[str, str | Callable[[], Any]] = {
    **{name: "deep500_timing" for name in __all__ if name not in globals()},
    "CupyEventClock": "deep500_timing_tensorflow._clock",
    "TimerCallback": lambda: _import_module("deep500_timing_tensorflow._callback").callback_class(),
    "timed_step": "deep500_timing_tensorflow._timed_step",
}

__getattr__, __dir__ = _lazy_names(__name__, __all__, _HOMES)
