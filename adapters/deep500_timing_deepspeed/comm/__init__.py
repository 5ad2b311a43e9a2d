"""A drop-in for ``deepspeed.comm``: every operation is timed, sized and rated.

::

    from deep500_timing_deepspeed import comm as dist    # instead of: from deepspeed import comm as dist

    dist.init_distributed()
    ...
    dist.log_summary(show_straggler=True)

Everything that :mod:`deep500_timing_torch.comm` has is here. Operations also take DeepSpeed's arguments ``prof``,
``log_name`` and ``debug``, and DeepSpeed's parameter names. ``comms_logger`` shows the log in DeepSpeed's form.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as _dist

from deep500_timing_deepspeed.comm import _names
from deep500_timing_deepspeed.comm._names import *  # noqa: F403 (its `__all__` lists DeepSpeed's names)
from deep500_timing_deepspeed.comm._operations import OPERATIONS as _OPERATIONS
from deep500_timing_torch import comm as _torch_comm

__all__ = sorted({*_names.__all__, *_OPERATIONS, *_torch_comm.__all__})  # pyright: ignore[reportUnsupportedDunderAll]
globals().update({name: getattr(_torch_comm, name) for name in _torch_comm.__all__ if name not in _names.__all__})
globals().update(_OPERATIONS)


def __getattr__(name: str) -> Any:
    """Return the current backend by DeepSpeed's two names for it, or a name of ``torch.distributed``."""
    if name in ("cdb", "global_comm_backend"):
        return _names.current_backend()
    if name in _names.FROM_DEEPSPEED:
        return _names.helper_of_deepspeed(name)
    if hasattr(_dist, name):
        return getattr(_dist, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}, and neither has torch.distributed")


def __dir__() -> list[str]:
    return sorted({*globals(), *dir(_torch_comm)})
