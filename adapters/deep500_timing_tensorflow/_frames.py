"""The frame that a fit runs in, off which its list of callbacks and its data are read.

Keras hands neither to a callback. Where they are not found, as in a loop that calls the hooks itself, the callback's
own place has to do, and IO is left out.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_LOOPS = frozenset({"fit", "evaluate", "predict"})


def calling_list() -> Any:
    """The list of callbacks that is calling a hook on this thread, of either Keras; None if none is."""
    for frame in _frames(2):
        owner = frame.f_locals.get("self")
        if any(kind.__name__ == "CallbackList" for kind in type(owner).__mro__):
            return owner
    return None


def data_of_loop(callbacks: Any) -> Any:
    """What hands its batches to the ``fit`` that a list of callbacks belongs to; None if it is not found."""
    frame = _loop_of(callbacks)
    if frame is None:
        return None
    found = frame.f_locals
    return found.get("epoch_iterator", found.get("data_handler"))  # Keras 3, tf_keras


def is_running(callbacks: Any) -> bool:
    """Whether this thread is inside the ``fit``, ``evaluate`` or ``predict`` that a list of callbacks belongs to."""
    return _loop_of(callbacks) is not None


def _loop_of(callbacks: Any) -> FrameType | None:
    for frame in _frames(3):
        if frame.f_code.co_name in _LOOPS and frame.f_locals.get("callbacks") is callbacks:
            return frame
    return None


def _frames(depth: int) -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        yield frame
        frame = frame.f_back
