"""DeepSpeed's ways of calling an operation: its parameter names, ``prof``, ``log_name`` and ``debug``."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep500_timing_torch.comm._timed import CallOptions, measure_as, original_of

if TYPE_CHECKING:
    from collections.abc import Callable

_ASKED = ("prof", "log_name", "debug")
# DeepSpeed's parameters before those three, by which a call with more positional arguments is read, and PyTorch's names
# for them where they differ.
_POSITIONAL = {
    "broadcast": 4, "broadcast_object_list": 4, "all_gather": 4, "all_gather_object": 3, "all_gather_into_tensor": 4,
    "reduce_scatter": 5, "reduce_scatter_tensor": 5, "reduce_scatter_fn": 5, "all_to_all": 4, "all_to_all_single": 6,
    "gather": 5, "scatter": 5, "reduce": 5, "all_reduce": 4, "inference_all_reduce": 3, "all_reduce_coalesced": 4,
    "barrier": 3, "monitored_barrier": 3, "send": 4, "recv": 4, "isend": 4, "irecv": 4, "batch_isend_irecv": 1,
    "allgather_fn": 4, "all_gather_single": 4, "reduce_scatter_single": 5,
}  # fmt: skip
_RENAMED = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "all_gather_single": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "reduce_scatter_single": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
    "all_gather_coalesced": {"output_tensors": "output_tensor_lists", "input_tensors": "input_tensor_list"},
}


def accepting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes DeepSpeed's arguments as well as PyTorch's."""
    if name == "all_gather_coalesced":
        operation = _flat_outputs(operation)
    renamed = _RENAMED.get(name, {})
    foreign = frozenset((*_ASKED, *renamed))
    most = _POSITIONAL.get(name, 64)

    @functools.wraps(operation)
    def accept(*args: Any, **kwargs: Any) -> Any:
        if (kwargs and not foreign.isdisjoint(kwargs)) or len(args) > most:
            args, asked = _read(args, kwargs, most)
            kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
            if asked is not None:
                return measure_as(operation, asked, args, kwargs)
        return operation(*args, **kwargs)

    return accept


def _read(args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> tuple[tuple[Any, ...], CallOptions | None]:
    # Remove DeepSpeed's three arguments. In PyTorch the same positions hold ranks.
    found = {key: kwargs.pop(key) for key in _ASKED if key in kwargs}
    if len(args) > most and isinstance(args[most], bool):
        found.update(zip(_ASKED, args[most:], strict=False))
        args = args[:most]
    if not found:
        return args, None
    return args, CallOptions(bool(found.get("prof", False)), found.get("log_name"), found.get("debug"))


def _flat_outputs(operation: Callable[..., Any]) -> Callable[..., Any]:
    # DeepSpeed gathers each input into one flat output, PyTorch into a list of tensors for each rank.
    @functools.wraps(operation)
    def gather(
        output_tensor_lists: Any, input_tensor_list: Any, group: Any = None, async_op: bool = False, **kwargs: Any
    ) -> Any:
        if output_tensor_lists and isinstance(output_tensor_lists[0], torch.Tensor):
            ranks = dist.get_world_size(group)
            parts = [
                output.view(ranks, *tensor.shape).unbind()
                for output, tensor in zip(output_tensor_lists, input_tensor_list, strict=True)
            ]
            output_tensor_lists = [[part[rank] for part in parts] for rank in range(ranks)]
        return operation(output_tensor_lists, input_tensor_list, group=group, async_op=async_op, **kwargs)

    gather.__dict__["_deep500_timing_original"] = original_of(operation)
    return gather
