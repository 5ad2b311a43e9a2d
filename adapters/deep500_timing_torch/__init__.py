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

try:
    import torch as _torch  # noqa: F401 (PyTorch is needed from here on)
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    from deep500_timing.adapters import missing_package as _missing

    raise _missing("torch", extra="torch", caller="import deep500_timing_torch") from _error

import deep500_timing as _core
from deep500_timing.adapters import lazy_names as _lazy_names
from deep500_timing_torch._clock import CudaEventClock
from deep500_timing_torch._clock import watch_all_captures as _watch_all_captures
from deep500_timing_torch._compile import prepare as _prepare
from deep500_timing_torch._recompute import prepare as _prepare_recomputation
from deep500_timing_torch._timer import CPUGPUTimer, global_timer
from deep500_timing_torch.event_timer import CudaEventTimer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing import *  # type: ignore[assignment]  # noqa: F403 (its own names are the next ones)
    from deep500_timing_torch._timer import CPUGPUTimer, global_timer

__all__ = ["CPUGPUTimer", "CudaEventClock", "CudaEventTimer", "global_timer"]
__all__ += _core.__all__
__all__[:] = sorted(set(__all__))

_prepare()
_prepare_recomputation()
_watch_all_captures()

__getattr__, __dir__ = _lazy_names(
    __name__, __all__, {name: "deep500_timing" for name in __all__ if name not in globals()}
)
