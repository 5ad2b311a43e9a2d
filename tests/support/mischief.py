"""What interrupts the timer in a test: a chosen call of a clock, a collection, a finalizer; and a full disk."""

from __future__ import annotations

import gc
import resource
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


class Dying:
    """Lets something be done by a finalizer."""

    def __init__(self, act):
        self.act = act

    def __del__(self):
        self.act()


@contextmanager
def full_disk(free_bytes):
    """Let no file grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
