"""Warnings that are issued once."""

from __future__ import annotations

import sys
import warnings
from threading import get_ident, main_thread

from deep500_timing.exceptions import TimingWarning

_said: set[str] = set()


def warn_once(message: str, *, key: str | None = None) -> None:
    """Warn with a ``TimingWarning``, once per process and key; the key of a warning without one is its message."""
    key = key or message
    if key not in _said:
        _said.add(key)
        try:
            warnings.warn(message, TimingWarning, stacklevel=stacklevel_of_user())
        except TimingWarning:
            # Warnings are errors. On a thread of ours the error would end that thread, unseen.
            if get_ident() == main_thread().ident:
                raise
            sys.stderr.write(f"TimingWarning: {message}\n")


def stacklevel_of_user() -> int:
    """The ``stacklevel`` with which the caller's ``warnings.warn`` points at the nearest line that is not ours.

    The line is the user's, however deep inside this package and its adapters the fault came up.
    """
    level, frame = 1, sys._getframe(1)
    # The adapters are separate packages with the same prefix.
    while str(frame.f_globals.get("__name__", "")).startswith("deep500_timing") and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def forget_warnings() -> None:
    """Let every warning be said again (for tests)."""
    _said.clear()
