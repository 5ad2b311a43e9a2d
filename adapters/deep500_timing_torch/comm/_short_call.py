"""The short way of a timed operation that is known in all respects, on the CPU and with nothing else asked for.

It does what the long way of ``_timed.py`` does in the end, with everything looked up that can be. What does not fit
goes the long way from its beginning. This file runs as plain Python and, with the C types of ``_short_call.pxd``,
compiled. ``torch.compile`` must not meet it: who calls it asks first.
"""

from __future__ import annotations

import os
from _thread import get_ident
from time import perf_counter_ns

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from deep500_timing.runs import logs
from deep500_timing_torch.comm._log import BATCH, LOG, fault
from deep500_timing_torch.comm._records import SYNC, Record
from deep500_timing_torch.comm._short_way import Course

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    import cython

    from deep500_timing_torch.comm._ops import Op
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    called = now = thread_id = in_c

inside: set[int] = set()
"""The threads that are in a timed operation now: what that one calls is part of it. A set of their numbers takes half
as long to ask as a ``threading.local``."""
_world: Any = getattr(c10d, "_world", None)
_Work = dist.Work
_illegal: tuple[type, ...] = tuple(filter(None, [getattr(c10d, "_IllegalWork", None)]))


class ShortCall:
    """One operation, and all that its short way needs to know of it."""

    __slots__ = (
        "_common_name",
        "_describe",
        "_finish",
        "_func",
        "_group_at",
        "_groups",
        "_handles",
        "_inbox",
        "_inside",
        "_message_at",
        "_name",
        "_note_failure",
        "_op",
        "_slowly",
        "_synchronizes",
    )

    def __init__(
        self,
        func: Callable[..., Any],
        op: Op,
        slowly: Callable[..., Any],
        finish: Callable[..., Any],
        note_failure: Callable[[Record, None], None],
    ) -> None:
        """Look up what can be.

        Args:
            func: The operation itself.
            op: What is known about it.
            slowly: Its long way, called as the operation is.
            finish: The end of the long way.
            note_failure: Counts a call that raised.
        """
        self._func = func
        self._op = op
        self._slowly = slowly
        self._finish = finish
        self._note_failure = note_failure
        self._name = op.name
        self._common_name = op.same_as or op.name
        self._describe = op.describe
        self._synchronizes = op.synchronizes
        # Without places, further right than any call has arguments.
        self._message_at, self._group_at = op.places or (1 << 30, 0)
        self._handles: Any = None
        """The type of handles that it gave last."""
        self._groups = LOG.known_groups
        self._inbox = LOG.inbox
        self._inside = inside

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operation with these arguments, timed."""
        func = self._func
        thread = thread_id() if cython.compiled else get_ident()
        if thread in self._inside:
            return func(*args, **kwargs)
        try:
            per_rank = False
            if len(args) > self._message_at:
                # What describe would find: a call that costs a tenth of all.
                if len(args) > self._group_at:
                    process_group = args[self._group_at]
                else:
                    process_group = kwargs.get("group") if kwargs else None
                nbytes = tensor = None
                if self._message_at >= 0:
                    tensor = args[self._message_at]
                    nbytes = tensor.nbytes
            else:
                nbytes, per_rank, process_group, tensor = self._describe(*args, **kwargs)
            if process_group is None:
                process_group = _world._default_pg
            group = self._groups[id(process_group)]
            if group.reference() is not process_group:
                return self._slowly(*args, **kwargs)
            record = group.records[self._name, nbytes]
            advance = record.advance
            if advance < 0 or per_rank or _world._pg_coalesce_state or not (tensor is None or tensor.is_cpu):
                return self._slowly(*args, **kwargs)
            record.calls += 1
            start_ns = now() if cython.compiled else perf_counter_ns()
        except Exception:
            return self._slowly(*args, **kwargs)
        self._inside.add(thread)
        try:
            # Compiled, the latter would copy the arguments.
            result = called(func, args, kwargs) if cython.compiled else func(*args, **kwargs)
        except BaseException:
            self._note_failure(record, None)
            raise
        finally:
            self._inside.discard(thread)
        end_ns = now() if cython.compiled else perf_counter_ns()
        try:
            if result is not None:
                course = None
                kind = type(result)
                if kind is not self._handles and is_handle(result):
                    self._handles = kind
                if kind is self._handles and not record.no_future:
                    course = Course.__new__(Course)
                    course.begin(result, record, start_ns, end_ns)
                if course is None or not course.follow():
                    return self._finish(record, self._op, process_group, result, start_ns, end_ns, None, None, advance)
                group.seen += advance
                if self._synchronizes:
                    course.seq = group.sequence(process_group)
                return course.handle()
            group.seen += advance
            if not self._synchronizes:
                seq = None
            elif group.backend_counts:
                seq = group.sequence(process_group)
            else:  # as that would, less its call
                seq = group.own_seq = group.own_seq + 1
            if not logs:
                # As Record.take does, from any thread: each of these is whole at each moment.
                latency = record.latency
                latency.append(start_ns, end_ns)
                if seq is not None:
                    group.ring.append((seq, self._common_name, nbytes or 0, end_ns - start_ns))
                return result
            inbox = self._inbox
            inbox.append((record, SYNC, start_ns, end_ns, seq))
            if len(inbox) >= BATCH:
                LOG.drain(wait=False)
        except Exception as error:
            fault(self._name, error)
        return result


def is_handle(result: Any) -> bool:
    """Whether what an operation returned is a handle of it."""
    return isinstance(result, _Work) and not isinstance(result, _illegal)


def _only_this_thread() -> None:
    inside.intersection_update([get_ident()])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_only_this_thread)
