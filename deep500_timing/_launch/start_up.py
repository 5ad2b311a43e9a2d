"""A program before its first step: the stack of its main thread, sampled from the first framework on."""

from __future__ import annotations

import threading
from _thread import allocate_lock, start_new_thread

from deep500_timing._base.stack import StackWatch, is_possible

TYPE_CHECKING = False
if TYPE_CHECKING:
    from deep500_timing._base.stack import Stack

_PERIOD_S = 0.02
_LOOK_S = 1.0
_MOST = 2000
"""Samples from which on every second one is dropped, and half as many are taken."""


class StartUp:
    """Samples the main thread on a separate thread, until :meth:`end`."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, Stack | None]] = []
        self._watch = StackWatch(_PERIOD_S, threading.main_thread().ident or 0)
        self._works = allocate_lock()
        if is_possible():
            self._works.acquire()
            # A thread that the module `threading` does not count: the program sees the threads that it has without us.
            start_new_thread(self._work, ())

    def _work(self) -> None:
        try:
            while not self._watch.woken:
                self._samples += [(time_ns, stack) for time_ns, stack, _ in self._watch.watch(_LOOK_S)]
                if len(self._samples) >= _MOST:
                    del self._samples[::2]
                    self._watch.period_s *= 2
        finally:
            self._works.release()

    def end(self) -> list[tuple[int, Stack | None]]:
        """Stop; returns the samples, each with its time in ns of ``perf_counter_ns``."""
        self._watch.wake()
        self._works.acquire(timeout=_LOOK_S)
        return self._samples
