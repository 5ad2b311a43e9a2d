"""The cells of the table: times in a common unit, shares, spreads and trends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from deep500_timing._summary.text import UNKNOWN, format_share, time_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node

_BARS = "▁▂▃▄▅▆▇█"
_USUAL = 3 / 8
"""Height of a constant value, which leaves room for longer times."""
FEW = 20
LEAST_FOR_MEDIAN = 3


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
    return next((own for own in time_units() if value / own[0] < _limit(own[1])), time_units()[-1])


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
    if not 0.1 <= value / scale < _limit(unit):
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
    if node.count < LEAST_FOR_MEDIAN:
        return None
    return math.nan if node.count < FEW else node.p95_s
