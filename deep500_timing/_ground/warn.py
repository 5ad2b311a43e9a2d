"""Warnings that say a thing once."""

from __future__ import annotations

import warnings

from deep500_timing.exceptions import TimingWarning

_said: set[str] = set()


def warn_once(message: str, *, about: str | None = None) -> None:
    """Warn with a ``TimingWarning``, once in the life of the process.

    Args:
        message: What was done, what is wrong, what happens now.
        about: What counts as the same warning; the message itself if None.
    """
    key = about or message
    if key not in _said:
        _said.add(key)
        warnings.warn(message, TimingWarning, stacklevel=3)


def forget_warnings() -> None:
    """Let every warning be said again (for tests)."""
    _said.clear()
