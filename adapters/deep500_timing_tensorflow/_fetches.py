"""What the data of a fit hands out: how many batches an execution had, how many samples, and the wait for them.

Where Python asks for each batch, on JAX and torch, every wait is an interval. On TensorFlow the graph asks, and tf.data
adds up the waits. To read the sums takes one operation, which beside a step of a millisecond can be seen. So where
steps are that short and nothing is waited for, one reading serves for several executions. IO has an interval for each
of them all the same, with an equal share: their number, their sum and their mean are exact, and a sum of several waits
never stands beside single ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing import TimeType
from deep500_timing_tensorflow import _capabilities
from deep500_timing_tensorflow._data import listeners_at
from deep500_timing_tensorflow._data_tensorflow import Fetched, timed_dataset_at

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing import Timer
    from deep500_timing_tensorflow._data_tensorflow import TimedDataset
    from deep500_timing_tensorflow._epoch_totals import EpochTotals
    from deep500_timing_tensorflow._open_regions import OpenRegions

IO = TimeType.IO

READ_AFTER_NS = 50_000_000
"""How long the sums may stay unread: a reading takes far below a hundredth of that."""
WAITS_NS = 100_000
"""Who waits that long for a batch waits longer than a reading takes, and loses nothing by it."""
_FIRST_ONES = 2
"""Executions of a fit whose sums are read one by one: that which waits for the first batch, and one to compare with."""
_SLOW = 2
"""An execution that takes so many times what is usual is looked at by itself."""


class FetchTimes(Protocol):
    """Where the times go: a fit."""

    timer: Timer
    regions: OpenRegions
    totals: EpochTotals | None


class Fetches:
    """Data that tells nothing: the batches of an execution are those that Keras announced.

    Args:
        times: Where the times go.
        several: Batches of an execution that is not the last.
    """

    is_seen = False
    """Whether the data tells what it hands out."""
    uses_tensorflow = False
    """Whether tf.data tells it."""

    def __init__(self, times: FetchTimes, several: int = 1) -> None:
        self.times_io = False
        self.first_wait_ns: int | None = None
        self.wait_ns = 0
        self.steps_known: int | None = None
        self._times = times
        self.index = 0
        """With which batch of the epoch the execution begins."""
        self._several = several

    def epoch_begins(self) -> None:
        """No batch of the epoch was asked for."""
        self.first_wait_ns = None

    def execution_begins(self, is_new: bool) -> None:
        """An execution is about to begin.

        Args:
            is_new: Whether it is going to be traced or compiled.
        """

    def size(self) -> Any:
        """What tells the batches of the newest execution from those of another size; None if that is not known."""
        return None

    def execution_ended(self, began_ns: int, took_ns: int, steady: bool) -> int:
        """An execution is over.

        Args:
            began_ns: When it began, on the timer's clock.
            took_ns: How long it took.
            steady: Whether it neither traced nor compiled.

        Returns:
            How many batches it had.
        """
        self._add_samples(None, steady)
        return self._announced()

    def settle(self) -> None:
        """Tell what is not told yet."""

    def broken_off(self) -> None:
        """An exception ends the batches."""

    def _announced(self) -> int:
        left = None if self.steps_known is None else self.steps_known - self.index
        return max(min(self._several, left or self._several), 1)

    def _add_samples(self, samples: int | None, steady: bool | None) -> None:
        if self._times.totals is not None:
            self._times.totals.add_samples(samples, steady)


class ListenedFetches(Fetches):
    """Data that Python asks for each batch; see ``DataListener``."""

    is_seen = True

    def __init__(self, times: FetchTimes, several: int, before_hooks: bool) -> None:
        """Nothing was asked for.

        Args:
            times: Where the times go.
            several: Batches of an execution that is not the last.
            before_hooks: Whether Keras asks before it calls the hooks that precede an execution.
        """
        super().__init__(times, several)
        self._before_hooks = before_hooks
        self._batches = 0
        self._samples: int | None = 0

    def execution_begins(self, is_new: bool) -> None:
        """What the execution is going to ask for is its own."""
        if not self._before_hooks:
            self._forget()

    def execution_ended(self, began_ns: int, took_ns: int, steady: bool) -> int:
        """See :meth:`Fetches.execution_ended`."""
        batches = self._batches or self._announced()
        self._add_samples(self._samples, steady)
        self._forget()
        return batches

    def _forget(self) -> None:
        self.wait_ns = self._batches = 0
        self._samples = 0

    def fetch_begins(self) -> None:
        """Keras asks for a batch."""
        if self.first_wait_ns is None:
            self.first_wait_ns = self._times.timer.now_ns()
        if self.times_io:
            self._times.regions.start(IO)

    def fetch_ends(self, samples: int | None) -> None:
        """The batch is there."""
        took_ns = self._times.regions.end(IO)
        if took_ns is not None:
            self.wait_ns += took_ns
            if self._times.totals is not None:
                self._times.totals.add(IO, took_ns)
        self._batches += 1
        self._samples = None if samples is None or self._samples is None else self._samples + samples

    def fetch_finds_none(self) -> None:
        """There is no further batch."""
        self._times.regions.drop(IO)


class SummedFetches(Fetches):
    """Data of TensorFlow, whose sums are read when it is worth it.

    Args:
        times: Where the times go.
        several: Batches of an execution that is not the last.
        dataset: What adds up.
    """

    is_seen = uses_tensorflow = True

    def __init__(self, times: FetchTimes, several: int, dataset: TimedDataset) -> None:
        super().__init__(times, several)
        self._dataset = dataset
        # Of a new data set nothing need be read before its first batch.
        self._before: Fetched | None = Fetched(0, 0.0, 0, 0) if dataset.is_untouched else None
        self._now: Fetched | None = None
        self._readings = 0
        self._read_at_ns = self._slow_ns = 0.0
        self._usual_wait_ns = 0
        self._begin_group()

    def _begin_group(self) -> None:
        # The executions whose sums are not read yet.
        self._spans: list[tuple[int, int]] = []
        self._steady = 0

    def execution_begins(self, is_new: bool) -> None:
        """The sums have to be known when the first one begins, and when one begins that is not like the others."""
        if self._before is None:
            self._before = self._dataset.fetched()
        elif is_new:
            self.settle()

    def size(self) -> Any:
        """The batches and the bytes of an execution that :meth:`execution_ended` has not been told of."""
        if self._before is None or not self._dataset.works:
            return None
        self._now = self._dataset.fetched()
        return self._now.batches - self._before.batches, self._now.bytes - self._before.bytes

    def execution_ended(self, began_ns: int, took_ns: int, steady: bool) -> int:
        """See :meth:`Fetches.execution_ended`."""
        if self._before is None or not self._dataset.works:
            return super().execution_ended(began_ns, took_ns, steady)
        self._spans.append((began_ns, took_ns))
        self._steady += steady
        ended_ns = began_ns + took_ns
        if ended_ns >= self._read_at_ns or took_ns > self._slow_ns or not steady or self._now is not None:
            return self._read(ended_ns)
        return 1

    def settle(self) -> None:
        """Read the sums of the executions since the last reading."""
        if self._spans:
            self._read(sum(self._spans[-1]))

    def broken_off(self) -> None:
        """An exception ends the fit: what was waited for is told, for the batch that failed too."""
        before, now_ns = self._before, self._times.timer.now_ns()
        if before is None or not self._dataset.works:
            return
        self._now = now = self._dataset.fetched()
        if batches := now.batches - before.batches:
            # On the one that failed nothing was trained; if it was there, it is taken to be as large as the others.
            size = (now.bytes - before.bytes) * len(self._spans) // max(now.whole - before.whole, len(self._spans), 1)
            self._now = now._replace(bytes=before.bytes + size)
            failed = []
            if batches > len(self._spans):
                since_ns = sum(self._spans[-1]) if self._spans else now_ns - _waited_ns(before, now)
                failed = [(since_ns, now_ns - since_ns)]
            self._read(now_ns, failed)

    def _read(self, now_ns: int, failed: Sequence[tuple[int, int]] = ()) -> int:
        # Returns how many batches the newest execution had.
        executions, before, now = len(self._spans), self._before, self._now or self._dataset.fetched()
        assert before is not None
        self._before, self._now = now, None
        batches, size = now.batches - before.batches, now.bytes - before.bytes
        steady = self._steady == executions
        # Samples of which a part was traced with cannot be told apart.
        self._add_samples(self._dataset.samples_in(size), None if self._steady and not steady else steady)
        wait_ns = _waited_ns(before, now)
        if self.times_io and batches:
            # Only the length is known, not the place in the execution.
            spans = [*self._spans, *failed]
            for (began_ns, _), share_ns in zip(spans, self._shares(wait_ns, spans), strict=True):
                self._times.timer.record(IO, began_ns, began_ns + share_ns)
            if self._times.totals is not None:
                self._times.totals.add(IO, wait_ns, batches)
        newest = max(batches - executions + 1, 1)  # Those that were not read had one each.
        self._readings += 1
        one_by_one = self._several > 1 or self._readings < _FIRST_ONES or wait_ns >= WAITS_NS * batches
        self._read_at_ns = 0.0 if one_by_one else now_ns + READ_AFTER_NS
        self._slow_ns = _SLOW * sum(took_ns for _, took_ns in self._spans) / max(executions, 1)
        self._begin_group()
        return newest

    def _shares(self, wait_ns: int, spans: list[tuple[int, int]]) -> list[int]:
        # Of the waits of some executions, in order, as much as each is taken to have had of it.
        others, last_ns = len(spans) - 1, spans[-1][1]
        each_ns = wait_ns // len(spans)
        if others and last_ns > self._slow_ns:
            # What is waited for beyond what is usual was in the one that took so long, as far as it fits there.
            each_ns = max(min(each_ns, self._usual_wait_ns), -((last_ns - wait_ns) // others))
        else:
            self._usual_wait_ns = each_ns
        shares = [each_ns] * others + [wait_ns - each_ns * others]
        if any(share_ns > took_ns for share_ns, (_, took_ns) in zip(shares, spans, strict=True)):
            # None waits longer than it takes: the rest is the longer ones'.
            left_ns, by_length = 0, sorted(range(len(spans)), key=lambda place: spans[place][1])
            for place in by_length:
                left_ns += shares[place]
                shares[place] = min(left_ns, spans[place][1])
                left_ns -= shares[place]
            shares[by_length[-1]] += left_ns
        return shares


def _waited_ns(before: Fetched, now: Fetched) -> int:
    return round(1e3 * (now.wait_us - before.wait_us))


def fetches_of(
    times: FetchTimes, data: Any, backend: str, *, several: int, wanted: bool | str, counts: bool, phases: bool
) -> Fetches:
    """What tells of the data of a fit.

    Args:
        times: Where the times go.
        data: What hands its batches to the fit; None if it is not found, as in a loop that calls the hooks itself.
        backend: See ``backend_of``.
        several: Batches between two calls of the batch hooks.
        wanted: The callback's ``io``.
        counts: Whether the sizes of the batches are needed if the waits are not.
        phases: Whether stamps in the graph tell when each batch was there.
    """
    found = Fetches(times, several)
    if data is not None and backend in _capabilities.ON_TENSORFLOW:
        if wanted is not False or several > 1 or counts:
            dataset = timed_dataset_at(data)
            if dataset is not None:
                found = SummedFetches(times, several, dataset)
    elif data is not None and (listeners := listeners_at(data)) is not None:
        found = ListenedFetches(times, several, before_hooks=backend == "torch")
        listeners.add(found)
    found.times_io = _capabilities.can_time_io(wanted, backend, several, found.is_seen, phases)
    return found
