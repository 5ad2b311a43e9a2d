"""Closes run logs at process exit."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from deep500_timing._base.at_exit import do_last, do_not_do_last, in_last
from deep500_timing._base.fork import after_fork

_open: dict[int, Any] = {}
"""Every open :class:`RunLog`. This module is below it."""


def watch(log: Any) -> None:
    """Close the log when the process ends: at exit, after an exception, by SIGINT and by SIGTERM.

    A handler for SIGTERM is set only if the program has none. It writes the rest, then the signal takes effect. A
    handler that the program sets later replaces it.
    """
    _open[id(log)] = log
    if len(_open) == 1:
        atexit.register(_at_exit)
        do_last(_at_sigterm)


def unwatch(log: Any) -> None:
    _open.pop(id(log), None)
    if not _open:
        atexit.unregister(_at_exit)
        do_not_do_last(_at_sigterm)


def _at_exit() -> None:
    # The interpreter sets it when an exception ends the program.
    error = getattr(sys, "last_value", None)
    reason = "exit" if error is None else type(error).__name__
    with in_last():
        for log in list(_open.values()):
            if error is not None:
                log.event("exception", f"{type(error).__name__}: {error}"[:2000])
            log.close(reason=reason, wait=False)


def _at_sigterm() -> None:
    for log in list(_open.values()):
        log.event("signal", "SIGTERM")
        log.close(reason="SIGTERM", wait=False)


@after_fork
def _after_fork() -> None:
    # The files and the thread belong to the parent. A child must not end them.
    for log in list(_open.values()):
        log.abandon()
    _open.clear()
    atexit.unregister(_at_exit)
    do_not_do_last(_at_sigterm)
