"""The operations of ``torch.distributed``, timed."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._timed import original_of, timed_operation

_new_p2p_op: Any = c10d.P2POp.__new__
_init_p2p_op: Any = c10d.P2POp.__init__


# PyTorch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor to *_single; older ones have the old names
# only, and newer ones may drop them. Both are here in either case.
_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


_RENAMED: dict[str, Any] = {
    "all_gather_single": _gather_single,
    "all_gather_into_tensor": _gather_single,
    "reduce_scatter_single": _scatter_single,
    "reduce_scatter_tensor": _scatter_single,
}


def _timed_operations() -> dict[str, Any]:
    operations = {}
    for name in OPS:
        function = getattr(dist, name, None) or _RENAMED.get(name)
        if function is not None:
            operations[name] = timed_operation(name, function)
    return operations


OPERATIONS: dict[str, Any] = _timed_operations()
"""Every timed operation that this PyTorch has, by name."""


def new_p2p_op(cls: type, op: Any, *args: Any, **kwargs: Any) -> Any:
    """``P2POp.__new__`` that takes timed operations for their originals."""
    return _new_p2p_op(cls, original_of(op), *args, **kwargs)


def init_p2p_op(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
    """``P2POp.__init__`` that keeps the original operation: the batch as a whole is timed."""
    _init_p2p_op(self, original_of(op), *args, **kwargs)


class P2POp(c10d.P2POp):
    """``torch.distributed.P2POp`` that takes the timed ``isend`` and ``irecv`` as well as the original ones."""

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments as the original does."""
        return new_p2p_op(cls, op, *args, **kwargs)

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        """Keep the arguments as the original does."""
        init_p2p_op(self, op, *args, **kwargs)
