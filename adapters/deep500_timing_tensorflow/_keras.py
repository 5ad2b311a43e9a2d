"""What Keras does not hand to a callback: its backend, its list of callbacks, and the data of a fit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

ON_TENSORFLOW = ("tensorflow", "tf_keras")

_LOOPS = frozenset({"fit", "evaluate", "predict"})


def backend_of(model: object) -> str:
    """What runs a model: ``"tensorflow"``, ``"jax"``, ``"torch"`` or another of Keras 3, or ``"tf_keras"``."""
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "tf_keras":
            return "tf_keras"
    keras: Any = sys.modules.get("keras")
    return "unknown" if keras is None else str(keras.backend.backend())


def steps_per_execution(model: Any) -> int:
    """How many batches a model trains on between two calls of the batch hooks."""
    steps = getattr(model, "steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "_steps_per_execution", None)
    if steps is None:
        return 1
    return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)


def calling_list() -> Any:
    """The ``CallbackList`` that is calling a hook on this thread, of either Keras; None if there is none."""
    for frame in _frames(2):
        owner = frame.f_locals.get("self")
        if any(kind.__name__ == "CallbackList" for kind in type(owner).__mro__):
            return owner
    return None


def data_of_loop(callbacks: Any) -> Any:
    """The ``EpochIterator`` or ``DataHandler`` of the ``fit`` that a list belongs to; None if it is not found."""
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
