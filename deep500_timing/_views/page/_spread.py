"""The distribution of each region's times."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import literal
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
    histograms = _histograms(context, chosen)
    panels = tuple(
        Panel(_spec(context, node, *histograms[path_text(node.path)]), shown(node.name))
        for node in chosen
        if path_text(node.path) in histograms
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


def _histograms(context: Context, nodes: Sequence[Node]) -> dict[str, tuple[list[float], dict[int, int], bool]]:
    """By path the edges of the bars in seconds, the count of each bar that has one, and whether they are logarithmic.

    Bars are equally wide as drawn.
    """
    scales: dict[str, tuple[float, float, bool]] = {}
    for node in nodes:
        low, high = max((node.min_s or 0.0) * 0.98, 1e-9), max(node.max_s or 0.0, 1e-9) * 1.02
        is_log = high / low > _LOG_FROM
        first, last = (math.log(low), math.log(high)) if is_log else (low, high)
        scales[path_text(node.path)] = first, (last - first) / _BARS, is_log
    values = ", ".join(f"({literal(path)}, {', '.join(map(str, scale))})" for path, scale in scales.items())
    counts: dict[str, dict[int, int]] = {}
    for row in context.rows(
        "select path, least(greatest(floor((case when is_log then ln(greatest(dur_ns, 1) / 1e9) else dur_ns / 1e9 end "
        f"- first) / width), 0), {_BARS - 1})::integer as bar, count(*) as n from intervals "
        f"join (values {values}) as scales(of_path, first, width, is_log) on path = of_path "
        "where device = 'CPU' group by 1, 2 order by 1, 2"
    ):
        counts.setdefault(row["path"], {})[row["bar"]] = row["n"]
    found = {}
    for path, of in counts.items():
        first, width, is_log = scales[path]
        edges = [first + width * bar for bar in range(_BARS + 1)]
        found[path] = [math.exp(edge) for edge in edges] if is_log else edges, of, is_log
    return found


def _spec(context: Context, node: Node, edges: list[float], counts: dict[int, int], is_log: bool) -> dict[str, Any]:
    rows = [
        {"from": rounded(edges[bar], 6), "to": rounded(edges[bar + 1], 6), "n": n}
        | {"range": f"{format_time(edges[bar])} to {format_time(edges[bar + 1])}"}
        for bar, n in counts.items()
    ]
    scale = {"domain": [edges[0], edges[-1]], "nice": False, **({"type": "log"} if is_log else {"zero": False})}
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
            "tooltip": tooltip(range="takes", n="intervals"),
        },
    }
