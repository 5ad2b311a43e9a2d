"""What one epoch of a fit adds up to: means for Keras's logs, and its throughput."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from deep500_timing import TimeType

if TYPE_CHECKING:
    from collections.abc import Callable


BATCH = TimeType.BATCH


class Throughput(NamedTuple):
    """How fast an epoch went: in its steady state, and as a whole.

    The steady state is the executions that neither traced nor compiled, with the waits for their data, and nothing of
    what lies between them.
    """

    steps: int
    """Batches of the steady state."""
    samples: int | None
    """Samples in them, over all replicas; None where the sizes of the batches cannot be seen."""
    seconds: float
    """How long they took, the waits for their data included."""
    epoch_steps: int
    """All batches of the epoch."""
    epoch_samples: int | None
    """Samples in them."""
    epoch_seconds: float
    """How long the epoch took until now, to its end or until it was broken off, validation and callbacks included."""

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
    """Adds up the times of one epoch as they come.

    Args:
        now_ns: When the epoch began, on the timer's clock.
        settle: Adds what happened and is not added yet, and how long the epoch has lasted, while it lasts.
    """

    def __init__(self, now_ns: int, settle: Callable[[], None] | None = None) -> None:
        """Nothing happened yet."""
        self._settle = settle
        self._began_ns = now_ns
        self._ended_ns = now_ns
        self._waited_ns = self._epoch_steps = 0
        self._samples: int | None = 0
        self._epoch_samples: int | None = 0
        self._batches = [0, 0]
        self._sums: dict[TimeType | str, list[int]] = {BATCH: self._batches}

    def add(self, key: TimeType | str, duration_ns: int, count: int = 1) -> None:
        """Add an interval of a region that holds ``count`` of what its mean is to be of."""
        found = self.sum_of(key)
        found[0] += duration_ns
        found[1] += count

    def sum_of(self, key: TimeType | str) -> list[int]:
        """Nanoseconds and number of a region, for who adds to them at each batch."""
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = [0, 0]
        return found

    def add_execution(self, kept_as: TimeType | str, took_ns: int, wait_ns: int, steps: int) -> None:
        """Add an execution of the train function.

        Args:
            kept_as: BATCH in the steady state, another region if it was traced or compiled.
            took_ns: How long it took.
            wait_ns: How long its data were waited for before.
            steps: How many batches it had.
        """
        self._epoch_steps += steps
        if kept_as is BATCH:
            batches = self._batches
            batches[0] += took_ns
            batches[1] += steps
            self._waited_ns += wait_ns
        else:
            self.add(kept_as, took_ns, steps)

    def add_samples(self, samples: int | None, steady: bool | None) -> None:
        """Add what one or several executions trained on.

        Args:
            samples: How many samples, None if that is not known.
            steady: Whether they are of the steady state, None if only some are.
        """
        self._epoch_samples = _sum(self._epoch_samples, samples)
        if steady is not False:
            self._samples = _sum(self._samples, samples if steady else None)

    def lasts(self, now_ns: int) -> None:
        """The epoch has lasted until now, and is not at its end."""
        self._ended_ns = now_ns

    def ends(self, now_ns: int) -> None:
        """Keras is done with the epoch; the hooks at its end follow."""
        self._ended_ns = now_ns
        self._settle = None
        self.add(TimeType.EPOCH, now_ns - self._began_ns)

    def throughput(self) -> Throughput:
        """The epoch's throughput so far."""
        if self._settle is not None:
            self._settle()
        took_ns, steps = self._batches
        return Throughput(
            steps,
            self._samples,
            (took_ns + self._waited_ns) / 1e9,
            self._epoch_steps,
            self._epoch_samples,
            (self._ended_ns - self._began_ns) / 1e9,
        )

    def logs(self, prefix: str) -> dict[str, float]:
        """The means of the regions in seconds, and the rates that are known, under names for Keras's logs."""
        logs = {
            f"{prefix}{key.name if isinstance(key, TimeType) else key}": total / number / 1e9
            for key, (total, number) in self._sums.items()
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
