"""What one epoch of a fit adds up to: means for Keras's logs, and its throughput."""

from __future__ import annotations

from typing import NamedTuple

from deep500_timing import TimeType


class Throughput(NamedTuple):
    """How fast an epoch went, in its steady state: executions that traced or compiled are left out."""

    steps: int
    """Batches that were trained on."""
    samples: int | None
    """Samples in them, over all replicas; None where the sizes of the batches cannot be seen."""
    seconds: float
    """How long that took, the waits for data and other callbacks between the batches included."""

    @property
    def steps_per_s(self) -> float | None:
        """Batches per second; None if there were none."""
        return self.steps / self.seconds if self.steps and self.seconds > 0 else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second; None if that is not known."""
        if self.samples is None or not self.steps or self.seconds <= 0:
            return None
        return self.samples / self.seconds


class EpochTally:
    """Adds up the times of one epoch as they come."""

    def __init__(self, now_ns: int) -> None:
        """Start the epoch at ``now_ns`` on the timer's clock."""
        self._began_ns = now_ns
        self._ended_ns = now_ns
        self._left_out_ns = 0
        self._steps = 0
        self._samples: int | None = 0
        self._sums: dict[str, tuple[int, int]] = {}

    def add(self, key: TimeType | str, duration_ns: int, count: int = 1) -> None:
        """Add intervals of a region that together took ``duration_ns``."""
        name = key.name if isinstance(key, TimeType) else key
        total, number = self._sums.get(name, (0, 0))
        self._sums[name] = (total + duration_ns, number + count)

    def add_execution(self, began_ns: int, ended_ns: int, *, steps: int, samples: int | None, steady: bool) -> None:
        """Add an execution of the train function: ``steps`` batches, traced or compiled if not ``steady``."""
        self._ended_ns = ended_ns
        if steady:
            self._steps += steps
            self._samples = None if samples is None or self._samples is None else self._samples + samples
        else:
            self._left_out_ns += ended_ns - began_ns

    def throughput(self) -> Throughput:
        """The epoch's throughput so far."""
        seconds = (self._ended_ns - self._began_ns - self._left_out_ns) / 1e9
        return Throughput(self._steps, self._samples, max(seconds, 0.0))

    def logs(self, prefix: str) -> dict[str, float]:
        """The means of the regions in seconds, and the rates that are known, under names for Keras's logs."""
        logs = {f"{prefix}{name}": total / number / 1e9 for name, (total, number) in self._sums.items() if number}
        throughput = self.throughput()
        for name in ("steps_per_s", "samples_per_s"):
            value = getattr(throughput, name)
            if value is not None:
                logs[f"{prefix}{name}"] = value
        return logs
