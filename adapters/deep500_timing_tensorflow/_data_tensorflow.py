"""The data of a fit on TensorFlow, where the compiled train function takes its batches and no Python runs.

tf.data can measure each wait: a ``LatencyStatsDataset`` adds up, in C++, the time inside the pipeline below it. It is
put on top of the pipeline as Keras made it, after tf.data has optimized that, so nothing in the pipeline changes (its
order, its seeds, its prefetching). The iterator has the type, and so the signature, of Keras's own: the train function
is not traced once more. The sums are read after an execution.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing_tensorflow._data import Batches
from deep500_timing_tensorflow._epoch import IO, IO_MEAN
from deep500_timing_tensorflow._keras import warn_fault

if TYPE_CHECKING:
    from deep500_timing_tensorflow._epoch import Execution
    from deep500_timing_tensorflow._regions import FitRegions

READ_EACH_NS = 10_000_000
"""An execution that takes this long is read alone: a reading takes a hundredth of it."""
READ_AFTER_NS = 50_000_000
"""How long the sums of shorter ones may stay unread."""
WAITS_NS = 100_000
"""A reading takes about as long. Batches that wait longer lose nothing by it, so they are read one by one."""
_FIRST_ONES = 2
"""Executions of a fit that are read one by one: the one that waits for the first batch, and one to compare with."""
_WAIT, _BYTES = "wait/", "bytes/"

# Sums of data sets that are gone. The collector may find that out in the middle of the user's trace, where an operation
# would become part of the graph or wait for the trace's lock, so they are destroyed when the next ones are made.
_unused: deque[Any] = deque()
_numbers = itertools.count()


class Fetched(NamedTuple):
    """The batches that the iterators of a fit have handed out so far."""

    batches: int
    wait_us: float
    """The sum of the waits in microseconds; with replicas, of the one that waited longest."""
    bytes: int
    """The size of all tensors of all replicas."""
    whole: int
    """Batches without waits that ended in an exception of the data."""


class WaitSums:
    """The sums that tf.data adds up for one data set. It does not hold the data."""

    def __init__(self, tf: Any) -> None:
        self.works = False
        """Whether the newest iterator adds up its waits."""
        self.is_untouched = True
        """Whether no iterator was made, so that nothing can have been handed out."""
        self.bytes_per_sample: int | None = None
        with tf.init_scope(), tf.device("/CPU:0"):
            while _unused:
                tf.raw_ops.DestroyResourceOp(resource=_unused.popleft())
            # Found by its name, which outlives a fork.
            self.handle = tf.raw_ops.StatsAggregatorHandle(shared_name=f"deep500_timing_{os.getpid()}_{next(_numbers)}")
        weakref.finalize(self, _unused.append, self.handle).atexit = False
        self._parse = tf.compat.v1.Summary.FromString
        self._read = functools.partial(tf.raw_ops.StatsAggregatorSummary, iterator=self.handle)

    def fetched(self) -> Fetched:
        batches, wait_us, size, whole = 0, 0.0, 0, 0
        for value in self._parse(self._read().numpy()).value:
            sums = value.histo
            if value.tag.startswith(_WAIT):
                batches, wait_us = max(batches, int(sums.num)), max(wait_us, sums.sum)
            else:
                size, whole = size + int(sums.sum), max(whole, int(sums.num))
        return Fetched(batches, wait_us, size, whole)

    def samples_in(self, size: int) -> int | None:
        """The samples in batches of ``size`` bytes in all; None if samples may differ in size."""
        if self.bytes_per_sample is None or size % self.bytes_per_sample:
            return None
        return size // self.bytes_per_sample

    def on_top_of(self, tf: Any, variant: Any, tag: str, *, finalizes: bool) -> Any:
        """A pipeline that adds up its waits and bytes; tf.data does not optimize it again."""
        ops = tf.raw_ops
        # The operations ignore these two and keep the types of their input.
        held = {"output_types": [tf.variant], "output_shapes": [tf.TensorShape(None)]}
        if finalizes:
            variant = ops.FinalizeDataset(input_dataset=variant, **held)
        # Parts of the pipeline add up too, such as the fill of a buffer, and reading all of that takes several times as
        # long as the wait alone. They get sums that are never read.
        unread = ops.StatsAggregatorHandle(shared_name="deep500_timing_unread")
        for aggregator in (unread, self.handle):
            if aggregator is self.handle:
                variant = ops.LatencyStatsDataset(input_dataset=variant, tag=_WAIT + tag, **held)
                variant = ops.BytesProducedStatsDataset(input_dataset=variant, tag=_BYTES + tag, **held)
            variant = ops.SetStatsAggregatorDataset(
                input_dataset=variant, stats_aggregator=aggregator, tag="", counter_prefix="", **held
            )
        return ops.OptionsDataset(input_dataset=variant, serialized_options=_options(tf), **held)


class TimedDataset:
    """Wraps a data set so that its iterators add up their waits; it hands on everything else."""

    def __init__(self, dataset: Any) -> None:
        import tensorflow as tf

        self._tf: Any = tf
        self._dataset = dataset
        self._timed_variant: Any = None
        self.sums = WaitSums(tf)

    def __iter__(self) -> Any:
        tf, sums = self._tf, self.sums
        sums.works = sums.is_untouched = False
        if isinstance(self._dataset, tf.data.Dataset):
            with tf.init_scope(), tf.device("/CPU:0"):
                return self._iterator_of(self._dataset)
        iterator = iter(self._dataset)
        self._time_replicas(iterator)
        return iterator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def _iterator_of(self, dataset: Any) -> Any:
        from tensorflow.python.data.ops.iterator_ops import OwnedIterator
        from tensorflow.python.data.util import structure

        tf, spec = self._tf, dataset.element_spec
        try:
            if self._timed_variant is None:
                # Once a fit and not once an epoch.
                self.sums.bytes_per_sample = _bytes_per_sample(tf, spec)
                variant = dataset._apply_debug_options()._variant_tensor
                self._timed_variant = self.sums.on_top_of(tf, variant, "0", finalizes=True)
            resource = tf.raw_ops.AnonymousIteratorV3(
                output_types=structure.get_flat_tensor_types(spec), output_shapes=structure.get_flat_tensor_shapes(spec)
            )
        except Exception as error:
            warn_fault("timing a data set", error)
            return iter(dataset)
        tf.raw_ops.MakeIterator(dataset=self._timed_variant, iterator=resource)
        iterator = OwnedIterator(components=[resource], element_spec=spec)
        iterator._dataset = dataset  # Keeps the Python functions of the pipeline alive, as TensorFlow's own does.
        self.sums.works = True
        return iterator

    def _time_replicas(self, iterator: Any) -> None:
        # Each replica takes its part of a batch from its own iterator, fed by a thread; only those are made again.
        tf = self._tf
        try:
            parts = [part for worker in iterator._iterators for part in worker._iterator._device_iterators]
            for number, part in enumerate(parts):
                resource = part._iterator_resource
                with tf.init_scope(), tf.device(resource.device):
                    self.sums.bytes_per_sample = _bytes_per_sample(tf, part.element_spec)
                    variant = part._dataset._variant_tensor
                    timed = self.sums.on_top_of(tf, variant, str(number), finalizes=False)
                    tf.raw_ops.MakeIterator(dataset=timed, iterator=resource)
        except Exception as error:
            warn_fault("timing a distributed data set", error)
            return
        self.sums.works = True


def timed_dataset_at(data: Any) -> TimedDataset | None:
    """The data set of one fit with sums on top; None if Keras keeps it in another way."""
    for name in ("_distributed_dataset", "_dataset"):
        dataset = vars(data).get(name)
        if isinstance(dataset, TimedDataset):
            return dataset
        if dataset is not None and hasattr(dataset, "element_spec"):
            timed = vars(data)[name] = TimedDataset(dataset)
            return timed
    return None


def _bytes_per_sample(tf: Any, spec: Any) -> int | None:
    total = 0
    # A sparse or ragged tensor is one leaf here: its rows are not those of its components, and have no one size.
    for leaf in tf.nest.flatten(spec):
        shape: Any = getattr(leaf, "shape", None)
        if not isinstance(leaf, tf.TensorSpec) or not leaf.dtype.size or shape.rank in (None, 0):
            return None
        if not shape[1:].is_fully_defined():
            return None
        total += leaf.dtype.size * math.prod(shape[1:].as_list())
    return total or None


@functools.cache
def _options(tf: Any) -> bytes:
    # Otherwise tf.data would prefetch above the sums, and they would be those of a background thread.
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    options.experimental_optimization.inject_prefetch = False
    encoded: bytes = options._to_proto().SerializeToString()
    return encoded


class SummedBatches(Batches):
    """Batches of TensorFlow: tf.data adds up the waits.

    Reading the sums takes one operation, about 0.1 ms while a model runs. Executions of 10 ms and more, and those
    that wait, are read one by one, and IO has their waits. Shorter ones are read in groups: only the sum of a group is
    known, so each of its batches has the group's mean, in the region ``"IO (mean)"``.
    """

    is_seen = True

    def __init__(self, regions: FitRegions, several: int, sums: WaitSums) -> None:
        super().__init__(regions, several)
        self._sums = sums
        # Nothing need be read before the first batch of a new data set.
        self._before: Fetched | None = Fetched(0, 0.0, 0, 0) if sums.is_untouched else None
        self._now: Fetched | None = None
        self._group: list[Execution] = []
        self._readings = 0
        self._read_at_ns = 0
        self._usual_ns = 0
        """The mean wait of the last group."""

    def execution_begins(self, is_new: bool) -> None:
        if self._before is None:
            self._before = self._sums.fetched()
        elif is_new:
            self.settle()

    def size(self) -> Any:
        """The batches and the bytes of an execution that has just ended."""
        if self._before is None or not self._sums.works:
            return None
        self._now = self._sums.fetched()
        return self._now.batches - self._before.batches, self._now.bytes - self._before.bytes

    def execution_ended(self, execution: Execution) -> None:
        self.running = None
        if self._before is None or not self._sums.works:
            super().execution_ended(execution)
            return
        self._group.append(execution)
        ended_ns = execution.began_ns + execution.took_ns
        if (
            ended_ns >= self._read_at_ns
            or execution.took_ns >= READ_EACH_NS
            or not execution.steady
            or self._now is not None
        ):
            self._read(ended_ns)

    def settle(self) -> None:
        if self._group:
            self._read(self._group[-1].began_ns + self._group[-1].took_ns)

    def abort(self) -> None:
        """Record the unread waits, and that of the batch on which the fit failed."""
        before, running = self._before, self.running
        if before is None or not self._sums.works:
            return
        now = self._sums.fetched()
        known = len(self._group)
        if now.batches > before.batches:
            # Nothing was trained on the batch that failed; if it was handed out, it is taken to be as large as others.
            size = (now.bytes - before.bytes) * known // max(now.whole - before.whole, known, 1)
            self._now = now._replace(bytes=before.bytes + size)
            self._read(0, running if now.batches - before.batches > known else None)

    def _read(self, now_ns: int, failed: Execution | None = None) -> None:
        group, before, now = self._group, self._before, self._now or self._sums.fetched()
        assert before is not None
        self._before, self._now, self._group = now, None, []
        batches = now.batches - before.batches
        wait_ns = round(1e3 * (now.wait_us - before.wait_us))
        steady = sum(execution.steady for execution in group)
        # A part that was traced cannot be told from the rest.
        self._add_samples(
            self._sums.samples_in(now.bytes - before.bytes), None if 0 < steady < len(group) else steady > 0
        )
        if group:
            group[-1].steps = max(batches - len(group) + 1, 1)  # The others had one each.
        if self.times_io and batches:
            self._record(wait_ns, group if failed is None else [*group, failed], failed)
            if self._regions.totals is not None:
                self._regions.totals.add(IO, wait_ns, batches)
        self._readings += 1
        one_by_one = self._several > 1 or self._readings < _FIRST_ONES or wait_ns >= WAITS_NS * batches
        self._read_at_ns = 0 if one_by_one else now_ns + READ_AFTER_NS

    def _record(self, wait_ns: int, executions: list[Execution], failed: Execution | None) -> None:
        # Only the length of a wait is known, so it is put at the begin of its execution.
        record = self._regions.timer.record
        newest = executions[-1]
        others = executions[:-1]
        alone = not others or newest is failed or newest.took_ns >= READ_EACH_NS
        if alone:
            # A long one among short ones: the others are taken to have waited as usual.
            own_ns = max(wait_ns - self._usual_ns * len(others), 0) if others else wait_ns
            if others and newest is not failed:
                own_ns = min(own_ns, newest.took_ns)
            record(IO, newest.began_ns, newest.began_ns + own_ns)
            wait_ns -= own_ns
        else:
            others = executions
        if others:
            mean_ns, rest_ns = divmod(wait_ns, len(others))
            for number, execution in enumerate(others):
                record(IO_MEAN, execution.began_ns, execution.began_ns + mean_ns + (number < rest_ns))
            if not alone:
                self._usual_ns = mean_ns
