"""The times of an engine under DeepSpeed's names."""

from __future__ import annotations

from typing import Any

_BACKWARD = ("backward", "backward input", "backward weight")
_OF_A_STEP = {
    "fwd": ("forward", "pipeline loss"),
    "bwd": _BACKWARD,
    "bwd_inner": _BACKWARD,
    "bwd_allreduce": ("pipeline reduce",),
    "step": ("pipeline step",),
}
DEEPSPEED_NAMES: dict[str, tuple[str, ...]] = {
    **{name + end: regions for name, regions in _OF_A_STEP.items() for end in ("_microstep", "")},
    "batch_input": ("pipeline load",),
    "train_batch": ("BATCH",),
    "pipe_send_output": ("pipeline send activation",),
    "pipe_send_grad": ("pipeline send gradient",),
    "pipe_recv_input": ("pipeline receive activation", "pipeline wait for activation"),
    "pipe_recv_grad": ("pipeline receive gradient", "pipeline wait for gradient"),
}
"""Which regions make up DeepSpeed's timer of a name; those of passes are of each stage of the rank."""
_CONTINUED = ("pipeline loss", "backward weight", "pipeline wait for activation", "pipeline wait for gradient")
"""Regions that are the rest of what another of the same name began: they add to its time, and are not one more."""


class NamedTimes:
    """A timer of DeepSpeed's name, read from the engine's regions. Times are in milliseconds, as there."""

    def __init__(self, name: str, regions: list[str], timer: Any) -> None:
        self.name_ = name
        self._regions = regions
        self._timer = timer
        self._read = 0.0

    def _total(self) -> float:
        return sum(sum(self._timer.get_time(region)) for region in self._regions)

    def elapsed(self, reset: bool = True) -> float:
        """The sum since it was last read with ``reset``, in milliseconds."""
        total = self._total() * 1e3
        since = total - self._read
        if reset:
            self._read = total
        return since

    def mean(self) -> float | None:
        count = self.count()
        return self._total() / count * 1e3 if count else None

    def count(self) -> int:
        begun = (region for region in self._regions if not region.endswith(_CONTINUED))
        return sum(len(self._timer.get_time(region)) for region in begun)
