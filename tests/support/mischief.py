"""Code that interrupts the timer in a test: at a chosen call of a clock, or whenever the garbage collector runs."""

from __future__ import annotations

import gc
from contextlib import contextmanager


class Step:
    """Acts at the call of a number, counted from 1.

    Args:
        number: The call at which to act.
        act: What to do there. An exception that it raises comes out of the call.
    """

    def __init__(self, number, act):
        self.number, self.act = number, act
        self.seen = 0
        self.acted = False

    def called(self):
        """Count a call of the test's clock, and act at the chosen one."""
        self.seen += 1
        if self.seen == self.number and not self.acted:
            self.acted = True
            self.act()


@contextmanager
def collector_acts(act):
    """Run the garbage collector as often as possible, and act after each run, without recursion."""
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
