"""The distribution of each region's times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import literal
from deep500_timing._summary.distribution import bin_bounds
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import format_time
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import WHOLE_LABELS, data, quantity, rounded, time_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.page._context import Context

_MOST = 12
_LEAST = 10
"""Intervals below which no distribution is drawn."""
_BARS = 36
_LOG_FROM = 8
"""The ratio of longest to shortest from which on the scale is logarithmic."""


def spread(context: Context) -> Content | None:
    nodes = [node for node in context.tree.walk() if not node.is_rest and node.count >= _LEAST and node.max_s]
    nodes.sort(key=lambda node: -(node.total_s or 0))
    chosen = nodes[:_MOST]
    if not chosen:
        return None
    wanted = ", ".join(literal(path_text(node.path)) for node in chosen)
    counts: dict[str, dict[int, int]] = {}
    for row in context.rows(
        "select path, bin, count(*) as n from intervals "
        f"where device = 'CPU' and path in ({wanted}) group by 1, 2 order by 1, 2"
    ):
        counts.setdefault(row["path"], {})[row["bin"]] = row["n"]
    panels = tuple(
        Panel(_spec(context, node, bins), shown(node.name))
        for node in chosen
        if (bins := counts.get(path_text(node.path)))
    )
    figure = Figure(
        "Distributions",
        "A histogram for each region, of all ranks together: "
        + ", ".join(f"{shown(node.name)} median {format_time(node.median_s)}" for node in chosen)
        + ".",
        panels,
        ("region", "count", "shortest", "median", "95th percentile", "99th percentile", "longest"),
        [(" / ".join(map(shown, node.path)), node.count, *map(format_time, _quantiles(node))) for node in chosen],
        note="Each chart has its own scale"
        + (f"; of {len(nodes)} regions the {_MOST} with the largest totals." if len(nodes) > _MOST else "."),
    )
    return Content((figure,))


def _quantiles(node: Node) -> tuple[float | None, ...]:
    return node.min_s, node.median_s, node.p95_s, node.p99_s, node.max_s


def _spec(context: Context, node: Node, bins: dict[int, int]) -> dict[str, Any]:
    low = max(bin_bounds(min(bins))[0], 1)
    first, width = bin_bounds(max(bins))
    high = first + max(width, 1)
    is_log = high / low > _LOG_FROM
    edges, counts = _bars(bins, low, high, is_log)
    rows = [
        {"from": rounded(start / 1e9, 6), "to": rounded(end / 1e9, 6), "n": rounded(n)}
        | {"range": f"{format_time(start / 1e9)} to {format_time(end / 1e9)}"}
        for start, end, n in zip(edges, edges[1:], counts, strict=False)
        if n
    ]
    scale = {
        "domain": [edges[0] / 1e9, edges[-1] / 1e9],
        "nice": False,
        **({"type": "log"} if is_log else {"zero": False}),
    }
    x_axis = time_axis(None) | {"tickCount": 3, "grid": False, "labelOverlap": True, "labelSeparation": 8}
    y_axis = {"title": None, "tickCount": 3, "tickMinStep": 1, "labelExpr": WHOLE_LABELS.format("~s")}
    return {
        "height": 110,
        "data": data(rows),
        "mark": {"type": "bar", "color": context.colour(node.name)},
        "encoding": {
            "x": quantity("from", bin={"binned": True}, scale=scale, axis=x_axis),
            "x2": {"field": "to"},
            "y": quantity("n", axis=y_axis),
            "tooltip": tooltip(range="takes", n="intervals, about"),
        },
    }


def _bars(bins: dict[int, int], low: float, high: float, is_log: bool) -> tuple[list[float], Sequence[float]]:
    """The edges of the bars in ns, and their counts. Bars are equally wide as drawn, and at least as wide as a bin."""
    spare = max(9 - (max(bins) - min(bins) + 1), 0)  # One bin alone would be a wall.
    numbers = range(max(min(bins) - spare // 2, 0), max(bins) + 1 + spare - spare // 2)
    if len(numbers) <= _BARS:
        return [max(float(bin_bounds(number)[0]), 1.0) for number in [*numbers, numbers[-1] + 1]], [
            bins.get(n, 0) for n in numbers
        ]
    place, back = (math.log, math.exp) if is_log else (float, float)
    first, width = place(low), (place(high) - place(low)) / _BARS
    counts = [0.0] * _BARS
    for number, n in bins.items():
        # A bin that lies in several bars is divided among them: whole ones would make a comb of narrow bars.
        start, wide = bin_bounds(number)
        begin = min(max((place(max(start, low)) - first) / width, 0.0), _BARS - 1e-9)
        end = min(max((place(max(start + wide, low)) - first) / width, begin), float(_BARS))
        for part in range(int(begin), min(int(end), _BARS - 1) + 1):
            inside = min(end, part + 1) - max(begin, part)
            counts[part] += n * (inside / (end - begin) if end > begin else 1.0)
    return [back(first + width * part) for part in range(_BARS + 1)], counts
