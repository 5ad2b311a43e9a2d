"""What one callback wants timed, and what it knows of all its fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deep500_timing import Timer
    from deep500_timing_tensorflow._epoch_totals import EpochTotals


class Wishes:
    """What one callback wants timed, and what it knows of all its fits.

    Args:
        timer: Where the times go.
        gpu: Whether batches are to be timed on the GPU as well.
        io: ``"auto"``, True or False, see ``TimerCallback``.
        phases: Whether the forward and the backward pass are to be timed.
        log_prefix: Under which names means go into Keras's logs; None for none.
    """

    def __init__(self, timer: Timer, *, gpu: bool, io: bool | str, phases: bool, log_prefix: str | None) -> None:
        self.timer, self.gpu, self.io, self.phases, self.log_prefix = timer, gpu, io, phases, log_prefix
        self.totals: EpochTotals | None = None
        self.batches = self.withheld = 0
