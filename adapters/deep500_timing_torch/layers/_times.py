"""The times of a model's layers as plain data, read from the timer that they were recorded in."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

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
        most = max(self.layers, key=lambda layer: _unreturned(layer) or 0.0)
        return most if (_unreturned(most) or 0.0) > self.growth.bytes_per_step / 2 else None

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


def _unreturned(layer: LayerTimes) -> float | None:
    return None if layer.memory is None else layer.memory.unreturned_bytes


def describe(layers: Sequence[Layer], flops: Mapping[str, int] | None = None) -> list[LayerTimes]:
    positions = {name: position for position, layer in enumerate(layers) for name in layer.names}
    found: list[LayerTimes] = []
    for layer in layers:
        shared = len(layer.names) > 1
        around = None if layer is layers[0] else _parent_of(layer.names[0], positions)
        found.append(
            LayerTimes(
                layer.path,
                layer.kind,
                0 if around is None else found[around].depth + 1,
                None if shared else around,
                shared=shared,
                parameters=layer.parameters,
                flops=None if flops is None else flops.get(layer.path, 0),
            )
        )
    return found


def add_memory(found: Sequence[LayerTimes], memory: MemoryLog | None) -> Sequence[LayerTimes]:
    if memory is None:
        return found
    read = memory.times({times.path: None if times.parent is None else found[times.parent].path for times in found})
    return [replace(times, memory=read.get(times.path)) for times in found]


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
    regions = [region_of(position, found) for position in range(len(found))]
    timed = [
        replace(times, stats=_stats(stats, region, "CPU"), gpu_stats=_stats(stats, region, "GPU"))
        for times, region in zip(found, regions, strict=True)
    ]
    on_device = any(times.on_device for times in timed)
    own = _self_times(
        {
            (position, purpose): intervals(f"{region} {purpose}", on_device)
            for position, region in enumerate(regions)
            for purpose in PURPOSES
        },
        # A shared layer lies within each of its callers, wherever it is listed.
        [position + times.shared * len(timed) for position, times in enumerate(timed) for _ in PURPOSES],
    )
    return [replace(times, self_s=_scaled(own, position, times)) for position, times in enumerate(timed)]


def region_of(position: int, found: Sequence[LayerTimes]) -> str:
    """The begin of the names of a layer's regions: the model's name, and the layer's path."""
    return f"{found[0].path}.{found[position].path}" if position else found[0].path


def _scaled(own: Mapping[tuple[int, str], tuple[int, int]], position: int, times: LayerTimes) -> dict[str, float]:
    # A timer with keep_last keeps the newest intervals only: their share holds for all.
    found = {}
    for purpose in PURPOSES:
        total = times.total_s(purpose)
        if total is not None:
            own_ns, kept_ns = own.get((position, purpose), (0, 0))
            found[purpose] = total * own_ns / kept_ns if kept_ns else total
    return found


def _self_times(
    intervals: Mapping[tuple[int, str], NDArray[np.int64]], ranks: Sequence[int]
) -> dict[tuple[int, str], tuple[int, int]]:
    """For each region, its time that no other region within it covers, and its whole time, in nanoseconds.

    Nesting is measured: an interval lies within the last one that began before it and ends after it.

    Args:
        intervals: Starts and ends of each region.
        ranks: For each of them, in the same order: of two that begin and end together the lower is the outer one.
    """
    keys = list(intervals)
    starts = np.concatenate([intervals[key][:, 0] for key in keys])
    ends = np.concatenate([intervals[key][:, 1] for key in keys])
    owners = np.repeat(np.arange(len(keys)), [len(intervals[key]) for key in keys])
    order = np.lexsort((np.array(ranks)[owners], -ends, starts))
    own = ends - starts
    stack: list[int] = []
    start_of, end_of = starts.tolist(), ends.tolist()
    for one in order.tolist():
        while stack and (end_of[stack[-1]] < end_of[one] or end_of[stack[-1]] <= start_of[one]):
            stack.pop()
        if stack:
            own[stack[-1]] -= end_of[one] - start_of[one]
        stack.append(one)
    return {
        key: (int(own[owners == place].sum()), int((ends - starts)[owners == place].sum()))
        for place, key in enumerate(keys)
    }


def _stats(stats: Mapping[tuple[str, str], TimeStats | None], region: str, device: str) -> dict[str, TimeStats]:
    named = {purpose: stats.get((f"{region} {purpose}", device)) for purpose in PURPOSES}
    return {purpose: found for purpose, found in named.items() if found is not None}


def _parent_of(name: str, positions: Mapping[str, int]) -> int:
    while name:
        name = name.rpartition(".")[0]
        if name in positions:
            return positions[name]
    return 0
