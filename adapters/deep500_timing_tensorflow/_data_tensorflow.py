"""The data of a fit on TensorFlow, where the compiled train function takes its batches and no Python runs.

tf.data itself can tell how long each batch was waited for: a ``LatencyStatsDataset`` adds up, in C++, the time that
passed inside the pipeline below it. It is put on top of the pipeline as Keras made it, after tf.data has optimized
that, so that nothing in it changes (its order, its seeds, its prefetching). The iterator has the type, and so the
signature, of Keras's own: the train function does not trace once more. The sums are read after an execution.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import deque
from typing import Any, NamedTuple

from deep500_timing_tensorflow._faults import warn_fault
from deep500_timing_tensorflow._sums_on_top import WAIT, new_sums, with_sums

# The sums of data sets that are gone. The collector may find that out anywhere, in the middle of the user's trace too,
# where an operation would become part of the graph, or wait for the lock that the trace holds: nothing is run there.
_unused: deque[Any] = deque()
# Made after a fit for the next ones, whose first batch need not wait for it.
_prepared: deque[Any] = deque()


class Fetched(NamedTuple):
    """What the iterators of a fit have handed out so far."""

    batches: int
    wait_us: float
    """How long they were waited for, in microseconds; with replicas, by the one that waited longest."""
    bytes: int
    """The size of all tensors of all replicas."""
    whole: int
    """Batches without those that were waited for in vain, as the data raised."""


class TimedDataset:
    """A data set whose iterators add up their waits, and that is in all else the one that it stands for.

    Args:
        dataset: A ``tf.data.Dataset``, or one that a strategy distributes to the replicas of this process.
    """

    def __init__(self, dataset: Any) -> None:
        """Nothing is handed out."""
        import tensorflow as tf

        self._tf: Any = tf
        self._parse = tf.compat.v1.Summary.FromString
        self._dataset = dataset
        self._bytes_per_sample: int | None = None
        self._timed_variant: Any = None
        self._is_plain = isinstance(dataset, tf.data.Dataset)
        try:
            self._sums = _prepared.pop()
        except IndexError:
            self._sums = new_sums(tf)
        weakref.finalize(self, _unused.append, self._sums).atexit = False
        self._read = functools.partial(tf.raw_ops.StatsAggregatorSummary, iterator=self._sums)
        self.works = False
        """Whether the newest iterator adds up its waits."""
        self.is_untouched = True
        """Whether nothing can have been handed out, as no iterator was made."""

    def __iter__(self) -> Any:
        """An iterator as the data set itself makes it, with the sums on top."""
        tf = self._tf
        self.works = self.is_untouched = False
        if self._is_plain:
            with tf.init_scope(), tf.device("/CPU:0"):
                iterator = self._iterator_of(self._dataset)
        else:
            iterator = iter(self._dataset)
            self._time_replicas(iterator)
        return iterator

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked of the data set."""
        return getattr(self._dataset, name)

    def fetched(self) -> Fetched:
        """What was handed out until now."""
        # Called at each batch. No device is named: an operation runs where the resource is that it is given first.
        batches, wait_us, size, whole = 0, 0.0, 0, 0
        for value in self._parse(self._read().numpy()).value:
            sums = value.histo
            if value.tag.startswith(WAIT):
                batches, wait_us = max(batches, int(sums.num)), max(wait_us, sums.sum)
            else:
                size, whole = size + int(sums.sum), max(whole, int(sums.num))
        return Fetched(batches, wait_us, size, whole)

    def samples_in(self, size: int) -> int | None:
        """How many samples batches of ``size`` bytes in all hold; None if samples may differ in size."""
        if self._bytes_per_sample is None or size % self._bytes_per_sample:
            return None
        return size // self._bytes_per_sample

    def _iterator_of(self, dataset: Any) -> Any:
        from tensorflow.python.data.ops.iterator_ops import OwnedIterator

        tf = self._tf
        flat = _flat(dataset.element_spec)
        try:
            if self._timed_variant is None:
                # Once a fit and not once an epoch.
                self._bytes_per_sample = _bytes_per_sample(tf, dataset.element_spec)
                variant = dataset._apply_debug_options()._variant_tensor
                self._timed_variant = with_sums(tf, variant, self._sums, "0", finalizes=True)
            resource = tf.raw_ops.AnonymousIteratorV3(**flat)
        except Exception as error:
            warn_fault("timing a data set", error)
            return iter(dataset)
        tf.raw_ops.MakeIterator(dataset=self._timed_variant, iterator=resource)
        iterator = OwnedIterator(components=[resource], element_spec=dataset.element_spec)
        iterator._dataset = dataset  # Keeps the Python functions of the pipeline, as in an iterator of its own.
        self.works = True
        return iterator

    def _time_replicas(self, iterator: Any) -> None:
        # Each replica takes its part of a batch from an iterator of its own, fed by a thread; only they are made again.
        tf = self._tf
        try:
            parts = [part for worker in iterator._iterators for part in worker._iterator._device_iterators]
            for number, part in enumerate(parts):
                resource = part._iterator_resource
                with tf.init_scope(), tf.device(resource.device):
                    self._bytes_per_sample = _bytes_per_sample(tf, part.element_spec)
                    variant = part._dataset._variant_tensor
                    timed = with_sums(tf, variant, self._sums, str(number), finalizes=False)
                    tf.raw_ops.MakeIterator(dataset=timed, iterator=resource)
        except Exception as error:
            warn_fault("timing a distributed data set", error)
            return
        self.works = True


def timed_dataset_at(data: Any) -> TimedDataset | None:
    """The data set of one fit with sums on top; None if Keras keeps it in another way.

    Args:
        data: The ``EpochIterator`` of Keras 3 or the ``DataHandler`` of tf_keras.
    """
    for name in ("_distributed_dataset", "_dataset"):
        dataset = vars(data).get(name)
        if isinstance(dataset, TimedDataset):
            return dataset
        if dataset is not None and hasattr(dataset, "element_spec"):
            timed = vars(data)[name] = TimedDataset(dataset)
            return timed
    return None


def _flat(spec: Any) -> dict[str, Any]:
    from tensorflow.python.data.util import structure

    return {
        "output_types": structure.get_flat_tensor_types(spec),
        "output_shapes": structure.get_flat_tensor_shapes(spec),
    }


def _bytes_per_sample(tf: Any, spec: Any) -> int | None:
    total = 0
    for leaf in tf.nest.flatten(spec, expand_composites=True):
        shape: Any = getattr(leaf, "shape", None)
        if not isinstance(leaf, tf.TensorSpec) or not leaf.dtype.size or shape.rank in (None, 0):
            return None
        if not shape[1:].is_fully_defined():
            return None
        total += leaf.dtype.size * math.prod(shape[1:].as_list())
    return total or None


def prepare_for_more_fits() -> None:
    """Let go of the sums that are not used any more, and have some for the next fit; after a fit."""
    import tensorflow as tf

    with tf.init_scope(), tf.device("/CPU:0"):
        while _unused:
            try:
                tf.raw_ops.DestroyResourceOp(resource=_unused.popleft())
            except Exception as error:
                warn_fault("letting go of a data set's sums", error)
    if not _prepared:
        _prepared.append(new_sums(tf))
