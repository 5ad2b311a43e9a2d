"""Asynchronous operations on the CPU whose time is known without asking anybody.

A callback on an operation's future costs as much as all the rest of the timing, and runs when the backend's thread gets
the interpreter. It is needed for what ends while nobody looks. An operation that somebody is waiting for when it ends
has its end seen by the one who waits: of operations that have ended so :data:`SETTLED` times, and never otherwise, no
more callbacks are asked for. Should one end unseen later, all that is known is that it had ended before the wait for it
began: its time is an upper bound, is said to be one, and callbacks are asked for from then on.
"""

from __future__ import annotations

import os
import weakref
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist

from deep500_timing.runs._current import logs
from deep500_timing_torch.comm._log import BATCH, EXPOSED, FAILED, LOG, PAIR, UNTIMED, WHOLE, Record, fault
from deep500_timing_torch.comm._work import TimedWork

SETTLED = 64
"""Operations that must have ended while somebody was waiting before no callback is asked for."""
_NEVER = float("-inf")

_under_way: dict[int, weakref.ref[ShortWork]] = {}
"""Operations of which nothing is in the log but that they began, by the id of their handle. Whoever takes one out,
which is atomic, puts its time into the log."""


class ShortWork(TimedWork):
    """The handle of such an operation."""

    __slots__ = ("_ends", "_issued_ns", "_latency_ns", "_record", "_seq", "_start_ns")
    _record: Record
    _start_ns: int
    _issued_ns: int
    _seq: int | None
    _ends: list[int] | None
    """When it ended, empty as long as that is not known; None without a callback, which nobody will tell."""
    _latency_ns: int

    # The arguments of TimedWork's are set by `issued`: Python's own way to them takes as long as making the object.
    __init__: Any = dist.Work.__init__

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        work = self._work
        if self._waited:
            return work.wait(*args, **kwargs)
        over = self._ends or work.is_completed()
        start_ns = perf_counter_ns()
        try:
            result = work.wait(*args, **kwargs) if args or kwargs else work.wait()
        except BaseException:
            if _under_way.pop(id(self), None) is not None:
                LOG.put(self._record, FAILED, 1, 0)
            raise
        end_ns = perf_counter_ns()
        self._waited = True
        try:
            record, ends = self._record, self._ends
            if not over:
                record.blocked += 1
                done_ns = end_ns
            elif ends is None:  # nobody has seen its end
                record.blocked = _NEVER
                record.upper_bound = True
                done_ns = start_ns
            else:
                record.blocked = _NEVER
                # The callback may be on its way, waiting for the interpreter.
                done_ns = ends[0] if ends else start_ns
            if _under_way.pop(id(self), None) is None:
                # A summary came first.
                LOG.put(record, EXPOSED, start_ns, end_ns)
                LOG.put(record, PAIR, self._latency_ns, end_ns - start_ns)
                return result
            if not logs and record.exposed is not None and record.issue is not None and LOG.observer is None:
                record.take_whole(self._start_ns, done_ns, self._seq, self._issued_ns, start_ns, end_ns)
                return result
            inbox = LOG.inbox
            inbox.append((record, WHOLE, self._start_ns, done_ns, (self._seq, self._issued_ns, start_ns, end_ns)))
            if len(inbox) >= BATCH:
                LOG.drain(wait=False)
        except Exception as error:
            fault(self._record.label, error)
        return result

    def get_future(self) -> Any:
        """The original's future: whoever waits for that is not seen to wait, but the end is known."""
        if self._ends is None and not self._waited:
            ends: list[int] = []
            self._ends = ends
            self._work.get_future().add_done_callback(lambda _: ends.append(perf_counter_ns()))
        return self._work.get_future()

    def look(self) -> None:
        """Put the operation into the log if it is over; called by whoever wants a summary now."""
        future = self._work.get_future()
        if not future.done():  # which it is a little later than the operation
            return
        record, done_ns = self._record, self._ends[0] if self._ends else perf_counter_ns()
        self._latency_ns = done_ns - self._start_ns  # before others learn that it is in the log
        if _under_way.pop(id(self), None) is None:
            return
        try:
            future.value()
        except Exception:
            LOG.put(record, FAILED, 1, 0)
            return
        if self._ends is None:
            record.upper_bound = True
            record.blocked = _NEVER
        LOG.put(record, WHOLE, self._start_ns, done_ns, (self._seq, self._issued_ns, 0, 0))

    def __del__(self) -> None:
        """Nobody waits for it any more: whoever ends it says when that was."""
        try:
            if id(self) not in _under_way:
                return
            self.look()
            if _under_way.pop(id(self), None) is not None:
                told = partial(_end_unwatched, self._record, self._start_ns, self._issued_ns, self._seq)
                self._work.get_future().add_done_callback(told)
        except Exception:  # the interpreter may be ending
            return


def _end_unwatched(record: Record, start_ns: int, issued_ns: int, seq: int | None, future: Any) -> None:
    # On the backend's thread. An exception here would be lost in the backend's log.
    try:
        done_ns = perf_counter_ns()
        try:
            future.value()
        except Exception:
            LOG.put(record, FAILED, 1, 0)
        else:
            LOG.put(record, WHOLE, start_ns, done_ns, (seq, issued_ns, 0, 0))
    except Exception as error:
        fault(record.label, error)
        LOG.put(record, UNTIMED, 1, 0)


def issued(work: dist.Work, record: Record, start_ns: int, issued_ns: int) -> ShortWork | None:
    """A handle for an operation whose call has returned, in the place of its own; None if it has no future."""
    ends: list[int] | None = None
    if record.blocked < SETTLED:
        try:
            future = work.get_future()
        except RuntimeError:
            record.no_future = True
            return None
        if future.done():  # in its call, as a message to nobody is
            ends = [issued_ns]
        else:
            seen: list[int] = []
            future.add_done_callback(lambda _: seen.append(perf_counter_ns()))
            ends = seen
    record.started += 1
    handle: ShortWork = ShortWork()
    handle._work = work
    handle._waited = False
    handle._record = record
    handle._start_ns = start_ns
    handle._issued_ns = issued_ns
    handle._seq = None
    handle._ends = ends
    _under_way[id(handle)] = weakref.ref(handle)
    return handle


def look() -> None:
    """Put every operation that is over into the log, waited for or not."""
    for reference in list(_under_way.values()):
        handle = reference()
        if handle is not None:
            try:
                handle.look()
            except Exception as error:
                fault(handle._record.label, error)


LOG.look = look

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)
