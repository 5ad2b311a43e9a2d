"""Reads the Python stack of a thread. It imports next to nothing: the start of a program is sampled with it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any

_DEEPEST = 200


def read_stack(ident: int) -> list[tuple[CodeType, int, Any]] | None:
    """The frames of a thread, the innermost first: code, place of the instruction, and the module's name.

    Args:
        ident: Of the thread, as from ``threading.get_ident``.

    Returns:
        None if the thread has ended.
    """
    # The frames keep their locals alive, so they are let go before anything is looked up.
    frame = sys._current_frames().get(ident)
    if frame is None:
        return None
    found: list[tuple[CodeType, int, Any]] = []
    while frame is not None and len(found) < _DEEPEST:
        found.append((frame.f_code, frame.f_lasti, frame.f_globals.get("__name__")))
        frame = frame.f_back
    return found


def is_possible() -> bool:
    """Whether stacks can be read: without the GIL, the frames of a running thread may change meanwhile."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())
