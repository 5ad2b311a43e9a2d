"""``timed_op`` and the timed functions of ``torch.distributed``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing_torch.comm._operation import measure
from deep500_timing_torch.comm._ops import OPS, Op, unknown
from deep500_timing_torch.comm._settings import SETTINGS

F = TypeVar("F", bound=Callable[..., Any])


class CallOptions(NamedTuple):
    """DeepSpeed's arguments for the timing of one call."""

    prof: bool
    """Time it regardless of ``prof_all``."""
    log_name: str | None
    """The name in the log, the operation's own if None."""
    debug: str | None
    """The calling function for ``configure(debug=True)``; found out if None."""


_is_compiling = torch.compiler.is_compiling


@overload
def timed_op(func: F, /) -> F: ...


@overload
def timed_op(
    *,
    name: str | None = None,
    size: Callable[..., int | None] | None = None,
    busbw: Callable[[int], float] | None = None,
) -> Callable[[F], F]: ...


def timed_op(
    func: Any = None,
    /,
    *,
    name: str | None = None,
    size: Callable[..., int | None] | None = None,
    busbw: Callable[[int], float] | None = None,
) -> Any:
    """Time a function as one communication operation: a decorator, with or without arguments.

    A function with the name and the arguments of a known operation is sized and rated as that operation. Any other is
    timed; for a bandwidth give the size of its message::

        @comm.timed_op(size=lambda tensor, group=None: tensor.nbytes, busbw=lambda ranks: (ranks - 1) / ranks)
        def ring_exchange(tensor, group=None): ...

    Nested operations are part of it and not counted again. If it returns a ``Work``, a list of them or a future,
    its completion and the waits for it are timed as well. Inside ``torch.compile`` it is left alone.

    Args:
        func: The function; given by the decorator without arguments.
        name: The name in the summary; the function's own if None.
        size: Called with the function's arguments, gives the bytes of the message, or None.
        busbw: For a number of ranks, the factor from algorithm bandwidth to bus bandwidth; None if unknown.

    Raises:
        TypeError: The decorated object is not callable.
    """
    if func is None:
        return functools.partial(timed_op, name=name, size=size, busbw=busbw)
    if not callable(func):
        raise TypeError(f"timed_op({func!r}): the argument must be callable, not {type(func).__name__}.")
    name = name or str(getattr(func, "__name__", type(func).__name__))
    op = OPS.get(name) if size is None and busbw is None else None
    if op is None:
        op = Op(name, unknown if size is None else functools.partial(_sized, size), busbw)
    return _timed(func, op, True, _default_log_name(func))


def timed_operation(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``torch.distributed``, timed unless the kernel is at work, which sees the operations it issues."""
    # The kernel sees the parts of a batch and cannot tell that they are one.
    return _timed(func, OPS[name], name == "batch_isend_irecv", None)


def _timed(func: Callable[..., Any], op: Op, beside_kernel: bool, default_name: str | None) -> Callable[..., Any]:
    @functools.wraps(func)
    def operation(*args: Any, **kwargs: Any) -> Any:
        # First, so that `torch.compile` reads nothing else.
        if _is_compiling() or not (SETTINGS.by_functions or (beside_kernel and SETTINGS.enabled)):
            return func(*args, **kwargs)
        # Functions written for DeepSpeed's decorator may have its parameters.
        options = None
        if default_name is not None:
            log_name = kwargs.get("log_name", default_name)
            options = CallOptions(bool(kwargs.get("prof", False)), log_name, kwargs.get("debug"))
        return measure(func, op, args, kwargs, options)

    operation.__dict__["_deep500_timing_original"] = func
    operation.__dict__["_deep500_timing_op"] = op
    return operation


def _default_log_name(func: Callable[..., Any]) -> str | None:
    try:
        parameter = inspect.signature(func).parameters.get("log_name")
    except (TypeError, ValueError):
        return None
    return parameter.default if parameter is not None and isinstance(parameter.default, str) else None


def _sized(size: Callable[..., int | None], *args: Any, **kwargs: Any) -> Any:
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    return size(*args, **kwargs), False, kwargs.get("group"), tensor


def original_of(operation: Any) -> Any:
    """The function that a timed operation stands for, or the argument itself if it is none."""
    return getattr(operation, "_deep500_timing_original", operation)


def measure_as(operation: Callable[..., Any], options: CallOptions, args: Any, kwargs: Any) -> Any:
    """Call a timed operation with DeepSpeed's arguments for the timing."""
    func = original_of(operation)
    if not SETTINGS.enabled or _is_compiling():
        return func(*args, **kwargs)
    return measure(func, operation.__dict__["_deep500_timing_op"], args, kwargs, options)


# --- the operations of torch.distributed ---

# PyTorch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor to *_single; older ones have the old names
# only, and newer ones may drop them. Both are here in either case.
_RENAMED = {"all_gather_single": "all_gather_into_tensor", "reduce_scatter_single": "reduce_scatter_tensor"}
_RENAMED |= {old: new for new, old in _RENAMED.items()}

OPERATIONS: dict[str, Any] = {
    name: timed_operation(name, function)
    for name in OPS
    if (function := getattr(dist, name, None) or getattr(dist, _RENAMED.get(name, name), None)) is not None
}
"""Every timed operation that this PyTorch has, by name."""


_new_p2p_op: Any = c10d.P2POp.__new__
_init_p2p_op: Any = c10d.P2POp.__init__


def new_p2p_op(cls: type, op: Any, *args: Any, **kwargs: Any) -> Any:
    """``P2POp.__new__`` that takes timed operations for their originals."""
    return _new_p2p_op(cls, original_of(op), *args, **kwargs)


def init_p2p_op(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
    """``P2POp.__init__`` that keeps the original operation: the batch as a whole is timed."""
    _init_p2p_op(self, original_of(op), *args, **kwargs)


class P2POp(c10d.P2POp):
    """``torch.distributed.P2POp`` that takes the timed ``isend`` and ``irecv`` as well as the original ones."""

    __new__ = new_p2p_op  # type: ignore[assignment]
    __init__ = init_p2p_op
