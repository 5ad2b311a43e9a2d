"""The timer of the whole program, with times on the accelerator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing.ranklog import GlobalTimer
from deep500_timing_torch._timer import CPUGPUTimer

if TYPE_CHECKING:
    from deep500_timing import Timer


class TorchGlobalTimer(GlobalTimer):
    """As :class:`deep500_timing.ranklog.GlobalTimer`, timed on the accelerator as well where there is one."""

    def _new_timer(self) -> Timer:
        return CPUGPUTimer()


global_timer = TorchGlobalTimer()
