"""What may run between two steps of the timer's code, let loose at a chosen step: entries, and exceptions.

Of code in Python each instruction is a step (through the trace function of the interpreter); an exception is raised
only where the interpreter itself would let one in: after a call of C, at the entry of a function, at a jump backwards.
Of compiled code the steps are the calls that it makes into Python, as of a clock, and its allocations, at which the
collector may run.
"""

from __future__ import annotations

import dis
import gc
import sys
from contextlib import contextmanager
from pathlib import Path

import deep500_timing

HERE = str(Path(deep500_timing.__file__).parent)
MODULES = {
    str(Path(HERE, *parts))
    for parts in (
        ("timer.py",),
        ("_recording", "recorder.py"),
        ("_recording", "intervals.py"),
        ("_recording", "decorators.py"),
        ("_recording", "misuse.py"),
        ("_recording", "threads.py"),
        ("devices", "_anchors.py"),
        ("devices", "_collecting.py"),
        ("devices", "_pool.py"),
        ("devices", "_queue.py"),
        ("devices", "_null.py"),
    )
}
LETS_IN = frozenset(
    number
    for name, number in dis.opmap.items()
    if name.startswith("CALL") or "JUMP_BACKWARD" in name or name == "RESUME"
)
"""The instructions after which the interpreter looks whether something wants to be raised."""

_codes: dict[object, tuple[bytes, list[object]]] = {}


def _parts(code):
    """The instructions of a code object by their places, and by each place what catches an exception there."""
    if code not in _codes:
        caught = [None] * (len(code.co_code) + 2)
        for entry in dis._parse_exception_table(code):
            caught[entry.start : entry.end] = [entry.target] * (entry.end - entry.start)
        _codes[code] = code.co_code, caught
    return _codes[code]


class Step:
    """Acts at the step of a number, counted from 1, in the block of :meth:`watched`.

    Args:
        number: The step at which to act.
        act: What to do there. An exception that it raises comes out of the code that was about to take that step.
        where: ``"instructions"``, ``"lets in"`` (where the interpreter lets an exception in) or ``"calls"`` (where
            :meth:`called` is called).
    """

    def __init__(self, number, act, where):
        self.number, self.act, self.where = number, act, where
        self.seen = 0
        self.acted = False

    def step(self):
        """Count a step, and act at the one."""
        self.seen += 1
        if self.seen == self.number and not self.acted:
            self.acted = True
            self.act()

    def called(self):
        """What a clock of the test's calls."""
        if self.where == "calls":
            self.step()

    def _enter_frame(self, frame, event, arg):
        if frame.f_code.co_filename not in MODULES:
            return None
        frame.f_trace_opcodes = True
        code, caught = _parts(frame.f_code)
        last = None

        def trace(frame, event, arg):
            nonlocal last
            if event == "opcode":
                before, last = last, frame.f_lasti
                # An exception is raised here, an instruction later than the interpreter would: only where both are
                # caught by the same.
                lets_in = before is not None and code[before] in LETS_IN and caught[before] == caught[last]
                if self.where == "instructions" or lets_in:
                    self.step()
            elif event == "exception":
                last = None
            return trace

        return trace

    @contextmanager
    def watched(self):
        """Watch the steps of the calling thread."""
        if self.where == "calls":
            yield self
            return
        before = sys.gettrace()
        sys.settrace(self._enter_frame)
        try:
            yield self
        finally:
            sys.settrace(before)


@contextmanager
def collector_acts(act):
    """The collector runs as often as it can, and acts each time, but not within what it does itself."""
    busy = False

    def callback(phase, info):
        nonlocal busy
        if phase == "stop" and not busy:
            busy = True
            try:
                act()
            finally:
                busy = False

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(1, 10**6, 10**6)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(callback)
