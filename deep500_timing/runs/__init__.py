"""Runs: what the processes of a training leave behind, and how it is read."""

from __future__ import annotations

from deep500_timing.runs._attach import attach
from deep500_timing.runs._log import RunLog

__all__ = ["RunLog", "attach"]
