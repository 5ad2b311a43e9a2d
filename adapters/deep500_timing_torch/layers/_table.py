"""The layers of a model as a table that is read at once: a tree, repeated blocks folded, the slowest marked."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from deep500_timing.adapters import (
    UNKNOWN,
    format_bytes,
    format_number,
    format_share,
    format_time,
    format_utilization,
    pad,
    safe_name,
    shorten,
    width_of,
)
from deep500_timing_torch.layers._times import BACKWARD, EVALUATION, FORWARD, RECOMPUTED, sum_known

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.layers._times import LayerTimes, ModelTimes

_REPEATED = 3
"""Blocks of one class, one behind the other, that are folded into one line."""
_LEAST_NAME = 10
"""Columns that a name keeps on however narrow a terminal."""


@dataclass(slots=True)
class Row:
    """One line: a layer, or several of the same kind at the same place of blocks that repeat."""

    label: str
    layers: list[LayerTimes]
    inner: list[Row] = field(default_factory=list)
    slowest: str = ""

    def total_s(self, purpose: str) -> float | None:
        return sum_known(layer.total_s(purpose) for layer in self.layers)

    def own_s(self, purpose: str) -> float | None:
        return sum_known(layer.self_s.get(purpose) for layer in self.layers)

    @property
    def step_s(self) -> float | None:
        return sum_known(layer.step_s for layer in self.layers)

    def calls(self) -> int:
        return sum(layer.calls(FORWARD) or layer.calls(EVALUATION) for layer in self.layers)


def render(times: ModelTimes, *, fold: bool = True, width: int | None = None) -> str:
    """The table as text.

    Times are per training step (per call of the model); a layer that was called for evaluation only has its own
    column. The slowest line of each level is marked with ``◀``.
    """
    header, lines = cells_of(times, fold=fold)
    widths = [max(map(width_of, column)) for column in zip(header, *lines, strict=True)]
    if width is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        widths[0] = max(widths[0] - max(excess, 0), min(widths[0], _LEAST_NAME))
    last = len(widths) - 1
    text = [headline(times), ""]
    for row in (header, ["─" * columns for columns in widths], *lines):
        cells = [shorten(row[0], widths[0]), *row[1:]]
        padded = [pad(cell, widths[place], right=0 < place < last) for place, cell in enumerate(cells)]
        text.append("  ".join(padded).rstrip())
    notes = notes_of(times)
    text += ["", *notes] if notes else []
    return "\n".join(text) + "\n"


def cells_of(times: ModelTimes, *, fold: bool = True) -> tuple[list[str], list[list[str]]]:
    """The table's heads, and its lines as cells; the first cell has the branches of the tree before the name."""
    steps, whole = times.steps, times.step_s
    purposes = {"forward": FORWARD, "backward": BACKWARD}
    purposes |= {
        header: purpose
        for header, purpose in (("recomputed", RECOMPUTED), ("evaluation", EVALUATION))
        if any(purpose in layer.stats for layer in times.layers)
    }
    extra = _extra_columns(times)
    lines: list[list[str]] = []

    def cell(row: Row, purpose: str, total_s: float | None) -> str:
        count = sum(layer.calls(EVALUATION) for layer in row.layers) if purpose == EVALUATION else steps
        return UNKNOWN if total_s is None or not count else format_time(total_s / count)

    def add(row: Row, branch: str, below: str, *, marked: bool) -> None:
        share = format_share(None if not whole or row.step_s is None else row.step_s / whole)
        cells = [cell(row, purpose, row.total_s(purpose)) for purpose in purposes.values()]
        numbers = [share + (" ◀" if marked else "  "), str(row.calls()), *(text(row) for text in extra.values())]
        lines.append([branch + row.label, *cells, *numbers, row.slowest])
        slowest = max((one.step_s or 0.0 for one in row.inner), default=0.0)
        # The time of a layer that no layer within it covers comes last.
        for one in row.inner:
            is_slowest = len(row.inner) > 1 and bool(slowest) and one.step_s == slowest
            add(one, below + "├─ ", below + "│  ", marked=is_slowest)
        if row.inner:
            cells = [cell(row, purpose, row.own_s(purpose)) for purpose in purposes.values()]
            own_s = (row.own_s(FORWARD) or 0.0) + (row.own_s(BACKWARD) or 0.0)
            share = format_share(own_s / whole if whole else None)
            lines.append([below + "└─ its own operations", *cells, share + "  ", *[""] * (2 + len(extra))])

    add(tree_of(times, fold=fold), "", "", marked=False)
    return ["layer", *purposes, "share", "calls", *extra, "slowest"], lines


def headline(times: ModelTimes) -> str:
    steps = times.steps
    where = "on the device" if any(layer.on_device for layer in times.layers) else "on the CPU"
    counted = f"{steps} training step{'s' if steps != 1 else ''}" if steps else "no training step"
    return f"Layers of {safe_name(times.model.path)}, time per step {where}, {counted}"


def _extra_columns(times: ModelTimes) -> dict[str, Callable[[Row], str]]:
    columns: dict[str, Callable[[Row], str]] = {}
    peak = times.peak_flops_per_s

    def flops_per_s(row: Row) -> float | None:
        flops, seconds = sum(layer.flops or 0 for layer in row.layers), row.step_s
        return flops * times.steps / seconds if flops and seconds else None

    def size(row: Row, name: str, together: Callable[[list[float]], float]) -> str:
        known = [one for layer in row.layers if (one := getattr(layer.memory, name, None)) is not None]
        return format_bytes(round(together(known))) if known else UNKNOWN

    if any(layer.flops for layer in times.layers):
        columns["GFLOP/s"] = lambda row: format_number((rate := flops_per_s(row)) and rate / 1e9)
        if peak is not None:
            columns["of peak"] = lambda row: format_utilization(rate / peak) if (rate := flops_per_s(row)) else UNKNOWN
    if any(layer.memory is not None and layer.memory.kept_bytes is not None for layer in times.layers):
        columns["kept"] = lambda row: size(row, "kept_bytes", sum)
        columns["peak"] = lambda row: size(row, "peak_within_bytes", max)
    return columns


def notes_of(times: ModelTimes) -> list[str]:
    notes = []
    if times.steps and not times.model.calls(FORWARD):
        notes.append(
            f"{safe_name(times.model.path)} itself was not called: a step is a call of its most frequent part, and "
            "shares are of the sum of its parts."
        )
    if times.out_of_memory is not None:
        notes.append(f"The device ran out of memory in {safe_name(times.out_of_memory)}.")
    growth, leak = times.growth, times.leak
    if growth is not None and growth.is_significant:
        where = "" if leak is None else f", most of it in {safe_name(leak.path)}"
        low, high = (format_bytes(round(bound)) for bound in growth.interval)
        notes.append(
            f"Memory grows by {format_bytes(round(growth.bytes_per_step))} a step [{low}, {high}] "
            f"over {growth.steps} steps{where}."
        )
    if times.faults or times.untimed:
        notes.append(f"Not timed: {times.untimed} backward passes, {times.faults} hooks that failed.")
    return notes


def tree_of(times: ModelTimes, *, fold: bool = True) -> Row:
    inner: dict[int, list[int]] = {}
    for position, layer in enumerate(times.layers[1:], 1):
        inner.setdefault(layer.parent or 0, []).append(position)

    def build(position: int) -> tuple[object, ...]:
        return times.layers[position].kind, *map(build, inner.get(position, []))

    def block(position: int) -> object:
        # Leaves of one class may have any size: only a layer that has layers within it is a block.
        return build(position) if fold and position in inner else position

    def rows(siblings: list[int]) -> list[Row]:
        made: list[Row] = []
        for _, group in groupby(siblings, block):
            run = list(group)
            if len(run) >= _REPEATED:
                first, last = times.layers[run[0]], times.layers[run[-1]]
                made.append(row(run, f"{len(run)} × {first.kind} ({first.path} … {last.path.rpartition('.')[2]})"))
            else:
                made += [row([position]) for position in run]
        return made

    def row(positions: list[int], label: str = "") -> Row:
        layers = [times.layers[position] for position in positions]
        made = Row(label or _label(times, layers[0]), layers)
        children = [inner.get(position, []) for position in positions]
        if len(positions) == 1:
            made.inner = rows(children[0])
        else:  # Of the same build: what stands at one place in each of them belongs together.
            made.inner = [row(list(group)) for group in zip(*children, strict=True)]
            slowest = max(layers, key=lambda layer: layer.step_s or 0.0)
            if slowest.step_s is not None and times.steps:
                made.slowest = f"{slowest.path} {format_time(slowest.step_s / times.steps)}"
        return made

    root = Row(times.model.path, [times.model])
    root.inner = rows(inner.get(0, []))
    return root


def _label(times: ModelTimes, layer: LayerTimes) -> str:
    above = "" if layer.parent in {None, 0} else times.layers[layer.parent or 0].path + "."
    name = layer.path.removeprefix(above)
    return f"{safe_name(name)}: {layer.kind}" + (" (shared)" if layer.shared else "")
