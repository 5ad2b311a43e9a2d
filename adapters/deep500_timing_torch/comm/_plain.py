"""Loads the plain form of the modules of this package that also exist compiled, for ``DEEP500_TIMING_PURE=1``."""

from __future__ import annotations

from pathlib import Path

from deep500_timing._base.plain import load_plain

load_plain("deep500_timing_torch.comm", Path(__file__).parent, ("_records", "_short_way", "_short_call"))
