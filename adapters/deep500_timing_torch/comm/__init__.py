"""``torch.distributed``, with every operation timed, sized and rated.

::

    from deep500_timing_torch import comm as dist    # instead of: import torch.distributed as dist

    dist.init_process_group("nccl")
    ...
    dist.log_summary(show_straggler=True)

Everything that ``torch.distributed`` has is here under its own name; the operations are timed on their way. Nothing
waits for the device or for another rank on account of the timing, so what overlapped still does. Code that cannot
change its import is timed by :func:`instrument`, DDP's gradient buckets by :func:`instrument_ddp`, operations of your
own by :func:`timed_op`.

On the CPU a blocking operation takes as long as its call; on a device, as long as from an event before it to one after
it on the current stream. An asynchronous operation tells how long its call took (*issue*), when it was done, and how
long the caller waited for it (*exposed*).
"""

from __future__ import annotations

import os as _os
from importlib import import_module as _import_module
from typing import Any

import torch.distributed as _dist

if not _dist.is_available():
    raise ImportError(
        "deep500_timing_torch.comm requires a PyTorch with torch.distributed, which this build was made without "
        "(USE_DISTRIBUTED=0); install one that has it: https://pytorch.org/get-started"
    )

if _os.environ.get("DEEP500_TIMING_PURE"):
    from deep500_timing_torch.comm import _plain as _plain  # before any module that has a compiled form

from deep500_timing_torch.comm._ddp import instrument_ddp
from deep500_timing_torch.comm._instrument import Instrument, instrument
from deep500_timing_torch.comm._log import LOG as _LOG
from deep500_timing_torch.comm._public import OPERATIONS as _OPERATIONS
from deep500_timing_torch.comm._public import P2POp
from deep500_timing_torch.comm._report import CommSummary, log_summary, summary
from deep500_timing_torch.comm._settings import configure
from deep500_timing_torch.comm._straggler import Skew
from deep500_timing_torch.comm._summary import OpTimes
from deep500_timing_torch.comm._timed import timed_op
from deep500_timing_torch.comm._work import TimedWork

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
    """Pass on whatever ``torch.distributed`` has, and DeepSpeed's names from the adapter that has them."""
    if hasattr(_dist, name):
        return getattr(_dist, name)
    if not name.startswith("_"):
        deepspeed = _import_module("deep500_timing_deepspeed.comm")
        if name in ("cdb", "global_comm_backend", *deepspeed.__all__):
            return getattr(deepspeed, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has torch.distributed")


def __dir__() -> list[str]:
    """The names of both modules."""
    return sorted({*globals(), *dir(_dist)})
