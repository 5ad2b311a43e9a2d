"""``timed_op``: what stands around every operation."""

from __future__ import annotations

import functools
import inspect
from _thread import get_ident
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, overload

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing_torch.comm._device import pool_for
from deep500_timing_torch.comm._device_run import DeviceRun
from deep500_timing_torch.comm._log import LOG, caller, fault
from deep500_timing_torch.comm._ops import OPS, Op, unknown
from deep500_timing_torch.comm._records import FAILED, ISSUE, SYNC, UNTIMED, Record
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._short_call import ShortCall, inside, is_handle
from deep500_timing_torch.comm._work import TimedFuture, TimedWork, Tracker, future_of

F = TypeVar("F", bound=Callable[..., Any])


class Asked(NamedTuple):
    """What a call asks for itself, in DeepSpeed's way."""

    prof: bool
    """Be timed, whatever is configured of all."""
    log_name: str | None
    """The name in the log, the operation's own if None."""
    debug: str | None
    """Who calls, for ``configure(debug=True)``; found out if None."""


_is_compiling = torch.compiler.is_compiling
# The same in two pieces, the call of one frame and a flag, which take a third of the time.
_is_traced: Callable[[], bool] = _is_compiling
_exporting: Any = SimpleNamespace(_is_compiling_flag=False)
if hasattr(torch.compiler, "_is_compiling_flag"):
    _is_traced, _exporting = torch.compiler.is_dynamo_compiling, torch.compiler
_world: Any = getattr(c10d, "_world", None)


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

    A function with the name of an operation that is known, and its arguments, is sized and rated as that operation.
    Any other is timed; for a bandwidth say what it moves::

        @comm.timed_op(size=lambda tensor, group=None: tensor.nbytes, busbw=lambda ranks: (ranks - 1) / ranks)
        def ring_exchange(tensor, group=None): ...

    What it calls in turn is part of it and not counted again. If it returns a ``Work``, a list of them or a future,
    its completion and the waits for it are timed as well. Inside ``torch.compile`` it is left alone.

    Args:
        func: The function; given by the decorator without arguments.
        name: The name in the summary; the function's own if None.
        size: Called with the function's arguments, gives the bytes of the message, or None.
        busbw: For a number of ranks, what the bus bandwidth is the algorithm bandwidth times; None if unknown.

    Raises:
        TypeError: What is decorated is not callable.
    """
    if func is None:
        return functools.partial(_timed, name=name, size=size, busbw=busbw)
    return _timed(func, name=name, size=size, busbw=busbw)


def _timed(
    func: Callable[..., Any],
    *,
    name: str | None,
    size: Callable[..., int | None] | None,
    busbw: Callable[[int], float] | None,
    torchs: bool = False,
) -> Callable[..., Any]:
    if not callable(func):
        raise TypeError(f"timed_op({func!r}): what is timed must be callable, not {type(func).__name__}.")
    called: str = name or str(getattr(func, "__name__", type(func).__name__))
    op = OPS.get(called) if size is None and busbw is None else None
    if op is None:
        op = Op(called, unknown if size is None else functools.partial(_sized, size), busbw)
    elif not torchs:
        op = replace(op, steady=False)
    settings = SETTINGS
    default_name = None if torchs else _default_log_name(func)
    # Functions written for DeepSpeed's decorator may have its parameters: prof, log_name, debug.
    asks: Any = None if default_name is None else True

    known = op.steady and not asks

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if not settings.by_functions:
            if settings.enabled and not torchs:
                return _beside_the_kernel(func, op, args, kwargs, asks and _asked_of(kwargs, default_name))
            return func(*args, **kwargs)
        return _measure(func, op, args, kwargs, asks and _asked_of(kwargs, default_name))

    shortly = ShortCall(func, op, slowly, _finish, _note_failure).call

    # Python of its own even where the short way is compiled: `torch.compile` reads it, and finds the flags.
    @functools.wraps(func)
    def operation(*args: Any, **kwargs: Any) -> Any:
        if not settings.quick or not known or _is_traced() or _exporting._is_compiling_flag:
            return slowly(*args, **kwargs)
        return shortly(args, kwargs)

    operation.__dict__["_deep500_timing_original"] = func
    operation.__dict__["_deep500_timing_op"] = op
    return operation


def _default_log_name(func: Callable[..., Any]) -> str | None:
    try:
        parameter = inspect.signature(func).parameters.get("log_name")
    except (TypeError, ValueError):
        return None
    return parameter.default if parameter is not None and isinstance(parameter.default, str) else None


def _asked_of(kwargs: dict[str, Any], default_name: str | None) -> Asked:
    return Asked(bool(kwargs.get("prof", False)), kwargs.get("log_name", default_name), kwargs.get("debug"))


def original_of(operation: Any) -> Any:
    """The function that a timed operation stands for, or the argument itself if it is none."""
    return getattr(operation, "_deep500_timing_original", operation)


def _sized(size: Callable[..., int | None], *args: Any, **kwargs: Any) -> Any:
    group = kwargs.get("group")
    tensor = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
    return size(*args, **kwargs), False, group, tensor


def _find(op: Op, args: Any, kwargs: Any, asked: Asked | None) -> tuple[Record, Any, Any] | None:
    # The record of this call, the process group and a tensor that says where it runs; None if it is not to be timed.
    try:
        nbytes, per_rank, process_group, tensor = op.describe(*args, **kwargs)
    except Exception:
        # Arguments that the operation itself will refuse, or of a kind that has no size.
        nbytes, per_rank, process_group, tensor = None, False, kwargs.get("group"), None
    if process_group is None:
        process_group = dist.GroupMember.WORLD
    group = LOG.group_of(process_group)
    if group is None:
        return None
    if per_rank and nbytes is not None:
        nbytes *= group.size
    label = op.name
    if asked is not None and asked.log_name:
        label = asked.log_name
    if SETTINGS.debug:
        label = f"{label} | {(asked and asked.debug) or caller()}"
    return group.record(op, label, nbytes), process_group, tensor


def timed_operation(name: str, func: Callable[..., Any]) -> Callable[..., Any]:
    """An operation of ``torch.distributed``, timed unless the kernel is at work, which sees what it issues."""
    return _timed(func, name=name, size=None, busbw=None, torchs=True)


def _beside_the_kernel(func: Callable[..., Any], op: Op, args: Any, kwargs: Any, asked: Asked | None = None) -> Any:
    # An operation of the user's own: what it issues is part of it, and not counted by the kernel as well.
    feed: Any = LOG.source
    if get_ident() in inside or feed is None:
        return func(*args, **kwargs)
    feed.mute(1)
    try:
        return _measure(func, op, args, kwargs, asked)
    finally:
        feed.mute(-1)


def measure_as(operation: Callable[..., Any], asked: Asked, args: Any, kwargs: Any) -> Any:
    """Call a timed operation with what the call asks for itself."""
    func = original_of(operation)
    if not SETTINGS.enabled:
        return func(*args, **kwargs)
    op: Op = operation.__dict__["_deep500_timing_op"]
    measure = _measure if SETTINGS.by_functions else _beside_the_kernel
    return measure(func, op, args, kwargs, asked)


def _measure(func: Callable[..., Any], op: Op, args: Any, kwargs: Any, asked: Asked | None = None) -> Any:
    if _is_compiling():
        return func(*args, **kwargs)
    thread = get_ident()
    if thread in inside:
        return func(*args, **kwargs)
    if not SETTINGS.prof_all and not (
        op.name in SETTINGS.prof_ops or (asked is not None and (asked.prof or asked.log_name in SETTINGS.prof_ops))
    ):
        return func(*args, **kwargs)
    now_ns = SETTINGS.now_ns
    record = run = process_group = before = advance = None
    start_ns = 0
    try:
        found = _find(op, args, kwargs, asked)
        if found is not None:
            record, process_group, tensor = found
            if _world is not None and _world.pg_coalesce_state and process_group in _world.pg_coalesce_state:
                # The call only notes down what the coalescing manager will issue at its end, all in one.
                LOG.put(record, UNTIMED, 0, 0)
                record.group.seen += not _world.pg_coalesce_state[process_group]
                record = None
            else:
                device = None if tensor is None or tensor.is_cpu else pool_for(tensor)
                group = record.group
                advance = group.advances.get(op.name) if op.steady else None
                before = group.number() if advance is None else None
                start_ns = now_ns()
                if device is not None:
                    run = DeviceRun(record, device, start_ns, process_group, tensor)
    except Exception as error:
        fault(op.name, error)
        if record is not None:
            LOG.put(record, UNTIMED, 0, 0)
            record = None
    if record is None:
        return func(*args, **kwargs)
    inside.add(thread)
    try:
        result = func(*args, **kwargs)
    except BaseException:
        _note_failure(record, run)
        raise
    finally:
        inside.discard(thread)
    try:
        return _finish(record, op, process_group, result, start_ns, now_ns(), run, before, advance)
    except Exception as error:
        fault(op.name, error)
        LOG.put(record, UNTIMED, 0, 0)
        return result


def _note_failure(record: Record, run: DeviceRun | None) -> None:
    LOG.put(record, FAILED, 0, 0)
    if run is not None:
        try:
            run.mark.drop()
        except Exception as error:
            fault(record.label, error)


def _finish(
    record: Record,
    op: Op,
    process_group: Any,
    result: Any,
    start_ns: int,
    end_ns: int,
    run: DeviceRun | None,
    before: int | None,
    advance: int | None,
) -> Any:
    # The call has returned: count it, or follow what it has left under way.
    if SETTINGS.timer is not None:
        SETTINGS.region(op.name, start_ns, end_ns)
    group = record.group
    seq = group.sequence(process_group) if op.synchronizes else None
    if advance is None:
        advance = 0 if before is None else (group.number() or before) - before
        if op.steady:
            group.advances[op.name] = advance
    if op.steady:
        record.advance = advance
    group.seen += advance
    if isinstance(result, (list, torch._C.Future)) or is_handle(result):
        followed = _follow(result, record, start_ns, end_ns, seq, run)
        if followed is not None:
            return followed
    if run is None:
        LOG.put(record, SYNC, start_ns, end_ns, seq)
    else:
        run.end(end_ns, seq)
    return result


def _follow(
    result: Any,
    record: Record,
    start_ns: int,
    end_ns: int,
    seq: int | None,
    run: DeviceRun | None,
) -> Any:
    # Put handles that time their waits in the place of those that the operation gave; None if it gave none.
    works = result if isinstance(result, list) else [result]
    if not works or not all(isinstance(work, (dist.Work, torch._C.Future)) for work in works):
        return None
    device = None if run is None else run.device
    handles = [work for work in works if isinstance(work, dist.Work)]
    tracker = Tracker(record, start_ns, seq, len(works), device)
    only = works[0] if len(works) == 1 else None
    if run is not None:
        if len(handles) == len(works):
            run.follow(tracker, only)
        else:
            # A future of device values: whatever is hung on it makes streams wait, so nobody tells when it is done.
            record.on_device = True
            run.mark.drop()
            tracker.untimed_under_way()
    elif only is not None:
        future = future_of(only, record) if isinstance(only, dist.Work) else only
        if future is not None:
            tracker.follow(future)
    LOG.put(record, ISSUE, start_ns, end_ns)
    if isinstance(result, list):
        return [TimedWork(work, tracker) if isinstance(work, dist.Work) else work for work in works]
    if isinstance(result, dist.Work):
        return TimedWork(result, tracker)
    # A future of device values carries streams that only the original knows: it stays as it is.
    return TimedFuture(result, tracker) if device is None else result
