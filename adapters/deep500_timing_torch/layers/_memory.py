"""The device's memory before and after each layer's calls: the memory that it keeps, and that it never returns.

Nothing is reset: a peak within a layer is known when the layer raised the framework's own peak, and not otherwise.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from deep500_timing.memory import MemoryReader
    from deep500_timing_torch.layers._select import Call, Layer

_KEPT_STEPS = 4096
"""Steps over which growth is judged: the newest."""
_T_975 = {3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}
"""97.5 % quantile of Student's t by degrees of freedom; 2.0 beyond is at most 10 % too narrow, from 60 on too wide."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The device's memory around one layer's calls. None where the device does not tell."""

    samples: int
    """Forward passes at whose ends it was read."""
    allocated_before_bytes: int | None
    """The memory of tensors before the last of them."""
    allocated_after_bytes: int | None
    reserved_after_bytes: int | None
    kept_bytes: float | None
    """The mean memory that a forward pass in training left occupied: its output, and tensors saved for backward."""
    peak_within_bytes: int | None
    """The most that tensors occupied within a call; None if no call raised the framework's own peak."""
    unreturned_bytes: float | None
    """The mean memory that a step's passes left occupied, without new gradients and the layers within it; the first
    step is left out. A value above 0 suggests a leak."""


@dataclass(frozen=True, slots=True)
class Growth:
    """How the memory that tensors occupy as a step begins changes over the steps."""

    bytes_per_step: float
    """Slope of the least-squares line."""
    interval: tuple[float, float]
    """Its 95 % confidence interval, from the steps' scatter about the line."""
    steps: int
    """Steps that it stands on."""

    @property
    def is_significant(self) -> bool:
        """Whether memory grows beyond what the scatter explains."""
        return self.interval[0] > 0


class _Layer:
    def __init__(self, layer: Layer) -> None:
        self.parameters = tuple(layer.module.parameters(recurse=False))
        self.without_gradient: list[torch.nn.Parameter] = []
        """Its parameters that had no gradient as its forward pass began."""
        self.samples = 0
        self.before: int | None = None
        self.after: int | None = None
        self.reserved: int | None = None
        self.kept = 0
        self.kept_count = 0
        self.peak: int | None = None
        self.unreturned: deque[tuple[int, int]] = deque(maxlen=_KEPT_STEPS)
        """By step: the memory left by its passes, with the layers within it."""
        self.gradients: deque[tuple[int, int]] = deque(maxlen=_KEPT_STEPS)
        """By step: the memory of the gradients that its backward pass made for its parameters."""


class MemoryLog:
    def __init__(self, reader: MemoryReader, layers: Sequence[Layer]) -> None:
        self._reader = reader
        self._root = layers[0]
        self._sums = {layer: _Layer(layer) for layer in layers}
        self._step = 0
        self._at_steps: deque[int] = deque(maxlen=_KEPT_STEPS)

    def begin(self, call: Call, *, forward: bool) -> None:
        usage = self._reader.read()
        call.memory = usage
        if forward:
            sums = self._sums[call.layer]
            sums.without_gradient = [parameter for parameter in sums.parameters if parameter.grad is None]
        if forward and call.layer is self._root:
            self._step += 1
            if usage.device_allocated_bytes is not None:
                self._at_steps.append(usage.device_allocated_bytes)

    def end(self, call: Call, *, forward: bool, training: bool = True) -> None:
        before, after = call.memory, self._reader.read()
        call.memory = None
        if before is None:
            return
        sums = self._sums[call.layer]
        old, new = before.device_allocated_bytes, after.device_allocated_bytes
        if forward:
            sums.samples += 1
            sums.before, sums.after, sums.reserved = old, new, after.device_reserved_bytes
        if old is None or new is None:
            return
        if forward and training:
            sums.kept += new - old
            sums.kept_count += 1
        if training:
            sums.unreturned.append((self._step, new - old))
        if not forward:
            # The gradients that a backward pass makes are the optimizer's to free.
            made = [parameter.grad for parameter in sums.without_gradient if parameter.grad is not None]
            sums.gradients.append((self._step, sum(grad.numel() * grad.element_size() for grad in made)))
            sums.without_gradient = []
        peaks = before.device_peak_allocated_bytes, after.device_peak_allocated_bytes
        if peaks[0] is not None and peaks[1] is not None and peaks[1] > peaks[0]:
            sums.peak = max(sums.peak or 0, peaks[1])

    def times(self, parents: Sequence[Layer | None]) -> dict[Layer, LayerMemory]:
        """The memory that was read, by layer; ``parents`` has the layer that each one lies within."""
        left = {layer: _mean_by_step(sums.unreturned) for layer, sums in self._sums.items()}
        own = dict(left)
        for within, parent in zip(left.values(), parents, strict=True):
            if parent is not None and within is not None and (around := own[parent]) is not None:
                own[parent] = around - within
        found = {}
        for layer, sums in self._sums.items():
            kept = sums.kept / sums.kept_count if sums.kept_count else None
            unreturned = own[layer]
            if unreturned is not None:
                unreturned -= _mean_by_step(sums.gradients) or 0.0
            found[layer] = LayerMemory(
                sums.samples, sums.before, sums.after, sums.reserved, kept, sums.peak, unreturned
            )
        return found

    def growth(self) -> Growth | None:
        """How the memory at the beginning of steps grows, the first step left out; None below five steps."""
        levels = np.array(self._at_steps, dtype=np.float64)[1:]
        return _slope(levels) if len(levels) >= 5 else None


def _mean_by_step(sizes: deque[tuple[int, int]]) -> float | None:
    steps: Counter[int] = Counter()
    for step, size in sizes:
        if step > 1:
            steps[step] += size
    return sum(steps.values()) / len(steps) if steps else None


def _slope(levels: NDArray[np.float64]) -> Growth:
    # Ordinary least squares with its standard error (Draper and Smith, Applied Regression Analysis, section 1.4).
    count = len(levels)
    steps = np.arange(count) - (count - 1) / 2
    spread = float((steps**2).sum())
    slope = float((steps * levels).sum() / spread)
    rest = levels - levels.mean() - slope * steps
    error = math.sqrt(float((rest**2).sum()) / (count - 2) / spread)
    width = _T_975.get(count - 2, 2.0) * error
    return Growth(slope, (slope - width, slope + width), count)
