"""The data of a fit, seen where Keras takes its batches: each wait, how many batches there were and how large.

Keras makes the iterator over its data for every epoch, out of an object that lives as long as the fit. On that object,
and not on the model, the making is replaced by one that does the same and takes times. On JAX and torch Keras asks a
Python iterator for each batch, so one that passes them on serves. On TensorFlow the graph asks, see
``_data_tensorflow.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing_tensorflow._faults import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class DataListener(Protocol):
    """What is told when a Python iterator is asked for a batch."""

    def fetch_begins(self) -> None:
        """Keras asks for a batch."""
        ...

    def fetch_ends(self, samples: int | None) -> None:
        """The batch is there; it holds that many samples if that is known."""
        ...

    def fetch_finds_none(self) -> None:
        """There is no further batch."""
        ...


class DataListeners:
    """Several listeners as one; a fault in one costs a warning, and the others are told."""

    def __init__(self) -> None:
        """Nobody listens."""
        self._listeners: list[DataListener] = []

    def add(self, listener: DataListener) -> None:
        """Tell one more."""
        self._listeners.append(listener)

    def fetch_begins(self) -> None:
        """See :class:`DataListener`."""
        for listener in self._listeners:
            try:
                listener.fetch_begins()
            except Exception as error:
                warn_fault("fetch_begins", error)

    def fetch_ends(self, samples: int | None) -> None:
        """See :class:`DataListener`."""
        for listener in self._listeners:
            try:
                listener.fetch_ends(samples)
            except Exception as error:
                warn_fault("fetch_ends", error)

    def fetch_finds_none(self) -> None:
        """See :class:`DataListener`."""
        for listener in self._listeners:
            try:
                listener.fetch_finds_none()
            except Exception as error:
                warn_fault("fetch_finds_none", error)


class TimedBatches:
    """An iterable over batches that tells of each wait, and is in all else the one that it stands for."""

    def __init__(self, batches: Any, listener: DataListener) -> None:
        self._batches = batches
        self._listener = listener

    def __iter__(self) -> Iterator[Any]:
        """Begin; what that takes is no wait for a batch."""
        return _TimedIterator(iter(self._batches), self._listener)

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of the batches."""
        return getattr(self._batches, name)


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], listener: DataListener) -> None:
        self._iterator = iterator
        self._listener = listener

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._listener.fetch_begins()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._listener.fetch_finds_none()
            raise
        self._listener.fetch_ends(samples_in(batch))
        return batch


def listeners_at(data: Any) -> DataListeners | None:
    """Those who are told of the waits of one fit on JAX or torch; None if Keras keeps its data in another way.

    Args:
        data: Keras's ``EpochIterator``.
    """
    making: Any = getattr(data, "_get_iterator", None)
    if making is None:
        return None
    if not isinstance(making, _MakeTimed):
        making = vars(data)["_get_iterator"] = _MakeTimed(making)
    found: DataListeners = making.listeners
    return found


class _MakeTimed:
    def __init__(self, making: Callable[[], Any]) -> None:
        self.listeners = DataListeners()
        self._making = making

    def __call__(self) -> Any:
        return TimedBatches(self._making(), self.listeners)


def samples_in(batch: Any) -> int | None:
    """How many samples a batch holds: the first dimension of its first array, over all replicas; None if unknown."""
    while isinstance(batch, (tuple, list, dict)):
        parts = list(batch.values()) if isinstance(batch, dict) else list(batch)
        if not parts:
            return None
        batch = parts[0]
    shape = getattr(batch, "shape", None)
    try:
        return int(shape[0]) if shape is not None and len(shape) else None
    except (TypeError, ValueError):
        return None
