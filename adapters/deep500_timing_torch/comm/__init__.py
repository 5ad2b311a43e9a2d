"""``torch.distributed``, with every operation timed, sized and rated.

::

    from deep500_timing_torch import comm as dist    # instead of: import torch.distributed as dist

    dist.init_process_group("nccl")
    ...
    dist.log_summary(show_straggler=True)

Everything that ``torch.distributed`` has is here under its own name, with the operations timed. The timing never waits
for the device or for another rank, so what overlapped still does. Code that cannot change its import is timed by
:func:`instrument`, which sees most and costs least; DDP's gradient buckets also by :func:`instrument_ddp`, your own
operations by :func:`timed_op`.

On the CPU the time of a blocking operation is that of its call. On a device it comes from NCCL's own events, or else
from an event before the operation and one after it on the current stream. An asynchronous operation has the time of
its call (*issue*), its own time, and the time that its caller waited for it (*exposed*).
"""

from __future__ import annotations

from pathlib import Path as _Path
from typing import Any

import torch.distributed as _dist

from deep500_timing import compiled as _compiled

if not _dist.is_available():
    raise ImportError(
        "deep500_timing_torch.comm requires a PyTorch with torch.distributed, which this build was made without "
        "(USE_DISTRIBUTED=0); install one that has it: https://pytorch.org/get-started"
    )

if not _compiled:
    from deep500_timing._base.plain import load_plain as _load_plain

    _load_plain(__name__, _Path(__file__).parent, ("_ops", "_settings", "_log", "_operation"))

from deep500_timing_torch.comm._ddp import instrument_ddp
from deep500_timing_torch.comm._functions import OPERATIONS as _OPERATIONS
from deep500_timing_torch.comm._functions import Instrument, P2POp, instrument, timed_op
from deep500_timing_torch.comm._handles import TimedWork
from deep500_timing_torch.comm._log import LOG as _LOG
from deep500_timing_torch.comm._report import CommSummary, OpTimes, log_summary, summary
from deep500_timing_torch.comm._settings import configure
from deep500_timing_torch.comm._straggler import Skew

__all__ = [
    "CommSummary",
    "Instrument",
    "OpTimes",
    "P2POp",
    "Skew",
    "TimedWork",
    "configure",
    "instrument",
    "instrument_ddp",
    "log_summary",
    "reset_log",
    "summary",
    "timed_op",
]

globals().update(_OPERATIONS)
_LOG.watch()

# What depends on the PyTorch that is installed: its public names, timed where they are operations.
__all__ += sorted({*_OPERATIONS, *(name for name in vars(_dist) if not name.startswith("_"))} - set(__all__))  # pyright: ignore[reportUnsupportedDunderAll]


def reset_log() -> None:
    """Forget every time recorded so far, for a summary of what comes next."""
    _LOG.reset()


def __getattr__(name: str) -> Any:
    """Pass on every other name of ``torch.distributed``."""
    if hasattr(_dist, name):
        return getattr(_dist, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has torch.distributed")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_dist)})
