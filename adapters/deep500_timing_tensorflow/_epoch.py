"""The names of the regions, one execution of a train function, and the totals of an epoch of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from deep500_timing import TimeType

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EPOCH, BATCH, IO = TimeType.EPOCH, TimeType.BATCH, TimeType.IO
FIT = "FIT"
VALIDATION = "VALIDATION"
"""The evaluation inside a fit; it lies inside EPOCH."""
TEST = "TEST"
PREDICT = "PREDICT"
CALLBACKS = "CALLBACKS"
"""The hooks of all callbacks, from the first to the last of a list, inside an epoch."""
FIT_CALLBACKS = "CALLBACKS (fit)"
"""Their hooks at the two ends of a fit."""
EPOCH_START = "EPOCH (start)"
"""From the begin of an epoch to its first batch."""
EPOCH_END = "EPOCH (end)"
"""Keras's own work after the last batch of an epoch: its metrics, and what surrounds the validation."""
IO_MEAN = "IO (mean)"
"""Waits that were read as one sum: one interval a batch, each the mean of its group."""

Key = TimeType | str


def first(key: Key) -> str:
    """The name of executions that traced or compiled: ``"BATCH (first)"``."""
    return f"{key.name if isinstance(key, TimeType) else key} (first)"


BATCH_FIRST = first(BATCH)


class Execution:
    """One call of a train function: all that is known of the batches that it trained on."""

    began_ns: int
    """On the timer's clock."""
    took_ns: int
    began_unix_ns: int
    """On the system's clock, as the stamps are; known with phases."""
    ended_unix_ns: int
    kept_as: Key
    steady: bool
    """Whether it neither traced nor compiled."""
    steps: int

    def __init__(self, number: int = 0) -> None:
        self.number, self.steps = number, 1


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

    def __init__(self, now_ns: int, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._began_ns = self._ended_ns = now_ns
        # The hooks of each batch add to these seven.
        self.batch_ns = self.batch_steps = 0
        """Executions of the steady state, and their batches."""
        self.waited_ns = 0
        """The waits for their data that lie outside them."""
        self.epoch_steps = 0
        self.callbacks_ns = self.callbacks_count = 0
        self._samples: int | None = 0
        self._epoch_samples: int | None = 0
        self._sums: dict[Key, list[int]] = {}

    def add(self, key: Key, duration_ns: int, count: int = 1) -> None:
        """Add a duration that counts ``count`` times in the region's mean."""
        found = self._sums.setdefault(key, [0, 0])
        found[0] += duration_ns
        found[1] += count

    def add_samples(self, samples: int | None, steady: bool | None) -> None:
        """Add the samples of one or several executions."""
        self._epoch_samples = _sum(self._epoch_samples, samples)
        if steady is not False:
            self._samples = _sum(self._samples, samples if steady else None)

    def lasts(self, now_ns: int) -> None:
        self._ended_ns = now_ns

    def ends(self, now_ns: int) -> None:
        self._ended_ns = now_ns
        self._settle = None
        self.add(EPOCH, now_ns - self._began_ns)

    def throughput(self) -> Throughput:
        if self._settle is not None:
            self._settle()
        return Throughput(
            self.batch_steps,
            self._samples,
            (self.batch_ns + self.waited_ns) / 1e9,
            self.epoch_steps,
            self._epoch_samples,
            (self._ended_ns - self._began_ns) / 1e9,
        )

    def logs(self, prefix: str) -> dict[str, float]:
        """The means of the regions in seconds, and the known rates, under names for Keras's logs."""
        sums: dict[Key, Sequence[int]] = {
            BATCH: (self.batch_ns, self.batch_steps),
            CALLBACKS: (self.callbacks_ns, self.callbacks_count),
            **self._sums,
        }
        logs = {
            f"{prefix}{key.name if isinstance(key, TimeType) else key}": total / number / 1e9
            for key, (total, number) in sums.items()
            if number
        }
        throughput = self.throughput()
        for name in _RATES:
            value = getattr(throughput, name)
            if value is not None:
                logs[f"{prefix}{name}"] = value
        return logs


def _rate(count: int | None, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def _sum(total: int | None, more: int | None) -> int | None:
    return None if total is None or more is None else total + more
