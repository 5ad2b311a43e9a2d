"""``TimerCallback``, made from the callback class of the Keras that is there."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import missing_package
from deep500_timing_tensorflow._callback import TimerHooks

if TYPE_CHECKING:

    class TimerCallback(TimerHooks):
        """See :class:`TimerHooks`; a subclass of the installed Keras's callback when the program runs."""


def callback_class() -> type[Any]:
    """Make ``TimerCallback``, a callback of the Keras that is imported, or else of the one that is installed.

    Keras 3 asks no more of a callback than tf_keras does, but for three methods that :class:`TimerHooks` has, so one
    class serves the models of both.

    Raises:
        MissingPackageError: Neither Keras nor tf_keras is installed.
        ImportError: The one that is found is broken.
    """
    base = _base()
    # Keras puts callbacks into messages by the name of their class.
    namespace = {"__doc__": TimerHooks.__doc__, "__module__": "deep500_timing_tensorflow"}
    return type("TimerCallback", (TimerHooks, base), namespace)


def _base() -> type[Any]:
    names = ["keras", "tf_keras"]
    names.sort(key=lambda name: name not in sys.modules)
    for name in names:
        try:
            found: type[Any] = import_module(f"{name}.callbacks").Callback
        except ImportError as error:
            if error.name != name:
                raise
        else:
            return found
    raise missing_package("Keras", extra="tensorflow", caller="TimerCallback")
