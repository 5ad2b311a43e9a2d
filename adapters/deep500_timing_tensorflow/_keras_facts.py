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


def has_python_iterators(model: object) -> bool:
    """Whether the train function of a model takes any iterator over batches, as TensorFlow's does since Keras 3.7."""
    keras: Any = sys.modules.get("keras")
    if keras is None or backend_of(model) != "tensorflow":
        return False
    major, minor = (int(part) for part in str(keras.__version__).split(".")[:2])
    return (major, minor) >= (3, 7)


def steps_per_execution(model: Any) -> int:
    """How many batches a model trains on between two calls of the batch hooks."""
    steps = getattr(model, "steps_per_execution", None)
    if steps is None:
        steps = getattr(model, "_steps_per_execution", None)
    if steps is None:
        return 1
    return int(steps.numpy()) if hasattr(steps, "numpy") else int(steps)


def count_steps(model: Any) -> int | None:
    """How many batches a model has been trained on, by the counter in it that each step moves; None if it has none."""
    counter = getattr(model, "_train_counter", None)  # tf_keras
    if counter is None:
        optimizer = getattr(model, "optimizer", None)
        # The public one leaves out the batches whose gradients are only accumulated.
        counter = getattr(optimizer, "_iterations", None)
    if counter is None:
        return None
    try:
        return int(counter.numpy())
    except Exception:
        return None
