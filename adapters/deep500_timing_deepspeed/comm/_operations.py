"""The operations of ``deep500_timing_torch.comm``, three that DeepSpeed adds, and DeepSpeed's ways of calling them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from deep500_timing_torch.comm import configure as _configure
from deep500_timing_torch.comm.names import OPERATIONS as _OPERATIONS
from deep500_timing_torch.comm.names import OPS, OPTIONS, measure_as, original_of

_KEYS = ("enabled", "prof_all", "prof_ops", "verbose", "debug")


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
    **more: Any,
) -> None:
    """Choose the operations to time; a setting that is not given is kept.

    ``deepspeed_config`` is DeepSpeed's config object, or its JSON as a dictionary with the key ``comms_logger``. An
    object with a disabled logger changes nothing, as in DeepSpeed. The settings, and ``timer``, are those of
    :func:`deep500_timing_torch.comm.configure`.

    Raises:
        TypeError: ``prof_ops`` is a string, or the first argument is not a config.
    """
    if deepspeed_config is not None:
        _configure(**_settings_of(deepspeed_config))
    _configure(enabled=enabled, prof_all=prof_all, prof_ops=prof_ops, verbose=verbose, debug=debug, **more)


def _settings_of(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        found = config.get("comms_logger", config)
        if not isinstance(found, Mapping) or not set(_KEYS).issuperset(found):
            raise TypeError(f"configure({config!r}): of a config's comms_logger {', '.join(sorted(_KEYS))} are known.")
        # As in DeepSpeed's JSON: disabled unless it says otherwise.
        return {"enabled": False, **found}
    found = getattr(config, "comms_config", config)
    if not hasattr(found, "comms_logger_enabled"):
        raise TypeError(
            f"configure({config!r}): the first argument is DeepSpeed's config; say which setting is meant, "
            f"as configure(enabled={bool(config)})."
        )
    if not found.comms_logger_enabled:
        return {}
    return {"enabled": True, **{key: getattr(found.comms_logger, key) for key in _KEYS[1:]}}


# By the operation's name in the log, or its own where that differs: DeepSpeed's parameters before prof, log_name and
# debug, by which a call with more positional arguments is read, and PyTorch's names for them where they are others.
_POSITIONAL = {
    "broadcast": 4, "broadcast_object_list": 4, "all_gather": 4, "all_gather_object": 3, "all_gather_into_tensor": 4,
    "reduce_scatter": 5, "reduce_scatter_tensor": 5, "all_to_all": 4, "all_to_all_single": 6, "gather": 5, "scatter": 5,
    "reduce": 5, "all_reduce": 4, "inference_all_reduce": 3, "all_reduce_coalesced": 4, "barrier": 3,
    "monitored_barrier": 3, "send": 4, "recv": 4, "batch_isend_irecv": 1,
}  # fmt: skip
_RENAMED = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
    "all_gather_coalesced": {"output_tensors": "output_tensor_lists", "input_tensors": "input_tensor_list"},
}


def accepting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that takes DeepSpeed's arguments as well as PyTorch's."""
    if name == "all_gather_coalesced":
        operation = _flat_outputs(operation)
    logged = OPS[name].name
    renamed = _RENAMED.get(logged, {})
    foreign = frozenset((*OPTIONS, *renamed))
    most = _POSITIONAL.get(name, _POSITIONAL.get(logged, 64))

    @functools.wraps(operation)
    def accept(*args: Any, **kwargs: Any) -> Any:
        if (kwargs and not foreign.isdisjoint(kwargs)) or len(args) > most:
            args, asked = _read(args, kwargs, most)
            kwargs = {renamed.get(key, key): value for key, value in kwargs.items()}
            if asked:
                return measure_as(operation, asked, args, kwargs)
        return operation(*args, **kwargs)

    return accept


def _read(args: tuple[Any, ...], kwargs: dict[str, Any], most: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Remove DeepSpeed's three arguments. In PyTorch the same positions hold ranks.
    found = {key: kwargs.pop(key) for key in OPTIONS if key in kwargs}
    if len(args) > most and isinstance(args[most], bool):
        found.update(zip(OPTIONS, args[most:], strict=False))
        args = args[:most]
    return args, found


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


_ADDED = {
    "allgather_fn": "all_gather_into_tensor",
    "inference_all_reduce": "all_reduce",
    "reduce_scatter_fn": "reduce_scatter_tensor",
}
"""DeepSpeed's further names of operations."""

OPERATIONS: dict[str, Any] = {
    name: accepting(name, _OPERATIONS[_ADDED.get(name, name)]) for name in (*_OPERATIONS, *_ADDED)
}
