"""Samples the Python stack of a thread. It imports next to nothing: the start of a program is sampled with it.

Compiled, on Linux with CPython 3.11 to 3.13, frames are read without the GIL, in the process's own memory by
``process_vm_readv``, which never faults: the thread is seen where it is. What it changes meanwhile is found by a second
reading, and what makes no sense is left out; of functions of some ten ns, up to one stack in 100 has a false call.
Elsewhere, and where a reading of the caller's own stack differs from what the interpreter says of it, a sample
waits for the GIL: the thread is seen where it lets the GIL go.
"""

from __future__ import annotations

import gc
import sys
from _thread import allocate_lock
from time import perf_counter_ns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

    import cython

    Stack = list[tuple[CodeType, int]]
    """Code and place of the instruction in each frame, the innermost first."""
    Sample = tuple[int, Stack | None, tuple[int, int] | None]
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    from deep500_timing._base.plain import in_c

    code_at = read_now = wake_in = watch_in = in_c

    def room_for(_ident: int) -> Any:
        """None: nothing can be read in C."""
        return None


_DEEPEST = 200
_WORDS = 4 + 3 * _DEEPEST
"""Of a sample in C: time, time that the thread ran and that it waited, depth; and for each frame
code, place of the instruction, and what tells the code from one that takes its place in memory."""
_GOLDEN = 0.6180339887


def is_possible() -> bool:
    """Whether stacks can be read: without the GIL, the frames of a running thread may change meanwhile."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class StackWatch:
    """Samples the stack of the thread ``ident`` while it waits, every ``period_s`` on average."""

    def __init__(self, period_s: float, ident: int) -> None:
        self.period_s = period_s
        self.woken = False
        self._ident = ident
        self._now: Callable[[], int] = perf_counter_ns
        self._codes: dict[int, CodeType] = {}
        self._phase = 0.0
        self._lock = allocate_lock()
        self._lock.acquire()
        self._room: Any = room_for(ident)
        if self._room is not None and not self._agrees():
            self._room = None

    @property
    def takes_gil(self) -> bool:
        """Whether a sample waits for the GIL."""
        return self._room is None

    def follow(self, now: Callable[[], int]) -> None:
        """Take the times of another clock, in ns. A sample then waits for the GIL."""
        self._now, self._room = now, None

    def wake(self) -> None:
        """End the present :meth:`watch`, and each later one at once."""
        self.woken = True
        if self._room is not None:
            wake_in(self._room)
        if self._lock.locked():
            self._lock.release()

    def watch(self, seconds: float) -> list[Sample]:
        """Wait so long, or less, and return the samples that were taken meanwhile.

        Times in ns; stacks, None where none could be read; and how long the main thread ran and waited for a processor
        until then, in ns, None where that was not read.
        """
        if self._room is not None:
            count = watch_in(self._room, int(1e9 * seconds), int(1e9 * self.period_s))
            return [self._sample_in(self._room, number) for number in range(count)]
        # Uneven, so that no period of the program hides from the samples.
        nap_s = self.period_s * (0.5 + self._phase)
        if self._lock.acquire(timeout=min(nap_s, seconds)):
            self._lock.release()
            return []
        if nap_s > seconds:
            return []
        self._phase = (self._phase + _GOLDEN) % 1.0
        return [(self._now(), read_stack(self._ident), None)]

    def _sample_in(self, room: Any, number: int) -> Sample:
        words = memoryview(room).cast("q")[number * _WORDS : (number + 1) * _WORDS]
        time_ns, ran_ns, waited_ns, depth = words[:4]
        stack: Stack = []
        frames = words[4 : 4 + 3 * depth].tolist()
        for place, at, tag in zip(frames[::3], frames[1::3], frames[2::3], strict=True):
            code = self._codes.get(tag) or self._copy(place, tag)
            if code is None:  # It has gone: its caller is told.
                stack.clear()
            else:
                stack.append((code, at))
        return time_ns, stack or None, (ran_ns, waited_ns) if ran_ns >= 0 else None

    def _copy(self, place: int, tag: int) -> CodeType | None:
        held = code_at(place, tag)
        if held is None:
            return None
        file, name, lines, first, size = held
        code = _BLANK.replace(
            co_filename=file,
            co_name=name,
            co_qualname=name,
            co_linetable=lines,
            co_firstlineno=first,
            co_code=bytes(size),
        )
        self._codes[tag] = code
        return code

    def _agrees(self) -> bool:
        # Whether this thread's stack is read as the interpreter tells it.
        room = room_for(0)
        read_now(room)
        read = self._sample_in(room, 0)[1]
        return read is not None and _described(read) == _described(_stack_from(sys._getframe()))


_BLANK = compile("", "", "exec")


def _described(stack: Stack) -> list[tuple[Any, ...]]:
    return [(c.co_filename, c.co_qualname, c.co_firstlineno, c.co_linetable, at) for c, at in stack]


def _stack_from(frame: FrameType | None) -> Stack:
    found: Stack = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return found


def read_stack(ident: int) -> Stack | None:
    """The stack of the thread ``ident``, read with the GIL; None if it has ended."""
    # Up to 3.11 the object of a frame may start a collection. Its callbacks would let the thread go on and leave the
    # frame that is read.
    collects = sys.version_info < (3, 12) and gc.isenabled()
    if collects:
        gc.disable()
    try:
        # The frames keep their locals alive, so they are let go before anything is looked up.
        frame = sys._current_frames().get(ident)
        return None if frame is None else _stack_from(frame)
    finally:
        if collects:
            gc.enable()
