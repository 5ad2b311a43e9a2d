"""Megatron's named timers for PyTorch programs: the names of ``megatron.core.timers``, over the device's events.

::

    from deep500_timing_torch.megatron import Timers     # was: from megatron.core import Timers

Where PyTorch sees an accelerator, times are between events on its current stream, and no start or stop synchronizes;
else they are on the host's clock. See :mod:`deep500_timing.megatron`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing import megatron as _core
from deep500_timing.megatron import DummyTimer, Timer, TimerBase
from deep500_timing_torch._timer import timer_for

if TYPE_CHECKING:
    import torch

    from deep500_timing import Clock, DeviceClock
    from deep500_timing import Timer as _Engine

__all__ = ["DummyTimer", "Timer", "TimerBase", "Timers"]


class Timers(_core.Timers):
    """The core's :class:`deep500_timing.megatron.Timers`, on the accelerator where there is one.

    ``device`` names it: None for the accelerator that is there, ``"cpu"`` for the host's clock. ``clock`` is the host
    clock of a new timer, and ``device_clock`` a device clock in place of ``device``. The rest is the core's.

    Raises:
        DeviceUnavailableError: The device that was named is not there.
    """

    def __init__(
        self,
        log_level: int,
        log_option: str,
        timer: _Engine | None = None,
        *,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        device_clock: DeviceClock | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(log_level, log_option, timer_for(timer, device, clock, device_clock), **settings)


def _nothing(self: object, barrier: bool = False) -> None:
    """Stands for a start or stop in a compiled function, where a clock would break the graph."""


Timer.start._torchdynamo_inline = _nothing  # type: ignore[attr-defined]
Timer.stop._torchdynamo_inline = _nothing  # type: ignore[attr-defined]
