"""DeepSpeed's named timers, which are in :mod:`deep500_timing_deepspeed.wallclock`; this import keeps working."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    return getattr(import_module("deep500_timing_deepspeed.wallclock"), name)
