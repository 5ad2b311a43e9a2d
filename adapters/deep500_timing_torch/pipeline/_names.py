"""The engine's times under the names that DeepSpeed has for them."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DEEPSPEED_NAMES", "NamedTimes"]

DEEPSPEED_NAMES: dict[str, tuple[str, ...]] = {
    "fwd_microstep": ("forward", "pipeline loss"),
    "fwd": ("forward", "pipeline loss"),
    "bwd_microstep": ("backward", "backward input", "backward weight"),
    "bwd": ("backward", "backward input", "backward weight"),
    "bwd_inner_microstep": ("backward", "backward input", "backward weight"),
    "bwd_inner": ("backward", "backward input", "backward weight"),
    "bwd_allreduce_microstep": ("pipeline reduce",),
    "bwd_allreduce": ("pipeline reduce",),
    "step_microstep": ("pipeline step",),
    "step": ("pipeline step",),
    "batch_input": ("pipeline load",),
    "train_batch": ("BATCH",),
    "pipe_send_output": ("pipeline send activation",),
    "pipe_send_grad": ("pipeline send gradient",),
    "pipe_recv_input": ("pipeline receive activation", "pipeline wait for activation"),
    "pipe_recv_grad": ("pipeline receive gradient", "pipeline wait for gradient"),
}
"""Which regions make up DeepSpeed's timer of a name; those of passes are of each stage of the rank."""


class NamedTimes:
    """A timer of DeepSpeed's name, read from the engine's regions. Times are in milliseconds, as there."""

    def __init__(self, name: str, regions: Callable[[], Sequence[str]], timer: Any) -> None:
        self.name_ = name
        self._regions = regions
        self._timer = timer
        self._read = 0.0

    def _times(self) -> list[float]:
        return [second for region in self._regions() for second in self._timer.get_time(region)]

    def elapsed(self, reset: bool = True) -> float:
        """The sum since it was last read with ``reset``, in milliseconds."""
        total = sum(self._times()) * 1e3
        since = total - self._read
        if reset:
            self._read = total
        return since

    def mean(self) -> float | None:
        """The mean of one, in milliseconds; None if there is none."""
        times = self._times()
        return fmean(times) * 1e3 if times else None

    def count(self) -> int:
        """How many there are."""
        return len(self._times())
