"""The cells of the table: times in a common unit, shares, spreads and trends. And the lines below it.

The lines name regions with a long first interval, and say how busy the device was in a step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH
from deep500_timing._summary.text import TIME_UNITS, UNKNOWN, format_share, safe_name, shorten

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node, Tree

_BARS = "▁▂▃▄▅▆▇█"
_USUAL = 3 / 8
"""Height of a constant value, which leaves room for longer times."""
FEW = 20
LEAST_FOR_MEDIAN = 3
AHEAD = 0.7
"""The CPU runs ahead if its time is below this share of the device's."""
ALIKE = 0.1
"""Largest relative difference of equal times."""
_FIRST_RATIO, _FIRST_LEAST, _FIRST_SHARE = 3.0, 6, 0.01
"""A first interval is named from so many medians on, of so many intervals, if it takes this share of the run."""
_MOST_FIRST, _WIDTH = 3, 32


def times(values: Sequence[float | None], *, by_largest: bool = False) -> list[str]:
    """A column of times in seconds: three digits, in the column's unit where a value can be read in it."""
    known = [value for value in values if value is not None and math.isfinite(value) and value > 0]
    scale, unit, most = _unit_of_column([max(known)] if known and by_largest else known)
    return [_cell(value, scale, unit, most) for value in values]


def _unit_of_column(known: list[float]) -> tuple[float, str, int]:
    # The most frequent unit, of two the larger one; and the decimals of its largest value.
    if not known:
        return 1.0, "s", 2
    units = [_own_unit(value) for value in known]
    scale, unit = max(dict.fromkeys(units), key=lambda own: (units.count(own), own[0]))
    largest = max((value / scale for value in known if 0.1 <= value / scale < _limit(unit)), default=1.0)
    return scale, unit, 1 if largest >= 9.995 else 2


def _own_unit(value: float) -> tuple[float, str]:
    return next((own for own in TIME_UNITS if value / own[0] < _limit(own[1])), TIME_UNITS[-1])


def _limit(unit: str) -> float:
    # Seconds are used up to 10 000, because hours are harder to read.
    return 9999.5 if unit == "s" else 999.5


def _cell(value: float | None, scale: float, unit: str, most: int) -> str:
    if value is None:
        return ""
    if not math.isfinite(value):
        return UNKNOWN
    if value == 0:
        return f"0 {unit}"
    if not (0.1 if most > 1 else 0.995) <= value / scale < _limit(unit):
        scale, unit = _own_unit(value)
        most = 2
    number = value / scale
    whole = max(math.floor(math.log10(number) + 1e-9) + 1, 1)
    decimals = max(min(3 - whole, most), 0)
    return f"{number:.{decimals}f} {unit}"


def share(value: float | None) -> str:
    """A share of 1, such as ``"37 %"``; an empty cell where there is none."""
    return "" if value is None else format_share(value)


def course(node: Node) -> str:
    """A region's trend over the run as a bar chart of one character for each part of the run, starting at zero.

    For few intervals, parts without any are left out: three EPOCHs are three characters.
    """
    trend = node.trend
    known = [value for value in trend if value is not None]
    if not known or node.count < LEAST_FOR_MEDIAN:
        return ""
    ordered = sorted(known)
    usual = ordered[len(ordered) // 2]
    top = max(usual / _USUAL, *known)
    if top <= 0:
        return ""
    shown = known if node.count < 2 * len(trend) else trend
    signs = (" " if value is None else _BARS[min(round(value / top * 8 + 1e-9) or 1, 8) - 1] for value in shown)
    return "".join(signs).rstrip()


def over_ranks(node: Node) -> str:
    """The smallest, median and largest total of the ranks, such as ``"1.02 / 1.05 / 1.31 s"``."""
    if node.over_ranks_s is None:
        return ""
    cells = times(node.over_ranks_s, by_largest=True)
    unit = cells[-1].partition(" ")[2]
    return " / ".join([*(cell.removesuffix(f" {unit}") for cell in cells[:-1]), cells[-1]])


def median(node: Node) -> float | None:
    """The median to show, None for an empty cell."""
    return node.median_s if node.count >= LEAST_FOR_MEDIAN else None


def p95(node: Node) -> float | None:
    """The 95th percentile to show, NaN for a dash."""
    if node.count < LEAST_FOR_MEDIAN or node.median_s is None:
        return None
    return math.nan if node.count < FEW else node.p95_s


def first_note(tree: Tree) -> list[tuple[str, str]]:
    """The line on first intervals, or none. Regions inside a named one are left out."""
    whole = sum(root.total_s or 0.0 for root in tree.roots)
    found = [
        (node, node.first_s, node.first_s / node.median_s)
        for node in tree.walk()
        if node.first_s is not None
        and node.median_s
        and node.count >= _FIRST_LEAST
        and node.first_s >= max(_FIRST_RATIO * node.median_s, _FIRST_SHARE * whole)
    ]
    paths = {node.path for node, _, _ in found}
    outer = [of for of in found if not any(of[0].path[:end] in paths for end in range(1, len(of[0].path)))]
    outer.sort(key=lambda of: -of[1])
    said = []
    for node, first_s, ratio in outer[:_MOST_FIRST]:
        times_it = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
        said.append(f"{shorten(safe_name(node.name), _WIDTH)} {times([first_s])[0]}, {times_it} × its median")
    return [("first", "; ".join(said))] if said else []


def busy_in(step: Node) -> tuple[float, float] | None:
    """The seconds of a region, and in how many of them a region directly inside it was timed on the device.

    None without such regions: the region's own device time includes idle time.
    """
    inside = [child.gpu.total_s for child in step.children if child.gpu is not None]
    if step.gpu is None or step.total_s is None or not inside:
        return None
    whole_s = max(step.total_s, step.gpu.total_s)
    return whole_s, min(sum(inside), whole_s)


def device_note(tree: Tree) -> list[tuple[str, str]]:
    step = next((node for node in tree.named(BATCH) if node.gpu is not None and node.total_s), None)
    busy = None if step is None else busy_in(step)
    if step is None or busy is None:
        return []
    whole_s, busy_s = busy
    said = f"busy for {share(busy_s / whole_s)} of BATCH with the regions timed on it"
    longest = max(step.children, key=lambda child: 0.0 if child.gpu is None else child.gpu.total_s)
    if longest.gpu is None or longest.count < LEAST_FOR_MEDIAN or longest.median_s is None or not longest.gpu.median_s:
        return [("device", said)]
    on_cpu, on_device = times([longest.median_s])[0], times([longest.gpu.median_s])[0]
    pace = _pace(longest.median_s / longest.gpu.median_s)
    name = shorten(safe_name(longest.name), _WIDTH)
    return [("device", f"{said}; in {name} the CPU {pace}: {on_cpu} against {on_device}")]


def _pace(ratio: float) -> str:
    if ratio < AHEAD:
        return "runs ahead of it"
    if abs(ratio - 1) <= ALIKE:
        return "takes as long, so one waits for the other"
    return "takes longer, so it waits" if ratio > 1 else "takes less"
