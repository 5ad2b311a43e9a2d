"""The layers of a model as a table that is read at once: a tree, repeated blocks folded, the slowest marked."""

from __future__ import annotations

from dataclasses import dataclass, field
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
    from collections.abc import Callable, Sequence

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
    widths = [max(width_of(row[place]) for row in [header, *lines]) for place in range(len(header))]
    if width is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        if excess > 0:
            widths[0] = max(widths[0] - excess, _LEAST_NAME)
            for row in lines:
                row[0] = shorten(row[0], widths[0])
    text = [headline(times), ""]
    text.append(_line(header, widths))
    text.append("  ".join("─" * width for width in widths))
    text += [_line(row, widths) for row in lines]
    notes = notes_of(times)
    text += ["", *notes] if notes else []
    return "\n".join(line.rstrip() for line in text) + "\n"


def cells_of(times: ModelTimes, *, fold: bool = True) -> tuple[list[str], list[list[str]]]:
    """The table's heads, and its lines as cells; the first cell has the branches of the tree before the name."""
    steps, whole = times.steps, times.step_s
    purposes = [("forward", FORWARD), ("backward", BACKWARD)]
    purposes += [
        (header, purpose)
        for header, purpose in (("recomputed", RECOMPUTED), ("evaluation", EVALUATION))
        if any(purpose in layer.stats for layer in times.layers)
    ]
    extra = _extra_columns(times)
    lines: list[list[str]] = []

    def add(row: Row, branch: str, below: str, *, marked: bool) -> None:
        share = format_share(None if not whole or row.step_s is None else row.step_s / whole)
        cells = [_cell(row.total_s(purpose), purpose, steps, row) for _, purpose in purposes]
        numbers = [share + (" ◀" if marked else "  "), str(row.calls()), *(cell(row) for _, cell in extra)]
        lines.append([branch + row.label, *cells, *numbers, row.slowest])
        slowest = max((one.step_s or 0.0 for one in row.inner), default=0.0)
        # The time of a layer that no layer within it covers comes last.
        for one in row.inner:
            is_slowest = len(row.inner) > 1 and bool(slowest) and one.step_s == slowest
            add(one, below + "├─ ", below + "│  ", marked=is_slowest)
        if row.inner:
            own = {what: [layer.self_s[what] for layer in row.layers if what in layer.self_s] for _, what in purposes}
            cells = [_cell(sum(of) if of else None, what, steps, row) for what, of in own.items()]
            share = format_share(sum(own[FORWARD] + own[BACKWARD]) / whole if whole else None)
            lines.append([below + "└─ its own operations", *cells, share + "  ", *[""] * (2 + len(extra))])

    add(tree_of(times, fold=fold), "", "", marked=False)
    heads = ["layer", *(name for name, _ in purposes), "share", "calls", *(name for name, _ in extra), "slowest"]
    return heads, lines


def headline(times: ModelTimes) -> str:
    steps = times.steps
    where = "on the device" if any(layer.on_device for layer in times.layers) else "on the CPU"
    steady = f"{steps} training step{'s' if steps != 1 else ''}" if steps else "no training step"
    return f"Layers of {safe_name(times.model.path)}, time per step {where}, {steady}"


def _extra_columns(times: ModelTimes) -> list[tuple[str, Callable[[Row], str]]]:
    columns: list[tuple[str, Callable[[Row], str]]] = []
    peak = times.peak_flops_per_s

    def flops_per_s(row: Row) -> float | None:
        flops, seconds = sum(layer.flops or 0 for layer in row.layers), row.step_s
        return flops * times.steps / seconds if flops and seconds else None

    if any(layer.flops for layer in times.layers):
        columns.append(("GFLOP/s", lambda row: format_number((rate := flops_per_s(row)) and rate / 1e9)))
        if peak is not None:
            columns.append(
                ("of peak", lambda row: format_utilization(rate / peak) if (rate := flops_per_s(row)) else UNKNOWN)
            )
    if any(layer.memory is not None and layer.memory.kept_bytes is not None for layer in times.layers):
        columns.append(("kept", lambda row: _size(row, "kept_bytes", sum)))
        columns.append(("peak", lambda row: _size(row, "peak_within_bytes", max)))
    return columns


def _size(row: Row, name: str, together: Callable[[list[float]], float]) -> str:
    found = [getattr(layer.memory, name) for layer in row.layers if layer.memory is not None]
    known = [size for size in found if size is not None]
    return format_bytes(round(together(known))) if known else UNKNOWN


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


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    last = len(row) - 1
    return "  ".join(pad(cell, widths[place], right=0 < place < last) for place, cell in enumerate(row))


def tree_of(times: ModelTimes, *, fold: bool = True) -> Row:
    """The layers as a tree of lines."""
    inner: dict[int, list[int]] = {}
    for position, layer in enumerate(times.layers):
        if position:
            inner.setdefault(layer.parent or 0, []).append(position)

    def row(positions: list[int], label: str) -> Row:
        first = times.layers[positions[0]]
        made = Row(label or _label(times, first), [times.layers[position] for position in positions])
        if len(positions) > 1 and made.step_s is not None:
            slowest = max(made.layers, key=lambda layer: layer.step_s or 0.0)
            made.slowest = f"{slowest.path} {format_time(_per_step(slowest.step_s, times.steps))}"
        children = [inner.get(position, []) for position in positions]
        if len({tuple(times.layers[child].kind for child in group) for group in children}) == 1:
            # Of the same build: what stands at one place in each of them belongs together.
            groups = [list(group) for group in zip(*children, strict=True)]
            made.inner = [row(group, "") for group in groups] if len(positions) > 1 else rows(children[0])
        return made

    def rows(siblings: list[int]) -> list[Row]:
        made: list[Row] = []
        place = 0
        while place < len(siblings):
            run = [siblings[place]]
            while (
                fold and place + len(run) < len(siblings) and _alike(times, inner, run[0], siblings[place + len(run)])
            ):
                run.append(siblings[place + len(run)])
            if len(run) >= _REPEATED:
                first, last = times.layers[run[0]], times.layers[run[-1]]
                made.append(row(run, f"{len(run)} × {first.kind} ({first.path} … {last.path.rpartition('.')[2]})"))
            else:
                made += [row([position], "") for position in run]
            place += len(run)
        return made

    root = Row(times.model.path, [times.model])
    root.inner = rows(inner.get(0, []))
    return root


def _alike(times: ModelTimes, inner: dict[int, list[int]], one: int, other: int) -> bool:
    def build(position: int) -> object:
        return times.layers[position].kind, tuple(build(child) for child in inner.get(position, []))

    # Leaves of one class may have any size: only a layer that has layers within it is a block.
    return bool(inner.get(one)) and build(one) == build(other)


def _label(times: ModelTimes, layer: LayerTimes) -> str:
    above = "" if layer.parent in {None, 0} else times.layers[layer.parent or 0].path + "."
    name = layer.path.removeprefix(above)
    return f"{safe_name(name)}: {layer.kind}" + (" (shared)" if layer.shared else "")


def _cell(total_s: float | None, purpose: str, steps: int, row: Row) -> str:
    if total_s is None:
        return UNKNOWN
    if purpose == EVALUATION:
        calls = sum(layer.calls(EVALUATION) for layer in row.layers)
        return format_time(total_s / calls) if calls else UNKNOWN
    return format_time(_per_step(total_s, steps))


def _per_step(total_s: float | None, steps: int) -> float | None:
    return None if total_s is None or not steps else total_s / steps
