"""DeepSpeed's names over this project's timing: timers, ``comm``, and a pipeline engine for a subset of its features.

::

    import deep500_timing_deepspeed as deepspeed     # was: import deepspeed
    from deep500_timing_deepspeed.pipe import PipelineModule

DeepSpeed need not be installed. :mod:`~deep500_timing_deepspeed.wallclock` has the names of ``deepspeed.utils.timer``,
:mod:`~deep500_timing_deepspeed.comm` those of ``deepspeed.comm``, and :mod:`~deep500_timing_deepspeed.pipe` those of
pipelines; ``instrument_deepspeed`` and ``time_engine`` time the engine of an installed DeepSpeed.
"""

from __future__ import annotations

from importlib import import_module

from deep500_timing.adapters import lazy_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_deepspeed import comm
    from deep500_timing_deepspeed.comm import init_distributed
    from deep500_timing_deepspeed.pipe import (
        PipelineEngine,
        PipelineModule,
        add_config_arguments,
        initialize,
        instrument_deepspeed,
    )
    from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer, ThroughputTimer, time_engine

__all__ = [
    "PipelineEngine",
    "PipelineModule",
    "SynchronizedWallClockTimer",
    "ThroughputTimer",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "instrument_deepspeed",
    "time_engine",
]

_PIPE = ("PipelineEngine", "PipelineModule", "add_config_arguments", "initialize", "instrument_deepspeed")
_WALLCLOCK = ("SynchronizedWallClockTimer", "ThroughputTimer", "time_engine")
_HOMES: dict[str, str | Callable[[], object]] = {
    **dict.fromkeys(_PIPE, "deep500_timing_deepspeed.pipe"),
    **dict.fromkeys(_WALLCLOCK, "deep500_timing_deepspeed.wallclock"),
    "comm": lambda: import_module("deep500_timing_deepspeed.comm"),
    "init_distributed": "deep500_timing_deepspeed.comm",
}

__getattr__, __dir__ = lazy_names(__name__, __all__, _HOMES)
