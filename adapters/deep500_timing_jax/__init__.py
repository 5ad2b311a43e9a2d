"""Times for plain JAX: the core's public names, a timer that knows when outputs are ready, compilations.

::

    import deep500_timing_jax as timer

    tmr = timer.CPUGPUTimer()
    step = timer.timed_step(jax.jit(train_step), tmr, output=lambda result: result[-1])
    with timer.Compilations(tmr):
        for batch in tmr.steps(loader):
            params, loss = step(params, batch)
    tmr.print_all_time_stats()

Importing it does not import JAX.
"""

from __future__ import annotations

import deep500_timing as _core
from deep500_timing.adapters import lazy_names as _lazy_names
from deep500_timing_jax._compilations import Compilations
from deep500_timing_jax._timer import CPUGPUTimer, OutputClock, TimedStep, timed_step

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing import *  # type: ignore[assignment]  # noqa: F403 (its own names are the next ones)
    from deep500_timing_jax._timer import CPUGPUTimer

__all__ = ["CPUGPUTimer", "Compilations", "OutputClock", "TimedStep", "timed_step"]
__all__ += _core.__all__
__all__[:] = sorted({*__all__})  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = _lazy_names(
    __name__, __all__, {name: "deep500_timing" for name in __all__ if name not in globals()}
)
