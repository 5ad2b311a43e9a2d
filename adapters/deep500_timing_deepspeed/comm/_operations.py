"""The operations of ``deep500_timing_torch.comm``, three that DeepSpeed adds, and DeepSpeed's ways of calling them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing_deepspeed.comm._forms import accepting
from deep500_timing_torch.comm import _timed
from deep500_timing_torch.comm._timed import original_of, timed_operation

if TYPE_CHECKING:
    import torch

# PyTorch 2.13 renamed these two; `_timed` has them under both names.
_gather_single: Any = original_of(_timed.OPERATIONS["all_gather_single"])
_scatter_single: Any = original_of(_timed.OPERATIONS["reduce_scatter_single"])


def _inference_all_reduce(
    tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Any:
    """All-reduce for inference; here an ordinary one."""
    return original_of(dist.all_reduce)(tensor, op=op, group=group, async_op=async_op)


def _reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Reduce-scatter from one tensor into another."""
    return _scatter_single(output_tensor, tensor, op=op, group=group, async_op=async_op)


def _allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Any:
    """All-gather from one tensor into another."""
    return _gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


_ADDED: dict[str, Any] = {
    "allgather_fn": _allgather_fn,
    "inference_all_reduce": _inference_all_reduce,
    "reduce_scatter_fn": _reduce_scatter_fn,
}

OPERATIONS: dict[str, Any] = {
    name: accepting(name, operation)
    for name, operation in (
        *_timed.OPERATIONS.items(),
        *((name, timed_operation(name, function)) for name, function in _ADDED.items()),
    )
}
"""Every timed operation, by name."""
