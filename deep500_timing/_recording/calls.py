"""Callables that stand in for others and note down when those were called.

An instrument puts them where a program looks its functions up. What runs between two long computations finds the caches
empty, so that each line of memory that is touched costs a tenth of a microsecond. So a stand-in hands on its arguments
as it got them, reads the clock and writes five whole numbers behind the last ones; which of them belong together is
made out when :meth:`CallLog.take` is called, in one go. Compiled, that is one function in C from the interpreter to
what it stands in for.

What is handed over, as a message is, has three calls: one makes it, one sends it off and gives a handle, one waits for
the handle. They are told to belong together by the addresses of what is made and of the handles, which live from one
call to the next; no reference is kept, and nothing lives longer than without timing.

Runs as plain Python and, with the C types of ``calls.pxd``, compiled.
"""

from __future__ import annotations

from _thread import get_ident
from time import perf_counter_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from typing import Any

    import cython
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    become = block_of_rows = row_of = rows_in = set_up_calls = write_row = in_c
    clock_ns = perf_counter_ns
    thread_id = get_ident

    # What a row is that is no call: something was made (its address, the codes of its issue and of the wait for it, its
    # label), something was sent off (its address), the call that did so (the address of its handles, times), one handle
    # of some was awaited (their address, their number, times). Compiled, they are constants of the .pxd.
    MADE, SENT, ISSUED, AWAITED = -1, -2, -3, -4

COMPILED: bool = cython.compiled

_FIRST_ROWS = 256

CallRow = tuple[int, int, int, int, int]
"""Code, label, start and end in ns, and an ordinal that the one who noted it down gave it, else -1."""

_running: list[CallLog] = []
"""The logs between :meth:`CallLog.begin` and :meth:`CallLog.end`, the innermost of a thread last."""


class CallLog:
    """What the stand-ins of one instrument have noted since it was emptied.

    Attributes:
        active: Whether calls are noted now.
        thread: The thread that began it last.
    """

    # Some are the compiled form's alone.
    __slots__ = ("active", "block", "clock", "end_of_block", "place", "rows", "thread")

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        """Start empty.

        Args:
            clock: Gives the time in ns and does not raise; the system's own if None.
        """
        self.active = False
        self.thread = 0
        self.clock = clock
        if cython.compiled:
            self.block: Any = block_of_rows(_FIRST_ROWS)
            self.place: Any = row_of(self.block, 0)
            self.end_of_block: Any = row_of(self.block, _FIRST_ROWS)
        else:
            self.rows: list[CallRow] = []

    def begin(self) -> None:
        """Calls are noted from now on; those of functions that several instruments share, on this thread alone."""
        self.thread = thread_id()
        self.active = True
        _running.append(self)

    def end(self) -> None:
        """Calls are not noted any more."""
        self.active = False
        if self in _running:
            _running.remove(self)

    def now_ns(self) -> int:
        """The time of its clock."""
        return clock_ns() if self.clock is None else self.clock()

    def note(self, code: int, label: int, start_ns: int, end_ns: int, ordinal: int = -1) -> None:
        """Note a call that was timed by other means."""
        if cython.compiled:
            write_row(self, code, label, start_ns, end_ns, ordinal)
        else:
            self.rows.append((code, label, start_ns, end_ns, ordinal))

    def raw(self) -> list[CallRow]:
        """What was noted, as it was noted; the log is empty then."""
        if cython.compiled:
            rows = []
            block, first, last = self.block, row_of(self.block, 0), self.place
            # A new one first: while rows are made of this, a finalizer may run, and do whatever it likes.
            fresh = block_of_rows(rows_in(block))
            self.block = fresh
            self.place = row_of(fresh, 0)
            self.end_of_block = row_of(fresh, rows_in(fresh))
            while first < last:
                rows.append((first[0], first[1], first[2], first[3], first[4]))
                first += 5
            return rows
        rows, self.rows = self.rows, []
        return rows

    def take(self, going: Collection[int] = (), unknown: int = -1) -> list[CallRow]:
        """What was noted, in the order in which it ended; the log is empty then.

        Each thing that was made has a row for the call that sent it off, and each wait for a handle one. Several that
        were made by one call and sent off by one are one row. Where there is one handle for several, it is waited for
        as what comes in, if something does.

        Args:
            going: The codes of waits for what goes out.
            unknown: The code of a wait for a handle of which nothing is known.

        Returns:
            Rows whose codes are those that the stand-ins were given.
        """
        found: list[CallRow] = []
        made: dict[int, tuple[int, int, int]] = {}
        handles: dict[int, list[tuple[int, int, int]]] = {}
        sent: list[tuple[int, int, int]] = []
        foreign = False
        awaited, turn = 0, 0
        for row in self.raw():
            code, address, number, start_ns, end_ns = row
            if code >= 0:
                found.append(row)
            elif code == MADE:
                made[address] = (number, start_ns, end_ns)
            elif code == SENT:
                thing = made.pop(address, None)
                if thing is None:
                    foreign = True  # Somebody else's.
                else:
                    sent.append(thing)
            elif code == ISSUED:
                last = None
                for thing in sent:
                    if thing != last:  # What one call has made comes one after the other.
                        found.append((thing[0], thing[2], start_ns, end_ns, -1))
                    last = thing
                handles[address] = [] if foreign else sent
                sent, foreign = [], False
            else:
                things = handles.get(address, [])
                if address != awaited:
                    awaited, turn = address, 0
                if len(things) == number:
                    thing = things[turn]
                    found.append((thing[1], thing[2], start_ns, end_ns, -1))
                elif turn == 0:
                    coming = [thing for thing in things if thing[1] not in going]
                    _, waited, label = (coming or things or [(-1, unknown, -1)])[0]
                    found.append((waited, label, start_ns, end_ns, -1))
                else:
                    found.append((*found.pop()[:3], end_ns, -1))
                turn += 1
                if turn >= number:
                    handles.pop(address, None)
                    awaited, turn = 0, 0
        return found


def log_of_this_thread() -> CallLog | None:
    """The innermost log that this thread has begun."""
    thread = thread_id()
    for log in reversed(_running):
        if log.thread == thread:
            return log
    return None


def first_number(args: tuple[Any, ...]) -> int:
    """The first argument as a label: -1 if it is no whole number, or none of 64 bits."""
    if args and type(args[0]) is int and -(2**63) <= args[0] < 2**63:
        return args[0]
    return -1


class StandIn:
    """What all stand-ins have in common: they are copied as functions are, that is not at all."""

    # Some are the compiled form's alone.
    __slots__ = ("__wrapped__", "log", "vector")

    def __copy__(self) -> StandIn:
        """Itself."""
        return self

    def __deepcopy__(self, memo: object) -> StandIn:
        """Itself."""
        return self


class TimedCall(StandIn):
    """Times each call of a function, labelled with its first argument if that is a whole number."""

    __slots__ = ("code", "keyword", "otherwise")

    def __init__(
        self, function: Callable[..., Any], log: CallLog, code: int, keyword: str | None = None, otherwise: int = -1
    ) -> None:
        """Stand in for a function.

        Args:
            function: What is called.
            log: Where its calls are noted.
            code: What they are.
            keyword: A keyword argument with which a call is something else when it is given and not true.
            otherwise: The code of such a call.
        """
        self.__wrapped__ = function
        if cython.compiled:
            become(self)
        self.log = log
        self.code = code
        self.keyword = keyword
        self.otherwise = otherwise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        log = self.log
        if not log.active:
            return self.__wrapped__(*args, **kwargs)
        start_ns = log.now_ns()
        result = self.__wrapped__(*args, **kwargs)
        end_ns = log.now_ns()
        code = self.code
        if self.keyword is not None and self.keyword in kwargs and not kwargs[self.keyword]:
            code = self.otherwise
        label = first_number(args)
        log.note(code, label, start_ns, end_ns)
        return result


class NotedItems(StandIn):
    """Notes the items of what a function returns as made by that call, to be sent off and awaited."""

    __slots__ = ("issued", "waited")

    def __init__(self, function: Callable[..., Any], log: CallLog, issued: int, waited: int) -> None:
        """Stand in for a function.

        Args:
            function: What is called, with a whole number that becomes their label.
            log: Where they are noted.
            issued: What it is to send them off.
            waited: What it is to wait for them.
        """
        self.__wrapped__ = function
        if cython.compiled:
            become(self)
        self.log = log
        self.issued = issued
        self.waited = waited

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        items = self.__wrapped__(*args, **kwargs)
        log = self.log
        if log.active and type(items) is list:
            label = first_number(args)
            for item in items:
                log.note(MADE, id(item), self.issued, self.waited, label)
        return items


class TimedIssue(StandIn):
    """Times each call of a function that sends off the items of its first argument and returns a list of handles.

    Args:
        function: What is called.
        idle: Whether it is not called for no items, and a new list returned.
    """

    __slots__ = ("idle",)

    def __init__(self, function: Callable[..., Any], idle: bool) -> None:
        self.__wrapped__ = function
        if cython.compiled:
            become(self)
        self.idle = idle

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        items = args[0] if args else None
        if type(items) is not list:
            return self.__wrapped__(*args, **kwargs)
        if not items and self.idle:
            return []
        log = log_of_this_thread()
        if log is None:
            return self.__wrapped__(*args, **kwargs)
        start_ns = log.now_ns()
        handles = self.__wrapped__(*args, **kwargs)
        end_ns = log.now_ns()
        for item in items:
            log.note(SENT, id(item), 0, 0, 0)
        log.note(ISSUED, id(handles), 0, start_ns, end_ns)
        return handles


class TimedWaits(StandIn):
    """Times each call of a function that waits for a list of handles.

    Args:
        function: What is called.
        singly: Whether all that it does is to call ``wait()`` of one after the other, so that each can be timed.
    """

    __slots__ = ("singly",)

    def __init__(self, function: Callable[..., Any], singly: bool) -> None:
        self.__wrapped__ = function
        if cython.compiled:
            become(self)
        self.singly = singly

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, or what it would."""
        if len(args) != 1 or kwargs:
            return self.__wrapped__(*args, **kwargs)
        handles = args[0]
        singly = self.singly and type(handles) is list
        if singly and not handles:
            return None
        log = log_of_this_thread()
        if log is None or not handles:
            return self.__wrapped__(handles)
        start_ns = log.now_ns()
        if not singly:
            result = self.__wrapped__(handles)
            log.note(AWAITED, id(handles), 1, start_ns, log.now_ns())
            return result
        for handle in handles:
            handle.wait()
            end_ns = log.now_ns()
            log.note(AWAITED, id(handles), len(handles), start_ns, end_ns)
            start_ns = end_ns
        return None


if cython.compiled:
    set_up_calls()
