"""The regions of Keras: their names, those that are open on a timer, and the totals of an epoch.

``docs/keras.md`` says where each region begins and ends.
"""

from __future__ import annotations

from collections import defaultdict
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import ref

from deep500_timing import TimeType
from deep500_timing.adapters import outside_name
from deep500_timing_tensorflow import _keras

if TYPE_CHECKING:
    from deep500_timing import Timer

Key = TimeType | str

EPOCH, BATCH, IO = TimeType.EPOCH, TimeType.BATCH, TimeType.IO
FIT, COMPILE = "FIT", "compile"
EPOCH_START, CALLBACKS, VALIDATION, EPOCH_END = "EPOCH (start)", "CALLBACKS", "VALIDATION", "EPOCH (end)"
TEST, PREDICT = "TEST", "PREDICT"


class Execution:
    """One call of a train function: all that is known of the batches that it trained on."""

    index = 0
    """The index of its first batch in the epoch."""
    steps = 1
    steady: bool
    """Whether it neither traced nor compiled."""
    began_ns: int
    """On the timer's clock."""
    took_ns: int
    began_unix_ns: int
    ended_unix_ns: int
    """On the system's clock, as the stamps are; known with phases."""


class Throughput(NamedTuple):
    """The rates of an epoch: in its steady state, and as a whole.

    The steady state is the executions that neither traced nor compiled, with the waits for their data, without the time
    between them.
    """

    steps: int
    """Batches of the steady state."""
    samples: int | None
    """Samples in them, over all replicas; None where the sizes of the batches cannot be seen."""
    seconds: float
    """Their duration, with the waits for their data."""
    epoch_steps: int
    epoch_samples: int | None
    epoch_seconds: float
    """Duration of the epoch until now, or until its end, with validation and callbacks."""

    @property
    def steps_per_s(self) -> float | None:
        """Batches per second in the steady state; None if there were none."""
        return _rate(self.steps, self.seconds)

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second in the steady state; None if that is not known."""
        return _rate(self.samples, self.seconds)

    @property
    def epoch_steps_per_s(self) -> float | None:
        """Batches per second of the whole epoch; None if there were none."""
        return _rate(self.epoch_steps, self.epoch_seconds)

    @property
    def epoch_samples_per_s(self) -> float | None:
        """Samples per second of the whole epoch; None if that is not known."""
        return _rate(self.epoch_samples, self.epoch_seconds)


_RATES = ("steps_per_s", "samples_per_s", "epoch_steps_per_s", "epoch_samples_per_s")


class EpochTotals:
    """Adds up the times of one epoch as they come."""

    def __init__(self, began_ns: int = 0) -> None:
        self.began_ns = began_ns
        self.ended_ns: int | None = None
        self.sums: defaultdict[Key, list[int]] = defaultdict(lambda: [0, 0])
        """Of each region the nanoseconds and the number that its mean is taken over, which for BATCH is of batches."""
        # The hooks of each batch add to these.
        self.batch, self.callbacks = self.sums[BATCH], self.sums[CALLBACKS]
        self.epoch_steps = 0
        self.waited_ns = 0
        """The waits for the data of the steady state that lie outside BATCH."""
        self._samples: int | None = 0
        self._epoch_samples: int | None = 0

    def add(self, key: Key, duration_ns: int, count: int = 1) -> None:
        total = self.sums[key]
        total[0] += duration_ns
        total[1] += count

    def add_samples(self, samples: int | None, steady: bool | None) -> None:
        """Add the samples of one or several executions; ``steady`` is None if some were and some were not."""
        self._epoch_samples = _sum(self._epoch_samples, samples)
        if steady is not False:
            self._samples = _sum(self._samples, samples if steady else None)

    def throughput(self, now_ns: int) -> Throughput:
        batch_ns, steps = self.batch
        return Throughput(
            steps,
            self._samples,
            (batch_ns + self.waited_ns) / 1e9,
            self.epoch_steps,
            self._epoch_samples,
            ((self.ended_ns or now_ns) - self.began_ns) / 1e9,
        )

    def logs(self, prefix: str, now_ns: int) -> dict[str, float]:
        """The means of the regions in seconds, and the known rates, under names for Keras's logs."""
        logs = {
            outside_name(f"{prefix}{key.name if isinstance(key, TimeType) else key}"): total_ns / number / 1e9
            for key, (total_ns, number) in self.sums.items()
            if number
        }
        throughput = self.throughput(now_ns)
        rates = {outside_name(f"{prefix}{name}"): getattr(throughput, name) for name in _RATES}
        return {**logs, **{name: rate for name, rate in rates.items() if rate is not None}}


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more


class _RecordedRegion:
    """Stands for a region that is open already, because of a fit around this one: it is recorded as it ends."""

    def __init__(self, timer: Timer, key: Key) -> None:
        self._timer, self._key = timer, key
        self._began_ns = 0

    def start(self) -> None:
        self._began_ns = self._timer.now_ns()

    def end(self) -> None:
        self._timer.record(self._key, self._began_ns, self._timer.now_ns())


class Regions:
    """What a fit or a step has open on a timer, and all that its hooks, its batches and its phases share.

    It holds neither the model nor the data, so an aborted fit keeps neither alive.
    """

    def __init__(self, timer: Timer, callbacks: Any = None) -> None:
        self.timer = timer
        self.now_ns = timer.now_ns
        self.totals = EpochTotals()
        self.open: dict[Key, tuple[int, Any]] = {}
        """Of each open region its begin on the timer's clock, and its handle."""
        self.execution: Execution | None = None
        """The one that is running."""
        self.steps_known: int | None = None
        """Batches of an epoch, if Keras knows."""
        self.gpu = False
        """Whether batches and phases are timed on the device as well."""
        self.fetches_before_hooks = False
        """Whether a batch is fetched before its hooks are called, as on torch."""
        self._callbacks = None if callbacks is None else ref(callbacks)
        self._thread = get_ident()

    @property
    def callbacks(self) -> Any:
        """Keras's list; None if there is none or Keras has dropped it."""
        return None if self._callbacks is None else self._callbacks()

    def is_own_thread(self) -> bool:
        return self._thread == get_ident()

    def is_running(self) -> bool:
        """Whether its loop goes on; of a loop of the user's own it is taken for granted."""
        callbacks = self.callbacks
        if callbacks is None:
            return self._callbacks is None
        return not self.is_own_thread() or _keras.loop_of(callbacks) is not None

    def handle(self, key: Key, gpu: bool = False) -> Any:
        """What starts and ends a region."""
        handle = self.timer.region(key, gpu)
        return _RecordedRegion(self.timer, key) if handle.is_open else handle

    def start(self, key: Key, gpu: bool = False) -> int:
        """Open a region, and return its begin."""
        handle = self.handle(key, gpu)
        handle.start()
        began_ns = self.now_ns()
        self.open[key] = began_ns, handle
        return began_ns

    def end(self, key: Key) -> int | None:
        """Close a region, keep and add up its interval, and return its length in ns; None if it is not open."""
        opened = self.open.pop(key, None)
        if opened is None:
            return None
        ended_ns = self.now_ns()
        opened[1].end()
        self.totals.add(key, ended_ns - opened[0])
        return ended_ns - opened[0]

    def record(self, key: Key, began_ns: int, ended_ns: int, count: int = 1) -> None:
        """Record an interval that counts ``count`` times in the epoch's mean."""
        self.timer.record(key, began_ns, ended_ns)
        self.totals.add(key, ended_ns - began_ns, count)

    def drop(self, key: Key) -> None:
        """Cancel an open region that did not happen, such as a batch after the last; it is not counted."""
        opened = self.open.pop(key, None)
        if opened is not None and not isinstance(opened[1], _RecordedRegion):
            self.timer.cancel(key)

    def fail_all(self) -> None:
        """Close every open region, innermost first, and count it as failed."""
        while self.open:
            key, (_, handle) = self.open.popitem()
            if not isinstance(handle, _RecordedRegion):
                self.timer.fail(key)
