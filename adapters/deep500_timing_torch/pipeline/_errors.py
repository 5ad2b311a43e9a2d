"""What goes wrong with a pipeline."""

from __future__ import annotations

from deep500_timing.exceptions import TimingError

__all__ = ["DataEndedError", "PipelineError"]


class PipelineError(TimingError, RuntimeError):
    """A pipeline is set up wrongly, or one of its ranks has failed; the text names the rank where it is known."""


class DataEndedError(PipelineError, StopIteration):
    """An iterator had fewer micro-batches left than a batch needs; raised on every rank, nothing was trained."""
