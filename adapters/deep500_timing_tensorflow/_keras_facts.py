"""What has to be known of a Keras model to time it, and that Keras does not say in one place."""

from __future__ import annotations

import sys
from typing import Any


def backend_of(model: object) -> str:
    """What runs a model: ``"tensorflow"``, ``"jax"``, ``"torch"`` or another of Keras 3, or ``"tf_keras"``."""
    for kind in type(model).__mro__:
        if kind.__module__.partition(".")[0] == "tf_keras":
            return "tf_keras"
    keras: Any = sys.modules.get("keras")
    if keras is None:
        return "unknown"
    return str(keras.backend.backend())


def steps_per_execution(model: Any) -> int:
    """How many batches a model trains on between two calls of the batch hooks."""
    steps = getattr(model, "steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "_steps_per_execution", None)
    if steps is None:
        return 1
    return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)
