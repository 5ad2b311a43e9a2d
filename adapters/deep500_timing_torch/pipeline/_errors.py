"""What goes wrong with a pipeline."""

from __future__ import annotations

from deep500_timing.exceptions import TimingError

__all__ = ["PipelineError"]


class PipelineError(TimingError, RuntimeError):
    """A pipeline is set up wrongly, or one of its ranks has failed; the text names the rank where it is known."""
