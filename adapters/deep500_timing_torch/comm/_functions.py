"""The timed functions of ``torch.distributed``, and ``instrument``, which puts them or the compiled kernel in force."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch.comm import _build
from deep500_timing_torch.comm._log import LOG
from deep500_timing_torch.comm._operation import PendingOp, dispatched, measure
from deep500_timing_torch.comm._ops import BY_OPERATOR, OPS, Op, unknown
from deep500_timing_torch.comm._settings import SETTINGS

F = TypeVar("F", bound=Callable[..., Any])


OPTIONS = ("prof", "log_name", "debug")
"""DeepSpeed's arguments for the timing of one call: time it regardless of ``prof_all``; the name in the log; the
calling function for ``configure(debug=True)``."""

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
        options = None
        if default_name is not None:
            # Functions written for DeepSpeed's decorator may have its parameters.
            options = {"log_name": default_name, **{name: kwargs[name] for name in OPTIONS if name in kwargs}}
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


def measure_as(operation: Callable[..., Any], options: dict[str, Any], args: Any, kwargs: Any) -> Any:
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


_originals: Any = c10d.P2POp.__new__, c10d.P2POp.__init__


def _new_p2p_op(cls: type, op: Any, *args: Any, **kwargs: Any) -> Any:
    return _originals[0](cls, original_of(op), *args, **kwargs)


def _init_p2p_op(self: Any, op: Any, *args: Any, **kwargs: Any) -> None:
    # It keeps the original operation: the batch as a whole is timed.
    _originals[1](self, original_of(op), *args, **kwargs)


class P2POp(c10d.P2POp):
    """``torch.distributed.P2POp`` that takes the timed ``isend`` and ``irecv`` as well as the original ones."""

    __new__ = _new_p2p_op  # type: ignore[assignment]
    __init__ = _init_p2p_op


# --- in force -----------------------------------------------------------------------------------------------------

_lock = threading.RLock()
_patched = Replaced()
_building: list[Any] = []


def instrument(*, kernel: bool | None = None) -> Instrument:
    """Time the communication of code that cannot change its import, from now on.

    ::

        timing = comm.instrument()        # until timing.undo(), or the end of the program

        with comm.instrument():           # until the end of the block
            trainer.fit()

        @comm.instrument()                # in each call of a function
        def train(): ...

    The compiled kernel sees every operation that PyTorch hands to a process group, those of DDP's reducer, FSDP,
    DTensor and compiled code included. Waits in ``Work.wait`` and ``wait_tensor`` are exposed time. The machine's C++
    compiler builds it once for each PyTorch, in half a minute: by ``python -m deep500_timing_torch.comm build``, or in
    the background by the first program that asks for it, which goes on with the patched functions. Settings:
    ``DEEP500_TIMING_COMM_KERNEL=off`` for none, ``DEEP500_TIMING_CACHE`` for its folder.

    Without the kernel, timed functions are put into ``torch.distributed``. They do not see operations that C++ issues
    (for DDP's there is :func:`instrument_ddp`), names bound before, and methods of a ``ProcessGroup``; the summary says
    how many were not seen. Neither sees libraries that call NCCL or MPI themselves.

    Args:
        kernel: True for the kernel, built now if need be; False for the patched functions; None for the kernel if it
            has been built.

    Returns:
        An object that ends it: by ``undo()``, as a context manager, or as a decorator. Dropped, it stays in force.
        Several may be in force; the last one to be undone takes everything out.

    Raises:
        RuntimeError: ``kernel=True``, and there is none, or the patched functions are in force already.
    """
    return Instrument(kernel)


class Instrument:
    """What :func:`instrument` returns; in force from the beginning."""

    def __init__(self, kernel: bool | None) -> None:
        self._kernel = kernel
        self._in_force = False
        self._begin()

    @property
    def kernel(self) -> bool:
        """Whether the compiled kernel does the timing now, rather than patched functions."""
        return self._in_force and SETTINGS.kernel is not None

    def undo(self) -> None:
        """Take it out of force; nothing if that has been done."""
        with _lock:
            if not self._in_force:
                return
            self._in_force = False
            SETTINGS.instruments -= 1
            if SETTINGS.instruments == 0:
                _take_out()

    close = undo

    def __enter__(self) -> Instrument:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.undo()

    def __call__(self, function: F) -> F:
        """Decorate a function: in force in each of its calls, and not merely because it was decorated."""
        self.undo()
        kernel = self._kernel

        @functools.wraps(function)
        def instrumented(*args: Any, **kwargs: Any) -> Any:
            with Instrument(kernel):
                return function(*args, **kwargs)

        return instrumented  # type: ignore[return-value]

    def __repr__(self) -> str:
        if not self._in_force:
            return "<Instrument, undone>"
        return f"<Instrument, in force by {'the compiled kernel' if self.kernel else 'patched functions'}>"

    def _begin(self) -> None:
        with _lock:
            if self._in_force:
                return
            if SETTINGS.instruments == 0:
                _put_in(self._kernel)
            elif self._kernel and SETTINGS.kernel is None:
                raise RuntimeError(
                    "comm.instrument(kernel=True) inside one by patched functions: undo that one first, or leave "
                    f"kernel= out. The kernel is not at work because {SETTINGS.why_no_kernel}."
                )
            SETTINGS.instruments += 1
            self._in_force = True


def _put_in(kernel: bool | None) -> None:
    found = _load_kernel(kernel)
    LOG.watch()
    try:
        if found is not None:
            # The kernel sees the messages of a batch, and only the function tells that they are one.
            _patch_all(["batch_isend_irecv"])
            rules = [(operator, size, share, OPS[name]) for operator, (name, size, share) in BY_OPERATOR.items()]
            found.install(dispatched, PendingOp, rules)
            SETTINGS.kernel = found
            SETTINGS.changed()
        else:
            _patch_all(OPS)
    except BaseException:
        _take_out()
        raise


def _take_out() -> None:
    if SETTINGS.kernel is not None:
        SETTINGS.kernel.uninstall()
        SETTINGS.kernel = None
        SETTINGS.changed()
    for owner, name in _patched.undo():
        warn_once(
            f"Leaving comm.instrument(): {owner.__name__}.{name} was patched by other code inside the block and "
            "stays as it is; it may go on timing. Leave blocks in the reverse order of entering them."
        )
    LOG.unwatch()


def _load_kernel(kernel: bool | None) -> ModuleType | None:
    SETTINGS.why_no_kernel = None
    if kernel is False:
        SETTINGS.why_no_kernel = "instrument(kernel=False) was asked for"
        return None
    if kernel:
        try:
            return _build.build()
        except _build.KernelUnavailableError as error:
            raise RuntimeError(f"comm.instrument(kernel=True): there is no kernel: {error}.") from error
    # After a failure the program goes on with the patched functions.
    try:
        try:
            return _build.load()
        except _build.KernelNotBuiltError as error:
            SETTINGS.why_no_kernel = str(error)
            # For the next run. Python warns of a child that is still running when its handle goes.
            _building.append(_build.start_build())
    except _build.KernelUnavailableError as error:
        SETTINGS.why_no_kernel = str(error)
    except Exception as error:
        SETTINGS.why_no_kernel = f"it cannot be loaded: {type(error).__name__}: {error}"
    return None


def _patch_all(names: Iterable[str]) -> None:
    for name in names:
        for module in (dist,) if name in ("isend", "irecv") else (dist, c10d):
            now = vars(module).get(name)
            ours = OPERATIONS.get(name)
            if now is None or ours is None or original_of(now) is not now:
                continue
            if original_of(ours) is not now:
                # Another library has patched it since: time the present function.
                ours = timed_operation(name, now)
            _patched.put(module, name, ours)
    # Its arguments are compared with the originals of isend and irecv, also by code that runs outside the block.
    _patched.put(c10d.P2POp, "__new__", _new_p2p_op)
    _patched.put(c10d.P2POp, "__init__", _init_p2p_op)
