"""Floating-point operations by layer, as PyTorch counts them and as our hooks tell the layers apart.

``FlopCounterMode`` counts by module too, but puts the backward passes of layers side by side (the three
projections of attention) on top of one another. So only its total is read, where a layer's passes begin and end.
"""

from __future__ import annotations

from torch.utils.flop_counter import FlopCounterMode

from deep500_timing_torch.layers._times import BACKWARD, FORWARD


class FlopCounter:
    """Stands for a timer whose regions count operations instead of nanoseconds."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False)
        self.regions: dict[str, _CountedRegion] = {}

    def region(self, key: str, gpu: bool = False) -> _CountedRegion:
        return self.regions.setdefault(key, _CountedRegion(self.counter))

    def now_ns(self) -> int:
        """No time: a recomputation counts in the backward pass that it lies in."""
        return 1

    def record(self, key: str, start_ns: int, end_ns: int) -> None:
        """Nothing: see :meth:`now_ns`."""

    def of(self, name: str) -> int:
        """The operations of a layer in the training steps so far, with those of the layers within."""
        found = (self.regions.get(f"{name} {purpose}") for purpose in (FORWARD, BACKWARD))
        return sum(region.total for region in found if region is not None)


class _CountedRegion:
    """Operations between start and end, added up."""

    __slots__ = ("_began", "_counter", "is_open", "total")

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter
        self._began = 0
        self.is_open = False
        self.total = 0

    def start(self) -> None:
        self.is_open = True
        self._began = self._counter.get_total_flops()

    def end(self) -> None:
        self.is_open = False
        self.total += self._counter.get_total_flops() - self._began

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self.is_open = False
