"""The times of a model's layers as plain data, read from the timer that they were recorded in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deep500_timing.adapters import CPU, GPU

if TYPE_CHECKING:
    from deep500_timing import TimeStats
    from deep500_timing_torch.layers._memory import Growth, LayerMemory, MemoryLog
    from deep500_timing_torch.layers._select import Layer


FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTED = "recomputed forward"
EVALUATION = "evaluation forward"
PURPOSES = (FORWARD, BACKWARD, RECOMPUTED, EVALUATION)


def sum_known(values: Iterable[float | None]) -> float | None:
    """The sum of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One layer, and its times by the purpose of its calls."""

    path: str
    """Its place in the model, such as ``"blocks.0.attn"``; the model's name for the model itself."""
    kind: str
    depth: int
    """How many timed layers it lies within."""
    parent: int | None
    """The position of the layer that it lies within; None for the model, and for a layer that is called from several
    places."""
    stats: Mapping[str, TimeStats] = field(default_factory=dict)
    """Statistics of its calls on the CPU, in seconds, by purpose: ``"forward"``, ``"backward"``, ``"recomputed
    forward"``, ``"evaluation forward"``. Purposes that never occurred are not there."""
    gpu_stats: Mapping[str, TimeStats] = field(default_factory=dict)
    self_s: Mapping[str, float] = field(default_factory=dict)
    """Total time in seconds that no layer within it covers, by purpose, on the device where there are such times."""
    shared: bool = False
    """Whether the same module stands at several places of the model."""
    parameters: int = 0
    """Elements of its parameters, without those of the layers within it."""
    flops: int | None = None
    """Floating-point operations of one step's calls, forward and backward; None if they were not counted."""
    memory: LayerMemory | None = None
    """The device's memory around its calls; None if it was not read."""

    @property
    def on_device(self) -> bool:
        """Whether its totals are those on the device."""
        return bool(self.gpu_stats)

    def total_s(self, purpose: str) -> float | None:
        """Time of all its calls for a purpose, on the device where there are such times; None if there were none."""
        stats = (self.gpu_stats or self.stats).get(purpose)
        return None if stats is None else stats.total

    def calls(self, purpose: str = FORWARD) -> int:
        """How often it was called for a purpose."""
        stats = self.stats.get(purpose)
        return 0 if stats is None else stats.count

    @property
    def step_s(self) -> float | None:
        """Total time in the training steps: forward and backward, in which recomputation lies. None if it had none."""
        return sum_known((self.total_s(FORWARD), self.total_s(BACKWARD)))


@dataclass(frozen=True, slots=True)
class ModelTimes:
    """All layers of a model, the model first, in the order in which it names them."""

    layers: tuple[LayerTimes, ...]
    growth: Growth | None = None
    """How the device's memory grows over the steps; None if it was not read, or over too few steps."""
    out_of_memory: str | None = None
    """The innermost layer in which the device ran out of memory."""
    faults: int = 0
    """Hooks that failed; their times are missing."""
    untimed: int = 0
    """Backward passes that were left out, since they could not be told from others'."""
    peak_flops_per_s: float | None = None
    """The device's peak, in FLOP/s; None if it is not known."""

    @property
    def model(self) -> LayerTimes:
        """The model as a whole."""
        return self.layers[0]

    @property
    def leak(self) -> LayerTimes | None:
        """The layer that most of a significant growth of memory stays in; None without growth, or if none has half."""
        if self.growth is None or not self.growth.is_significant:
            return None
        most = max(self.layers, key=_unreturned)
        return most if _unreturned(most) > self.growth.bytes_per_step / 2 else None

    @property
    def steps(self) -> int:
        """Training steps: calls of the model; if its own ``forward`` is not called, of its most frequent part."""
        return self.model.calls(FORWARD) or max((layer.calls(FORWARD) for layer in self._outermost), default=0)

    @property
    def step_s(self) -> float | None:
        """Total time of the training steps: the model's, or the sum of its parts. None if nothing was timed."""
        whole = self.model.step_s
        return sum_known(layer.step_s for layer in self._outermost) if whole is None else whole

    @property
    def _outermost(self) -> list[LayerTimes]:
        return [layer for layer in self.layers[1:] if layer.depth == 1]

    def flops_per_s(self, layer: LayerTimes) -> float | None:
        """Operations a second of a layer in the training steps; None if they were not counted or not timed."""
        steps, seconds = self.steps, layer.step_s
        return layer.flops * steps / seconds if layer.flops and steps and seconds else None

    def share(self, layer: LayerTimes) -> float | None:
        """A layer's part of the model's training steps; None if either was not timed."""
        whole, part = self.step_s, layer.step_s
        return None if not whole or part is None else part / whole

    def get(self, path: str) -> LayerTimes:
        """The layer at a place of the model.

        Raises:
            KeyError: No layer that was timed lies there.
        """
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise KeyError(f"No layer that was timed lies at {path!r}; see [layer.path for layer in times.layers].")


def _unreturned(layer: LayerTimes) -> float:
    return 0.0 if layer.memory is None else layer.memory.unreturned_bytes or 0.0


def describe(layers: Sequence[Layer], flops: Mapping[str, int] | None, memory: MemoryLog | None) -> list[LayerTimes]:
    """The layers without their times."""
    positions = {name: position for position, layer in enumerate(layers) for name in layer.names}
    above = [None, *(_parent_of(layer.names[0], positions) for layer in layers[1:])]
    parents = [None if len(layer.names) > 1 else parent for layer, parent in zip(layers, above, strict=True)]
    read = {} if memory is None else memory.times([None if one is None else layers[one] for one in parents])
    found: list[LayerTimes] = []
    for layer, within, parent in zip(layers, above, parents, strict=True):
        found.append(
            LayerTimes(
                layer.path,
                layer.kind,
                0 if within is None else found[within].depth + 1,
                parent,
                shared=len(layer.names) > 1,
                parameters=layer.parameters,
                flops=None if flops is None else flops.get(layer.path, 0),
                memory=read.get(layer),
            )
        )
    return found


def _parent_of(name: str, positions: Mapping[str, int]) -> int:
    while name:
        name = name.rpartition(".")[0]
        if name in positions:
            return positions[name]
    return 0


def add_times(
    found: Sequence[LayerTimes],
    stats: Mapping[tuple[str, str], TimeStats | None],
    intervals: Callable[[str, bool], NDArray[np.int64]],
) -> list[LayerTimes]:
    """Layers with their times.

    Args:
        found: The layers, the model first.
        stats: Statistics by region and device.
        intervals: Gives the starts and ends of a region's intervals, on the device if asked to, shape ``(n, 2)``, in
            nanoseconds; all of them or the newest.
    """
    regions = regions_of(found)
    timed = [
        replace(layer, stats=_by_purpose(stats, region, CPU), gpu_stats=_by_purpose(stats, region, GPU))
        for layer, region in zip(found, regions, strict=True)
    ]
    on_device = any(layer.on_device for layer in timed)
    kept = [intervals(f"{region} {purpose}", on_device) for region in regions for purpose in PURPOSES]
    # A shared layer lies within each of its callers, wherever it is listed.
    ranks = [position + layer.shared * len(timed) for position, layer in enumerate(timed) for _ in PURPOSES]
    own = _own_shares(kept, ranks).reshape(len(timed), len(PURPOSES)).tolist()
    made = []
    for layer, shares in zip(timed, own, strict=True):
        totals = [(purpose, layer.total_s(purpose), share) for purpose, share in zip(PURPOSES, shares, strict=True)]
        self_s = {purpose: total_s * share for purpose, total_s, share in totals if total_s is not None}
        made.append(replace(layer, self_s=self_s))
    return made


def regions_of(found: Sequence[LayerTimes]) -> list[str]:
    """The begin of the names of each layer's regions: the model's name, and the layer's path."""
    model = found[0].path
    return [model, *(f"{model}.{layer.path}" for layer in found[1:])]


def _by_purpose(stats: Mapping[tuple[str, str], TimeStats | None], region: str, device: str) -> dict[str, TimeStats]:
    named = {purpose: stats.get((f"{region} {purpose}", device)) for purpose in PURPOSES}
    return {purpose: found for purpose, found in named.items() if found is not None}


def _own_shares(intervals: Sequence[NDArray[np.int64]], ranks: Sequence[int]) -> NDArray[np.float64]:
    """The share of each region's kept time that no other region within it covers; 1 for a region without intervals.

    Nesting is measured: an interval lies within the last one that began before it and ends after it. A timer with
    ``keep_last`` keeps the newest intervals only, and their share holds for all.

    Args:
        intervals: Starts and ends of each region.
        ranks: For each region: of two that begin and end together the lower is the outer one.
    """
    starts, ends = np.concatenate(intervals).T
    owners = np.repeat(np.arange(len(intervals)), [len(one) for one in intervals])
    order = np.lexsort((np.array(ranks)[owners], -ends, starts))
    whole = ends - starts
    own = whole.copy()
    start_of, end_of = starts.tolist(), ends.tolist()
    stack: list[int] = []
    for one in order.tolist():
        while stack and (end_of[stack[-1]] < end_of[one] or end_of[stack[-1]] <= start_of[one]):
            stack.pop()
        if stack:
            own[stack[-1]] -= whole[one]
        stack.append(one)
    own_ns, whole_ns = (np.bincount(owners, times, len(intervals)) for times in (own, whole))
    return np.divide(own_ns, whole_ns, out=np.ones(len(intervals)), where=whole_ns > 0)
