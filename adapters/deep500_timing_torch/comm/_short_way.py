"""Asynchronous operations on the CPU whose time is known without asking anybody.

A callback on an operation's future costs as much as all the rest of the timing, and runs when the backend's thread gets
the interpreter. It is needed for what ends while nobody looks. An operation that somebody is waiting for when it ends
has its end seen by the one who waits: of operations that have ended so :data:`SETTLED` times, and never otherwise, no
more callbacks are asked for. Should one end unseen later, all that is known is that it had ended before the wait for it
began: its time is an upper bound, is said to be one, and callbacks are asked for from then on. This file runs as plain
Python and, with the C types of ``_short_way.pxd``, compiled.
"""

from __future__ import annotations

import os
from functools import partial
from time import perf_counter_ns
from weakref import ref

import torch.distributed as dist

from deep500_timing.runs import logs
from deep500_timing_torch.comm._log import BATCH, LOG, fault
from deep500_timing_torch.comm._records import EXPOSED, FAILED, PAIR, UNTIMED, WHOLE, Record
from deep500_timing_torch.comm._work import TimedWork

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import cython
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    clock_ns = weak = in_c

_clock: Any = perf_counter_ns

SETTLED = 64
"""Operations that must have ended while somebody was waiting before no callback is asked for."""
_SETTLED = SETTLED
_NEVER = float("-inf")

_under_way: dict[ref[Course], bool] = {}
"""Operations of which nothing is in the log but that they began. Whoever takes one out, which is atomic, puts its time
into the log."""


def now() -> Any:
    """The time in ns; for the compiled form, which reads the same clock without the call through Python."""
    if cython.compiled and perf_counter_ns is _clock:
        return clock_ns()
    return perf_counter_ns()


class Course:
    """One operation under way, kept alive by the handle that its caller has."""

    __slots__ = (
        "__weakref__",
        "ended_ns",
        "ends",
        "here",
        "issued_ns",
        "latency_ns",
        "record",
        "seq",
        "start_ns",
        "waited",
        "work",
    )

    def begin(self, work: dist.Work, record: Record, start_ns: int, issued_ns: int) -> None:
        """Begin when its call has returned; an ``__init__`` takes three times as long where this is compiled."""
        self.here: Any = None
        """The reference that is its key among those under way."""
        self.work = work
        self.record = record
        self.start_ns = start_ns
        self.issued_ns = issued_ns
        self.ended_ns = -1
        """When it ended, if that was in its call."""
        self.ends: list[int] | None = None
        """When it ended, told by a callback and empty until then; None without one."""
        self.seq: int | None = None
        self.latency_ns = 0
        self.waited = False

    def follow(self) -> bool:
        """Learn of its end as far as that is needed; returns whether it has a future that would tell."""
        record = self.record
        if record.blocked < _SETTLED:
            try:
                future = self.work.get_future()
            except RuntimeError:
                record.no_future = True
                return False
            if future.done():  # in its call, as a message to nobody is
                self.ended_ns = self.issued_ns
            else:
                self.ends = _ends_of(future)
        record.started += 1
        return True

    def handle(self) -> ShortWork:
        """A handle in the place of the operation's own."""
        handle: ShortWork = ShortWork()
        handle._course = self
        self.here = weak(self) if cython.compiled else ref(self)
        _under_way[self.here] = True
        return handle

    def future(self) -> Any:
        """The original's future, which tells the end from now on."""
        future = self.work.get_future()
        if self.ends is None and self.ended_ns < 0 and not self.waited:
            self.ends = _ends_of(future)
        return future

    def wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wait for it with these arguments; timed the first time."""
        work = self.work
        if self.waited:
            return work.wait(*args, **kwargs)
        over = self.ended_ns >= 0 or bool(self.ends) or work.is_completed()
        start_ns = now() if cython.compiled else perf_counter_ns()
        try:
            result = work.wait(*args, **kwargs) if args or kwargs else work.wait()
        except BaseException:
            if _under_way.pop(self.here, None) is not None:
                LOG.put(self.record, FAILED, 1, 0)
            raise
        end_ns = now() if cython.compiled else perf_counter_ns()
        self.waited = True
        try:
            self.take_wait(over, start_ns, end_ns)
        except Exception as error:
            fault(self.record.label, error)
        return result

    def take_wait(self, over: bool, start_ns: int, end_ns: int) -> None:
        """Count the operation, whose first wait is over.

        Args:
            over: Whether it had ended before the wait began.
            start_ns: When the wait began.
            end_ns: When it ended.
        """
        record, ends = self.record, self.ends
        if not over:
            record.blocked += 1
            done_ns = end_ns
        elif self.ended_ns >= 0:
            record.blocked = _NEVER
            done_ns = self.ended_ns
        elif ends is None:  # nobody has seen its end
            record.blocked = _NEVER
            record.upper_bound = True
            done_ns = start_ns
        else:
            record.blocked = _NEVER
            # The callback may be on its way, waiting for the interpreter.
            done_ns = ends[0] if ends else start_ns
        here, self.here = self.here, None
        if _under_way.pop(here, None) is None:
            # A summary came first.
            LOG.put(record, EXPOSED, start_ns, end_ns)
            LOG.put(record, PAIR, self.latency_ns, end_ns - start_ns)
            return
        if not logs and record.exposed is not None and record.issue is not None and LOG.observer is None:
            record.take_whole(self.start_ns, done_ns, self.seq, self.issued_ns, start_ns, end_ns)
            return
        inbox = LOG.inbox
        inbox.append((record, WHOLE, self.start_ns, done_ns, (self.seq, self.issued_ns, start_ns, end_ns)))
        if len(inbox) >= BATCH:
            LOG.drain(wait=False)

    def look(self) -> None:
        """Put the operation into the log if it is over; called by whoever wants a summary now."""
        future = self.work.get_future()
        if not future.done():  # which it is a little later than the operation
            return
        record, done_ns = self.record, self.ended_ns
        if done_ns < 0:
            done_ns = self.ends[0] if self.ends else perf_counter_ns()
        self.latency_ns = done_ns - self.start_ns  # before others learn that it is in the log
        if _under_way.pop(self.here, None) is None:
            return
        try:
            future.value()
        except Exception:
            LOG.put(record, FAILED, 1, 0)
            return
        if self.ends is None and self.ended_ns < 0:
            record.upper_bound = True
            record.blocked = _NEVER
        LOG.put(record, WHOLE, self.start_ns, done_ns, (self.seq, self.issued_ns, 0, 0))

    def __del__(self) -> None:
        """Nobody waits for it any more: whoever ends it says when that was."""
        try:
            if self.here is None or self.here not in _under_way:
                return
            self.look()
            if _under_way.pop(self.here, None) is not None:
                told = partial(_end_unwatched, self.record, self.start_ns, self.issued_ns, self.seq)
                self.work.get_future().add_done_callback(told)
        except Exception:  # the interpreter may be ending
            return


def _ends_of(future: Any) -> list[int]:
    # Where the future's end will be.
    ends: list[int] = []
    future.add_done_callback(lambda _: ends.append(perf_counter_ns()))
    return ends


def _wait(course: Course, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return course.wait(args, kwargs)


class ShortWork(TimedWork):
    """The handle of such an operation."""

    __slots__ = ("_course",)
    _course: Course

    # Its attribute is set by whoever makes one: Python's own way to arguments takes as long as making the object.
    __init__: Any = dist.Work.__init__

    @property
    def _work(self) -> Any:  # type: ignore[override]
        return self._course.work

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait as the original does; how long that takes is the operation's exposed time."""
        return _wait(self._course, args, kwargs)

    def get_future(self) -> Any:
        """The original's future: whoever waits for that is not seen to wait, but the end is known."""
        return self._course.future()


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


def look() -> None:
    """Put every operation that is over into the log, waited for or not."""
    for reference in list(_under_way):
        course = reference()
        if course is not None:
            try:
                course.look()
            except Exception as error:
                fault(course.record.label, error)


LOG.look = look


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)
