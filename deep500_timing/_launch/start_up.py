"""What a program does before its first step: the stack of its main thread, sampled from the first framework on."""

from __future__ import annotations

import threading
from _thread import start_new_thread
from time import perf_counter_ns

from deep500_timing._base.stack import is_possible, read_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

    Sample = tuple[int, list[tuple[CodeType, int, Any]]]

_PERIOD_S = 0.02
_MOST = 2000
"""Samples from which on every second one is dropped, and half as many are taken."""


class StartUp:
    """Samples the main thread on a thread of its own, until :meth:`end`."""

    def __init__(self) -> None:
        self._samples: list[Sample] = []
        self._ident = threading.main_thread().ident or 0
        self._done = threading.Event()
        if is_possible():
            # A thread that the module `threading` does not count: the program sees the threads that it has without us.
            start_new_thread(self._work, ())

    def _work(self) -> None:
        period_s = _PERIOD_S
        while not self._done.wait(period_s):
            now, stack = perf_counter_ns(), read_stack(self._ident)
            if stack is None:
                return
            self._samples.append((now, stack))
            if len(self._samples) >= _MOST:
                del self._samples[::2]
                period_s *= 2

    def end(self) -> list[Sample]:
        """Stop; returns the samples, each with its time in ns of ``perf_counter_ns``."""
        self._done.set()
        return self._samples
