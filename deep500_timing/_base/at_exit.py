"""One report of a timer however the program ends: at its end, by an exception, by Ctrl-C or by SIGTERM."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

_PATIENCE_S = 10.0
"""How long the reports may take after SIGTERM."""
_LAST_PATIENCE_S = 5.0
_PAUSE_S = 1.0
"""How long SIGTERM holds up the interrupted code. A report that takes longer may need a lock that the interrupted code
holds, an export's or that of the standard output, so that code goes on until the report is made."""


class _Report:
    """The report of one timer, which is made once, in the process that asked for it."""

    def __init__(self, report: Callable[[], None], prepare: Callable[[], None]) -> None:
        self._report = report
        self.prepare = prepare
        self._pid = os.getpid()
        self._once = threading.Lock()
        self._made = threading.Event()

    def make(self) -> None:
        """Make it, or wait for the thread that makes it."""
        if os.getpid() != self._pid:
            return
        if not self._once.acquire(blocking=False):
            self._made.wait(_PATIENCE_S)
            return
        try:
            self._report()
        finally:
            self._made.set()
            _stay_interrupted()


def _stay_interrupted() -> None:
    # After Ctrl-C Python ends by the signal, unless source text is run meanwhile, as some modules do when they are
    # imported: that makes it forget. Source text that is interrupted makes it remember.
    if getattr(sys, "last_type", None) is KeyboardInterrupt:
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


_reports: list[_Report] = []
_afterwards: list[Callable[[], None]] = []
_last: list[Callable[[], None]] = []
_endings: list[threading.Thread] = []
_has_begun = threading.Lock()
"""Held from the first SIGTERM on."""
_put_off: list[int] = []
"""The signal that came while calls of this module were made at exit, and no thread could be started any more."""
_is_exiting = False
_handled_in = 0
"""The process that has set the handler of SIGTERM. A forked child inherits it, but none of what is to be done."""


def _begin_exit() -> None:
    global _is_exiting
    _is_exiting = True


@atexit.register
def _end_exit() -> None:
    # Registered first, so that ``atexit`` calls it after everything below.
    global _is_exiting
    _is_exiting = False
    for ending in _endings:
        ending.join(_PATIENCE_S + _LAST_PATIENCE_S)
    if _put_off:
        _kill(_put_off[0])


def do_after_reports(call: Callable[[], None]) -> None:
    """Have something done after the reports at SIGTERM, where nothing of ``atexit`` is done."""
    _afterwards.append(call)


def do_last(call: Callable[[], None]) -> None:
    """Have something done at SIGTERM when the reports are made or have taken too long, until :func:`do_not_do_last`."""
    _last.append(call)
    atexit.register(_begin_exit)
    _handle_sigterm()


def do_not_do_last(call: Callable[[], None]) -> None:
    """Take back :func:`do_last`; the signal has its own effect again where nothing else is to be done."""
    if call in _last:
        _last.remove(call)
    _give_sigterm_back()


def _give_sigterm_back() -> None:
    is_needed = _last or _reports or _has_begun.locked()
    if not is_needed and _is_main_thread() and signal.getsignal(signal.SIGTERM) is _end:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def report_at_exit(report: Callable[[], None], prepare: Callable[[], None]) -> Callable[[], None]:
    """Call ``report`` once when this process ends. See :meth:`deep500_timing.Timer.report_at_exit`.

    At SIGTERM it is called on a separate thread, after ``prepare`` has been called on the main thread; that must
    neither wait nor take a lock. Returns what takes the request back.
    """
    made = _Report(report, prepare)
    _reports.append(made)
    atexit.register(made.make)
    atexit.register(_begin_exit)
    _handle_sigterm()

    def take_back() -> None:
        atexit.unregister(made.make)
        if made in _reports:
            _reports.remove(made)
        _give_sigterm_back()

    return take_back


def is_terminated() -> bool:
    return bool(_endings) or bool(_put_off)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle_sigterm() -> None:
    # Python ends without a word at SIGTERM, unless the program has seen to it; then that is how the program ends.
    global _handled_in
    if _is_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGTERM) is _end:
        _handled_in = os.getpid()


def _end(number: int, _frame: FrameType | None) -> None:
    # A pool may end a worker that was forked a moment ago, and has not yet given up the logs of this process.
    if os.getpid() != _handled_in:
        _kill(number)
        return
    # A second signal, which may interrupt this function at any line, waits for the reports and logs: job systems and
    # launchers often both send one.
    if not _has_begun.acquire(blocking=False):
        for ending in _endings:
            if ending.is_alive():  # It may not have been started.
                ending.join(_PAUSE_S)
        return
    for made in _reports:
        with contextlib.suppress(Exception):
            made.prepare()
    ending = threading.Thread(target=_do_all, args=(number,), name="deep500-timing end", daemon=True)
    _endings[:] = [ending]
    try:
        ending.start()
    except RuntimeError:
        # The interpreter is shutting down and, from Python 3.12 on, starts no thread any more.
        _endings.clear()
        if _is_exiting:
            _put_off.append(number)
        else:
            _kill(number)
        return
    ending.join(_PAUSE_S)
    # The interrupted code may reach the end of the program before the report is made.
    atexit.register(ending.join, _PATIENCE_S + _LAST_PATIENCE_S)


def _do_all(number: int) -> None:
    # Each on a separate thread: either may wait for a lock that the interrupted code holds for ever.
    _do((*(made.make for made in _reports), *_afterwards), _PATIENCE_S)
    _do(tuple(_last), _LAST_PATIENCE_S)
    _kill(number)


def _kill(number: int) -> None:
    # `signal.signal` works on the main thread only, which may be blocked; this works on any thread.
    ctypes.pythonapi.PyOS_setsig(number, None)
    os.kill(os.getpid(), number)


def _do(calls: tuple[Callable[[], None], ...], patience_s: float) -> None:
    if not calls:
        return
    doing = threading.Thread(target=_call_all, args=(calls,), name="deep500-timing report", daemon=True)
    doing.start()
    doing.join(patience_s)


def _call_all(calls: tuple[Callable[[], None], ...]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:
            print(f"deep500-timing: the report at the end failed: {error}")
