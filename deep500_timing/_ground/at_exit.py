"""One report of a timer however the program ends: at its end, by an exception, by Ctrl-C or by SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

_PATIENCE_S = 10.0
"""How long a report may take after SIGTERM: what interrupts the program must not wait for what it has interrupted."""


class _Report:
    """The report of one timer, which is made once, in the process that asked for it."""

    def __init__(self, report: Callable[[], None], prepare: Callable[[], None]) -> None:
        self._report = report
        self.prepare = prepare
        self._pid = os.getpid()
        self._once = threading.Lock()

    def make(self) -> None:
        if os.getpid() == self._pid and self._once.acquire(blocking=False):
            try:
                self._report()
            finally:
                _stay_interrupted()


def _stay_interrupted() -> None:
    # After Ctrl-C Python ends by the signal, unless source text is run meanwhile, as some modules do when they are
    # imported: that makes it forget. Source text that is interrupted makes it remember.
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


_reports: list[_Report] = []
_afterwards: list[Callable[[], None]] = []


def do_after_reports(call: Callable[[], None]) -> None:
    """Have something done after the reports at SIGTERM, where nothing of ``atexit`` is done."""
    _afterwards.append(call)


def report_at_exit(report: Callable[[], None], prepare: Callable[[], None]) -> None:
    """Call ``report`` once when this process ends. See :meth:`deep500_timing.Timer.report_at_exit`.

    At SIGTERM it is called on a thread of its own, after ``prepare`` has been called on the main thread; that must
    neither wait nor take a lock.
    """
    made = _Report(report, prepare)
    _reports.append(made)
    atexit.register(made.make)
    # Python ends without a word at SIGTERM, unless the program has seen to it; then that is how the program ends.
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    for made in _reports:
        with contextlib.suppress(Exception):
            made.prepare()
    # On a thread of its own: what the interrupted code holds, such as a lock, the report may need.
    reporter = threading.Thread(target=_report_all, name="deep500-timing report", daemon=True)
    reporter.start()
    reporter.join(_PATIENCE_S)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _report_all() -> None:
    for call in (*(made.make for made in _reports), *_afterwards):
        try:
            call()
        except Exception as error:
            print(f"deep500-timing: the report at the end failed: {error}")
