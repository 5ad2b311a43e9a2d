"""The batches of a fit: their number, their samples, and the wait for each.

Keras makes the iterator over its data for every epoch, out of an object that lives as long as the fit. On that object,
and not on the model, the making is replaced. On JAX and torch Keras asks a Python iterator for each batch, so an
iterator that passes them on times each wait.

On TensorFlow the compiled train function takes its batches and no Python runs, but tf.data can measure each wait: a
``LatencyStatsDataset`` adds up, in C++, the time inside the pipeline below it. It is put on top of the pipeline as
Keras made it, after tf.data has optimized that, so nothing in the pipeline changes (its order, its seeds, its
prefetching). The iterator has the type, and so the signature, of Keras's own: the train function is not traced once
more. The sums are read after an execution.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing_tensorflow._keras import ON_TENSORFLOW, guarded, warn_fault
from deep500_timing_tensorflow._regions import IO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing_tensorflow._regions import Execution, Regions

READ_EACH_NS = 10_000_000
"""An execution that takes this long is read alone: a reading takes a hundredth of it."""
READ_AFTER_NS = 50_000_000
"""How long the sums of shorter ones may stay unread."""
WAITS_NS = 100_000
"""A reading takes about as long. Batches that wait longer lose nothing by it, so they are read one by one."""
_FIRST_ONES = 2
"""Executions of a fit that are read one by one: the one that waits for the first batch, and one to compare with."""
_WAIT, _BYTES = "wait/", "bytes/"


def batches_of(data: Any, fit: Regions, backend: str, several: int, *, counts_samples: bool = True) -> Batches:
    """The batches of a fit, whose waits are timed from now on where they can be seen.

    Args:
        data: Keras's ``EpochIterator`` or ``DataHandler``, None if it is not known or not asked for.
        fit: What they belong to.
        backend: What runs the model.
        several: Batches of an execution.
        counts_samples: Whether TensorFlow is to add up bytes where the rows of a batch are not known beforehand. It
            logs an error for that at each fit.
    """
    if data is None:
        return Batches(fit, several)
    if backend in ON_TENSORFLOW:
        for name in ("_distributed_dataset", "_dataset"):
            dataset = vars(data).get(name)
            if hasattr(dataset, "element_spec"):
                if not isinstance(dataset, TimedDataset):
                    rows = _rows_of(getattr(data, "data_adapter", getattr(data, "_adapter", None)), dataset)
                    dataset = vars(data)[name] = TimedDataset(dataset, rows, counts_samples=counts_samples)
                return SummedBatches(fit, several, dataset.sums)
        return Batches(fit, several)
    make: Callable[[], Any] | None = getattr(data, "_get_iterator", None)
    if make is None:
        return Batches(fit, several)
    batches = IteratedBatches(fit, several)
    vars(data)["_get_iterator"] = lambda: _TimedIterator(iter(make()), batches)
    return batches


class Batches:
    """Batches that cannot be seen: an execution has as many as Keras announced."""

    is_seen = False
    """Whether the data gives the number of its batches."""
    times_io = False
    first_wait_ns: int | None = None
    """When the first batch of the epoch was asked for, where Python asks."""

    def __init__(self, fit: Regions, several: int = 1) -> None:
        self._fit = fit
        self._several = several

    def size(self) -> Any:
        """What tells the batches of the newest execution from those of another size; None if that is not known."""
        return None

    def execution_ended(self, execution: Execution) -> None:
        """An execution is over: set its number of batches."""
        self._fit.totals.add_samples(None, execution.steady)
        execution.steps = self._announced(execution)

    def settle(self) -> None:
        """Record the waits that are not recorded yet."""

    def abort(self) -> None:
        """An exception has ended the fit."""

    def _announced(self, execution: Execution) -> int:
        known = self._fit.steps_known
        left = None if known is None else known - execution.index
        return max(min(self._several, left or self._several), 1)


class IteratedBatches(Batches):
    """Batches that Python asks for one by one."""

    is_seen = True

    def __init__(self, fit: Regions, several: int) -> None:
        super().__init__(fit, several)
        self._batches = self._waited_ns = 0
        self._samples: int | None = 0

    def execution_ended(self, execution: Execution) -> None:
        totals = self._fit.totals
        execution.steps = self._batches or self._announced(execution)
        totals.add_samples(self._samples, execution.steady)
        if execution.steady and self._fit.fetches_before_hooks:
            totals.waited_ns += self._waited_ns
        self._batches = self._samples = self._waited_ns = 0

    @guarded
    def fetch_begins(self) -> None:
        if self.first_wait_ns is None:
            self.first_wait_ns = self._fit.now_ns()
        if self.times_io:
            self._fit.start(IO)

    @guarded
    def fetch_finds_none(self) -> None:
        self._fit.drop(IO)

    @guarded
    def fetch_ends(self, batch: Any) -> None:
        self._waited_ns += self._fit.end(IO) or 0
        self._batches += 1
        samples = samples_in(batch)
        self._samples = None if samples is None or self._samples is None else self._samples + samples


class _TimedIterator:
    """The same batches; the wait for each is IO."""

    def __init__(self, iterator: Iterator[Any], batches: IteratedBatches) -> None:
        self._iterator, self._batches = iterator, batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._batches.fetch_begins()
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._batches.fetch_finds_none()
            raise
        self._batches.fetch_ends(batch)
        return batch


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


# --- TensorFlow -------------------------------------------------------------------------------------------------------

# Sums of data sets that are gone. The collector may find that out in the middle of the user's trace, where an operation
# would become part of the graph or wait for the trace's lock, so they are destroyed when the next ones are made.
_unused: deque[Any] = deque()
_numbers = itertools.count()


class Fetched(NamedTuple):
    """The batches that the iterators of a fit have handed out so far."""

    batches: int
    wait_us: float
    """The sum of the waits in microseconds; with replicas, of the one that waited longest."""
    size: int
    """Their rows, where these are known beforehand, or the bytes of all tensors of all replicas; 0 if not counted."""
    whole: int
    """Batches without waits that ended in an exception of the data."""


class WaitSums:
    """The sums that tf.data adds up for one data set. It does not hold the data."""

    def __init__(self, tf: Any, rows: Callable[[int], int] | None, *, counts_samples: bool) -> None:
        self._rows = rows
        self._adds_bytes = counts_samples and rows is None
        self.works = False
        """Whether the newest iterator adds up its waits."""
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
        if self._rows is not None:
            return Fetched(batches, wait_us, self._rows(batches), batches)
        return Fetched(batches, wait_us, size, whole)

    def samples_in(self, size: int) -> int | None:
        """The samples in batches of such a size in all; None if samples may differ in size, or are not counted."""
        if self._rows is not None:
            return size
        if self.bytes_per_sample is None or size % self.bytes_per_sample:
            return None
        return size // self.bytes_per_sample

    def on_top_of(self, tf: Any, variant: Any, spec: Any, number: int = 0, *, finalizes: bool) -> Any:
        """A pipeline that adds up its waits and bytes; tf.data does not optimize it again."""
        self.bytes_per_sample = _bytes_per_sample(tf, spec) if self._adds_bytes else None
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
                variant = ops.LatencyStatsDataset(input_dataset=variant, tag=f"{_WAIT}{number}", **held)
                if self._adds_bytes:
                    variant = ops.BytesProducedStatsDataset(input_dataset=variant, tag=f"{_BYTES}{number}", **held)
            variant = ops.SetStatsAggregatorDataset(
                input_dataset=variant, stats_aggregator=aggregator, tag="", counter_prefix="", **held
            )
        return ops.OptionsDataset(input_dataset=variant, serialized_options=_options(tf), **held)


class TimedDataset:
    """Wraps a data set so that its iterators add up their waits; it hands on everything else."""

    def __init__(self, dataset: Any, rows: Callable[[int], int] | None = None, *, counts_samples: bool = True) -> None:
        import tensorflow as tf

        self._tf: Any = tf
        self._dataset = dataset
        self._timed_variant: Any = None
        self.sums = WaitSums(tf, rows, counts_samples=counts_samples)

    def __iter__(self) -> Any:
        tf, sums = self._tf, self.sums
        sums.works = False
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
                variant = dataset._apply_debug_options()._variant_tensor
                self._timed_variant = self.sums.on_top_of(tf, variant, spec, finalizes=True)
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
                resource, variant = part._iterator_resource, part._dataset._variant_tensor
                with tf.init_scope(), tf.device(resource.device):
                    timed = self.sums.on_top_of(tf, variant, part.element_spec, number, finalizes=False)
                    tf.raw_ops.MakeIterator(dataset=timed, iterator=resource)
        except Exception as error:
            warn_fault("timing a distributed data set", error)
            return
        self.sums.works = True


def _rows_of(adapter: Any, dataset: Any) -> Callable[[int], int] | None:
    # The rows of so many batches, where they are known before one is made.
    total, rows, passes = (getattr(adapter, name, None) for name in ("_num_samples", "_batch_size", "_size"))
    if total and rows and passes:  # arrays, one pass over them after the other
        return lambda batches: int(batches // passes * total + min(batches % passes * rows, total))
    import tensorflow as tf

    leaves: list[Any] = tf.nest.flatten(dataset.element_spec)
    shape = getattr(leaves[0], "shape", None) if leaves else None
    known = shape[0] if shape is not None and shape.rank else None
    return None if known is None else lambda batches: int(batches * known)


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
    known, so each of its batches has the group's mean.
    """

    is_seen = True

    def __init__(self, fit: Regions, several: int, sums: WaitSums) -> None:
        super().__init__(fit, several)
        self._sums = sums
        self._before = sums.fetched()
        self._now: Fetched | None = None
        self._group: list[Execution] = []
        self._readings = 0
        self._read_at_ns = 0
        self._usual_ns = 0
        """The mean wait of the last group."""

    def size(self) -> Any:
        """The batches and the bytes of an execution that has just ended."""
        if not self._sums.works:
            return None
        self._now = self._sums.fetched()
        return self._now.batches - self._before.batches, self._now.size - self._before.size

    def execution_ended(self, execution: Execution) -> None:
        if not self._sums.works:
            super().execution_ended(execution)
            return
        self._group.append(execution)
        if (
            execution.began_ns + execution.took_ns >= self._read_at_ns
            or execution.took_ns >= READ_EACH_NS
            or not execution.steady
            or self._now is not None
        ):
            self.settle()

    def settle(self) -> None:
        if self._group:
            self._take(self._now or self._sums.fetched())

    def abort(self) -> None:
        """Record the unread waits, and that of the batch on which the fit failed."""
        before, failed = self._before, self._fit.execution
        if not self._sums.works:
            return
        now, known = self._sums.fetched(), len(self._group)
        if failed is not None and now.batches - before.batches > known:
            # Nothing was trained on the batch that failed; if it was handed out, it is taken to be as large as others.
            size = (now.size - before.size) * known // max(now.whole - before.whole, known, 1)
            failed.took_ns = max(self._fit.now_ns() - failed.began_ns, READ_EACH_NS)
            self._take(now._replace(size=before.size + size), failed)
        elif self._group:
            self._take(now)

    def _take(self, now: Fetched, failed: Execution | None = None) -> None:
        group, before = self._group, self._before
        self._before, self._now, self._group = now, None, []
        batches = now.batches - before.batches
        wait_ns = round(1e3 * (now.wait_us - before.wait_us))
        steady = sum(execution.steady for execution in group)
        # A part that was traced cannot be told from the rest.
        self._fit.totals.add_samples(
            self._sums.samples_in(now.size - before.size), None if 0 < steady < len(group) else steady > 0
        )
        if group:
            group[-1].steps = max(batches - len(group) + 1, 1)  # The others had one each.
        executions = group if failed is None else [*group, failed]
        if self.times_io and batches:
            self._record(wait_ns, executions)
            self._fit.totals.add(IO, wait_ns, batches)
        self._readings += 1
        one_by_one = self._several > 1 or self._readings < _FIRST_ONES or wait_ns >= WAITS_NS * batches
        ended_ns = executions[-1].began_ns + executions[-1].took_ns
        self._read_at_ns = 0 if one_by_one else ended_ns + READ_AFTER_NS

    def _record(self, wait_ns: int, executions: list[Execution]) -> None:
        # Only the length of a wait is known, so it is put at the begin of its execution.
        record, (*others, newest), own_ns = self._fit.timer.record, executions, wait_ns
        is_apart = not others or newest.took_ns >= READ_EACH_NS
        if not is_apart:
            others, own_ns = executions, 0
        elif others:
            # A long one among short ones: the others are taken to have waited as usual.
            own_ns = min(max(wait_ns - self._usual_ns * len(others), 0), newest.took_ns)
        if others:
            mean_ns, rest_ns = divmod(wait_ns - own_ns, len(others))
            for number, execution in enumerate(others):
                record(IO, execution.began_ns, execution.began_ns + mean_ns + (number < rest_ns))
            if not is_apart:
                self._usual_ns = mean_ns
        if is_apart:
            record(IO, newest.began_ns, newest.began_ns + own_ns)
