"""The batches of an epoch that an exception ends, Ctrl-C included: Keras calls no hook then.

Keras goes through the batches inside a context of its data, which catches the end of the data. It belongs to one fit,
as what makes the iterators does, see ``_data.py``; whatever passes through it ends the epoch before its end. On
torch Keras enters a context for each batch instead, so nothing is told there: whoever looks sees that the fit is over.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing_tensorflow._faults import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable

_CONTEXT = "catch_stop_iteration"


class BrokenOffListener(Protocol):
    """What is told that an exception ends the batches."""

    def broken_off(self) -> None:
        """An exception ends the batches of an epoch; on the fit's thread, while its list of callbacks is there."""
        ...


def tell_when_broken_off(data: Any, listener: BrokenOffListener) -> None:
    """Tell of exceptions that end the batches of a fit; nothing is told where Keras goes through them in another way.

    Args:
        data: The ``EpochIterator`` of Keras 3 or the ``DataHandler`` of tf_keras.
        listener: Who is told. What the exception is, and its traceback, stay what they are.
    """
    method = getattr(type(data), _CONTEXT, None)
    if method is None:
        return
    # Another callback in the same fit has put its own there.
    make: Callable[[], Any] = vars(data).get(_CONTEXT) or _made_by(method, weakref.ref(data))
    vars(data)[_CONTEXT] = lambda: _Batches(make(), listener)


def _made_by(method: Callable[[Any], Any], found: weakref.ref[Any]) -> Callable[[], Any]:
    # The data holds what this returns, which so must not hold the data.
    return lambda: method(found())


class _Batches:
    # A class, as a generator would leave its frame in the traceback.
    def __init__(self, context: Any, listener: BrokenOffListener) -> None:
        self._context = context
        self._listener = listener

    def __enter__(self) -> Any:
        return self._context.__enter__()

    def __exit__(self, *raised: Any) -> Any:
        broken_off = True
        try:
            handled = self._context.__exit__(*raised)
            broken_off = raised[0] is not None and not handled
            return handled
        finally:
            if broken_off:
                try:
                    self._listener.broken_off()
                except Exception as error:
                    warn_fault("broken_off", error)
