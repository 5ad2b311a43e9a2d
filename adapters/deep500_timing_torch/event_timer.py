"""The time between two events of your own, as DeepSpeed's ``CudaEventTimer``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["CudaEventTimer"]


class CudaEventTimer:
    """A pair of events that were recorded, or will have been when the time is asked for.

    Args:
        start_event: Recorded where the time begins; made with ``enable_timing=True``.
        end_event: Recorded where it ends; likewise.
    """

    def __init__(self, start_event: torch.Event, end_event: torch.Event) -> None:
        self.start_event = start_event
        self.end_event = end_event

    def get_elapsed_msec(self) -> float:
        """The time between them on the device, in ms. Waits for these two events, and for nothing else.

        Raises:
            ValueError: An event was not recorded, or was made without ``enable_timing=True``; some backends of
                PyTorch raise RuntimeError instead.
        """
        # They may lie in different streams. The original also lets the current stream wait, to no end.
        self.start_event.synchronize()
        self.end_event.synchronize()
        return float(self.start_event.elapsed_time(self.end_event))
