"""The batches of a fit: their number, their samples, and the wait for each.

Keras makes the iterator over its data for every epoch, out of an object that lives as long as the fit. On that object,
and not on the model, the making is replaced. On JAX and torch Keras asks a Python iterator for each batch, so an
iterator that passes them on times each wait. On TensorFlow the graph asks, see ``_data_tensorflow.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing_tensorflow._epoch import IO
from deep500_timing_tensorflow._keras import warn_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing_tensorflow._epoch import Execution
    from deep500_timing_tensorflow._regions import FitRegions


class Batches:
    """Batches that cannot be seen: an execution has as many as Keras announced."""

    is_seen = False
    """Whether the data gives the number of its batches."""

    def __init__(self, regions: FitRegions, several: int = 1) -> None:
        self.times_io = False
        self.first_wait_ns: int | None = None
        """When the first batch of the epoch was asked for, where Python asks."""
        self.wait_before_ns = 0
        """The wait for the newest execution's batches that lies before it, as on torch."""
        self.steps_known: int | None = None
        """Batches of an epoch, if Keras knows."""
        self.index = 0
        """The index of the execution's first batch in the epoch."""
        self.running: Execution | None = None
        self._regions = regions
        self._several = several

    def epoch_begins(self) -> None:
        self.first_wait_ns = None

    def execution_begins(self, is_new: bool) -> None:
        """The first execution of an epoch is about to begin, or one that is going to be traced or compiled."""

    def size(self) -> Any:
        """What tells the batches of the newest execution from those of another size; None if that is not known."""
        return None

    def execution_ended(self, execution: Execution) -> None:
        """An execution is over: set its number of batches."""
        self._add_samples(None, execution.steady)
        execution.steps = self._announced()

    def settle(self) -> None:
        """Record the waits that are not recorded yet."""

    def abort(self) -> None:
        """An exception has ended the fit."""

    def _announced(self) -> int:
        left = None if self.steps_known is None else self.steps_known - self.index
        return max(min(self._several, left or self._several), 1)

    def _add_samples(self, samples: int | None, steady: bool | None) -> None:
        if self._regions.totals is not None:
            self._regions.totals.add_samples(samples, steady)


class IteratedBatches(Batches):
    """Batches that Python asks for one by one."""

    is_seen = True

    def __init__(self, regions: FitRegions, several: int, before_hooks: bool) -> None:
        super().__init__(regions, several)
        self._before_hooks = before_hooks
        self._batches = 0
        self._samples: int | None = 0

    def execution_ended(self, execution: Execution) -> None:
        execution.steps = self._batches or self._announced()
        self._add_samples(self._samples, execution.steady)
        self._forget()

    def _forget(self) -> None:
        self.wait_before_ns = self._batches = 0
        self._samples = 0

    def fetch_begins(self) -> None:
        if self.first_wait_ns is None:
            self.first_wait_ns = self._regions.timer.now_ns()
        if self.times_io:
            self._regions.start(IO)

    def fetch_ends(self, samples: int | None) -> None:
        """The batch is there; ``samples`` is None if their number is not known."""
        took_ns = self._regions.end(IO)
        if took_ns is not None:
            if self._before_hooks:
                self.wait_before_ns += took_ns
            if self._regions.totals is not None:
                self._regions.totals.add(IO, took_ns)
        self._batches += 1
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def fetch_finds_none(self) -> None:
        self._regions.drop(IO)


class TimedBatches:
    """An iterable over batches that reports each wait, and hands on everything else."""

    def __init__(self, batches: Any, listener: Any) -> None:
        self._batches = batches
        self._listener = listener

    def __iter__(self) -> Iterator[Any]:
        return _TimedIterator(iter(self._batches), self._listener)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


class _TimedIterator:
    def __init__(self, iterator: Iterator[Any], listener: Any) -> None:
        self._iterator = iterator
        self._listener = listener

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._tell("fetch_begins")
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._tell("fetch_finds_none")
            raise
        self._tell("fetch_ends", samples_in(batch))
        return batch

    def _tell(self, event: str, *args: Any) -> None:
        try:
            getattr(self._listener, event)(*args)
        except Exception as error:
            warn_fault(event, error)


def time_iterator(data: Any, listener: IteratedBatches) -> bool:
    """Time the iterator of an ``EpochIterator``; returns whether Keras makes it in the known way."""
    make: Callable[[], Any] | None = getattr(data, "_get_iterator", None)
    if make is None:
        return False
    vars(data)["_get_iterator"] = lambda: TimedBatches(make(), listener)
    return True


def samples_in(batch: Any) -> int | None:
    """The samples of a batch: the first dimension of its first array, over all replicas; None if unknown."""
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
