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
    width_of,
)
from deep500_timing_torch.layers._call import BACKWARD, EVALUATION, FORWARD, RECOMPUTED

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        known = [total for layer in self.layers if (total := layer.total_s(purpose)) is not None]
        return sum(known) if known else None

    @property
    def step_s(self) -> float | None:
        known = [step for layer in self.layers if (step := layer.step_s) is not None]
        return sum(known) if known else None

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
    steps = times.steps
    columns = [("forward", FORWARD), ("backward", BACKWARD)]
    columns += [
        (header, purpose)
        for header, purpose in (("recomputed", RECOMPUTED), ("evaluation", EVALUATION))
        if any(purpose in layer.stats for layer in times.layers)
    ]
    header = ["layer", *(name for name, _ in columns), "share", "calls", *_extra_headers(times), "slowest"]
    lines: list[list[str]] = []
    _add(lines, tree_of(times, fold=fold), "", "", columns, steps, times, marked=False)
    return header, lines


def headline(times: ModelTimes) -> str:
    steps = times.steps
    where = "on the device" if any(layer.on_device for layer in times.layers) else "on the CPU"
    steady = f"{steps} training step{'s' if steps != 1 else ''}" if steps else "no training step"
    return f"Layers of {safe_name(times.model.path)}, time per step {where}, {steady}"


def _extra_headers(times: ModelTimes) -> list[str]:
    headers = []
    if any(layer.flops for layer in times.layers):
        headers.append("GFLOP/s")
        if times.peak_flops_per_s is not None:
            headers.append("of peak")
    if any(layer.memory is not None and layer.memory.kept_bytes is not None for layer in times.layers):
        headers += ["kept", "peak"]
    return headers


def _extra_cells(times: ModelTimes, row: Row) -> list[str]:
    cells = []
    for header in _extra_headers(times):
        if header in {"GFLOP/s", "of peak"}:
            flops, seconds = sum(layer.flops or 0 for layer in row.layers), row.step_s
            rate = flops * times.steps / seconds if flops and seconds else None
            if header == "GFLOP/s":
                cells.append(format_number(None if rate is None else rate / 1e9))
            else:
                peak = times.peak_flops_per_s
                cells.append(UNKNOWN if rate is None or peak is None else format_utilization(rate / peak))
            continue
        read = [layer.memory for layer in row.layers if layer.memory is not None]
        kept = [memory.kept_bytes for memory in read if memory.kept_bytes is not None]
        peaks = [memory.peak_within_bytes for memory in read if memory.peak_within_bytes is not None]
        if header == "kept":
            cells.append(format_bytes(round(sum(kept))) if kept else UNKNOWN)
        else:
            cells.append(format_bytes(max(peaks)) if peaks else UNKNOWN)
    return cells


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


def shorten(text: str, width: int) -> str:
    """A text of at most that many columns, its middle left out."""
    if width_of(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


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


def _add(
    lines: list[list[str]],
    row: Row,
    branch: str,
    below: str,
    columns: Sequence[tuple[str, str]],
    steps: int,
    times: ModelTimes,
    *,
    marked: bool,
) -> None:
    whole = times.step_s
    share = format_share(None if not whole or row.step_s is None else row.step_s / whole)
    cells = [_cell(row.total_s(purpose), purpose, steps, row) for _, purpose in columns]
    lines.append(
        [
            branch + row.label,
            *cells,
            share + (" ◀" if marked else "  "),
            str(row.calls()),
            *_extra_cells(times, row),
            row.slowest,
        ]
    )
    slowest = max((one.step_s or 0.0 for one in row.inner), default=0.0)
    rest = _rest(row, columns, steps)
    for place, one in enumerate(row.inner):
        last = place == len(row.inner) - 1 and rest is None
        _add(
            lines,
            one,
            below + ("└─ " if last else "├─ "),
            below + ("   " if last else "│  "),
            columns,
            steps,
            times,
            marked=len(row.inner) > 1 and bool(slowest) and one.step_s == slowest,
        )
    if rest is not None:
        part = format_share(rest[1] / whole if whole else None)
        lines.append([below + "└─ its own operations", *rest[0], part + "  ", *[""] * (2 + len(_extra_headers(times)))])


def _rest(row: Row, columns: Sequence[tuple[str, str]], steps: int) -> tuple[list[str], float] | None:
    # The time of a layer that no layer within it covers.
    if not row.inner:
        return None
    cells, step_s = [], 0.0
    for _, purpose in columns:
        own = [layer.self_s[purpose] for layer in row.layers if purpose in layer.self_s]
        cells.append(_cell(sum(own) if own else None, purpose, steps, row))
        if purpose in {FORWARD, BACKWARD}:
            step_s += sum(own)
    return cells, step_s


def _cell(total_s: float | None, purpose: str, steps: int, row: Row) -> str:
    if total_s is None:
        return UNKNOWN
    if purpose == EVALUATION:
        calls = sum(layer.calls(EVALUATION) for layer in row.layers)
        return format_time(total_s / calls) if calls else UNKNOWN
    return format_time(_per_step(total_s, steps))


def _per_step(total_s: float | None, steps: int) -> float | None:
    return None if total_s is None or not steps else total_s / steps
