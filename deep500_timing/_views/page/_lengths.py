"""How long steps and regions take: each step of the run with its parts, and the distribution of each region."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import format_time
from deep500_timing._summary.tree import REST
from deep500_timing._views.page._charts import (
    COLOUR,
    GREY,
    TIME_LABELS,
    WHOLE_LABELS,
    ZOOM,
    by_step,
    layer,
    quantity,
    rounded,
    time_axis,
    tooltip,
)
from deep500_timing._views.page._section import Content, Figure, Panel, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.page._section import Context, Steps

_PARTS = 8
"""The largest regions; smaller ones share a colour."""
_SPIKE = 4
"""Times the median from which on a step is slow."""
_MARKED = 60
_LABELLED = 3
"""Marks at the edge that carry their time, if they are this share of the chart apart."""
_APART = 0.2
_MOST = 12
"""Distributions that are drawn."""
_LEAST = 10
"""Intervals below which no distribution is drawn."""
_BARS = 36
_LOG_FROM = 8
"""The ratio of longest to shortest from which on the scale is logarithmic."""


def over(context: Context) -> Content | None:
    steps = context.steps
    if steps is None:
        return None
    of_steps = f"from intervals where path = {literal(steps.path)} and device = 'CPU' and step is not null"
    median = context.rows(f"select median(dur_ns) / 1e9 as middle {of_steps}")[0]["middle"]
    batches = context.rows(
        f"select {steps.bucket_sql} as bucket, count(*) as n, sum(dur_ns)::double as total, "
        "avg(dur_ns) / 1e9 as mean_s, max(dur_ns) as longest, arg_max(step, dur_ns) as at, "
        f"count(*) filter (dur_ns > {_SPIKE * median * 1e9}) as slow, "
        f"arg_max(rank, dur_ns) as rank {of_steps} group by 1 order by 1"
    )
    parts, bars = _parts(context, steps, batches)
    longest = max(row["longest"] for row in batches)
    top, slow = _top(batches, median), sum(row["slow"] for row in batches)
    marked = _marked(batches, median, top)
    layers = [*_warm_up(context, steps), _bars(parts, bars, steps.width, top), *_marks(marked)]
    rows = [
        (*(row["bucket"], row["n"]), *map(format_time, (row["mean_s"], row["longest"] / 1e9)), row["at"], row["rank"])
        for row in batches
    ]
    figure = Figure(
        "Time of a step, by its parts",
        f"The median step takes {format_time(median)}, the longest {format_time(longest / 1e9)}. "
        + (f"{slow} of {sum(row['n'] for row in batches)} took" if slow else "None took")
        + f" more than {_SPIKE} × the median{', warm-up included' if slow else ''}.",
        (Panel({"height": 260, "layer": layers}),),
        ("first step", "steps timed", "mean", "longest", "in step", "on rank"),
        rows,
        note=_note(steps, marked, top, min(_SPIKE * median, top)),
        zooms=True,
        legend=tuple((part["region"], part["colour"]) for part in parts),
    )
    return Content((figure,))


def _note(steps: Steps, marked: list[dict[str, Any]], top: float, least: float) -> str:
    said = f"Each bar is the mean of {steps.width} steps" if steps.width > 1 else "Each bar is a step"
    marks = f"; a mark is a step over {format_time(least)}" if marked else ""
    cut = f". The chart ends at {format_time(top)}: a mark at its edge has its time"
    return f"{said}, all ranks together{marks}{cut if any(mark['cut'] for mark in marked) else ''}."


def _parts(
    context: Context, steps: Steps, batches: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    # The parts with name, colour and place from below; and the bars.
    depth = steps.path.count("/") - steps.path.count("\\/") + 1
    rows = context.rows(
        f"select {steps.bucket_sql} as bucket, region, sum(dur_ns)::double as total from intervals "
        f"where depth = {depth} and device = 'CPU' and not \"overlaps\" and step is not null "
        f"and starts_with(path, {literal(steps.path + '/')}) group by 1, 2"
    )
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["region"]] = totals.get(row["region"], 0.0) + row["total"]
    order = sorted(totals, key=lambda name: (-totals[name], name))[:_PARTS]
    by_bucket: dict[int, dict[str, float]] = {}
    for row in rows:
        of = by_bucket.setdefault(row["bucket"], {})
        name = row["region"] if row["region"] in order else "other regions"
        of[name] = of.get(name, 0.0) + row["total"]
    every = [*order, *(["other regions"] if len(totals) > _PARTS else []), REST]
    colours = {REST: GREY, "other regions": "#c9c9c9"}
    names = [
        {"k": place, "region": shown(name), "colour": colours.get(name) or context.colour(name)}
        for place, name in enumerate(every)
    ]
    bars = []
    for batch in batches:
        of, n = by_bucket.get(batch["bucket"], {}), batch["n"]
        of[REST] = max(batch["total"] - sum(of.values()), 0.0)
        bars += [
            {"step": batch["bucket"], "k": place, "s": rounded(of[name] / n / 1e9)}
            for place, name in enumerate(every)
            if of.get(name)
        ]
    drawn = {bar["k"] for bar in bars}
    return [name for name in names if name["k"] in drawn], bars


def _top(batches: list[dict[str, Any]], median: float) -> float:
    # A few long steps must not flatten the others: the chart ends above 98 % of the bars.
    lengths = sorted(row["total"] / row["n"] / 1e9 for row in batches)
    usual = lengths[min(int(0.98 * len(lengths)), len(lengths) - 1)]
    return float(1.15 * min(lengths[-1], max(usual, 1.5 * median)))


def _marked(batches: list[dict[str, Any]], median: float, top: float) -> list[dict[str, Any]]:
    spikes = [row for row in batches if row["longest"] / 1e9 > min(_SPIKE * median, top)]
    marked = []
    labelled: list[int] = []
    span = batches[-1]["bucket"] - batches[0]["bucket"]
    for row in sorted(spikes, key=lambda row: (-row["longest"], row["bucket"]))[:_MARKED]:
        longest_s = row["longest"] / 1e9
        time, is_cut = format_time(longest_s), longest_s > top
        mark = {"step": row["at"] + 0.5, "s": rounded(min(longest_s, top)), "time": time, "cut": is_cut}
        mark |= {"rank": row["rank"], "what": f"step {row['at']}"}
        is_apart = all(abs(row["at"] - step) > _APART * span for step in labelled)
        if is_cut and is_apart and len(labelled) < _LABELLED:
            labelled.append(row["at"])
        marked.append(mark | {"label": time if row["at"] in labelled else ""})
    return marked


def _bars(parts: list[dict[str, Any]], bars: list[dict[str, Any]], width: int, top: float) -> dict[str, Any]:
    # Names and colours are looked up: a thousand steps repeat them too often.
    names = {"data": {"values": parts}, "key": "k", "fields": ["region", "colour"]}
    scale = {"domain": [0, rounded(top)], "nice": False}
    mark = {"type": "bar", "clip": True, "binSpacing": 0 if width > 1 or len(bars) > 600 else 1}
    tip = tooltip(step="from step", region="region", time="mean")
    y = quantity("s", stack="zero", axis=time_axis(None), scale=scale)
    return layer(mark, bars, **by_step(), y=y, order="k", color=COLOUR, tooltip=tip) | {
        "transform": [
            {"lookup": "k", "from": names},
            {"calculate": f"datum.step + {width}", "as": "end"},
            {"calculate": TIME_LABELS.replace("datum.value", "datum.s").replace("'~s'", "'.3~s'"), "as": "time"},
        ],
        "params": [ZOOM],
    }


def _marks(marked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not marked:
        return []
    at = {"x": quantity("step"), "y": quantity("s")}
    ink = {"color": "currentColor", "clip": False}
    point = {"type": "point", "shape": "triangle-down", "size": 60, "yOffset": -6, "filled": True} | ink
    label = {"type": "text", "align": "left", "xOffset": 8, "yOffset": -4, "fontSize": 11} | ink
    return [
        layer(point, marked, **at, tooltip=tooltip(what="slow", time="took", rank="on rank")),
        layer(label, marked, **at, text={"field": "label", "type": "nominal"}),
    ]


def _warm_up(context: Context, steps: Steps) -> list[dict[str, Any]]:
    last = max((step for found in context.findings if found.rule == "warm-up" for step in found.steps), default=None)
    if last is None:
        return []
    mark = {"type": "rect", "opacity": 0.15, "color": GREY, "clip": True}
    stretch = [{"step": steps.first, "end": last + 1, "what": "warm-up"}]
    return [layer(mark, stretch, x=quantity("step"), x2="end", tooltip=tooltip(what="stretch"))]


def spread(context: Context) -> Content | None:
    nodes = [node for node in context.tree.walk() if not node.is_rest and node.count >= _LEAST and node.max_s]
    nodes.sort(key=lambda node: -(node.total_s or 0))
    chosen = nodes[:_MOST]
    if not chosen:
        return None
    rows = [
        (
            *(" / ".join(map(shown, node.path)), node.count),
            *map(format_time, (node.min_s, node.median_s, node.p95_s, node.p99_s, node.max_s)),
        )
        for node in chosen
    ]
    figure = Figure(
        "Distributions",
        "A histogram for each region, of all ranks together: "
        + ", ".join(f"{shown(node.name)} median {format_time(node.median_s)}" for node in chosen)
        + ".",
        _histograms(context, chosen),
        ("region", "count", "shortest", "median", "95th percentile", "99th percentile", "longest"),
        rows,
        note="Each chart has its own scale"
        + (f"; of {len(nodes)} regions the {_MOST} with the largest totals." if len(nodes) > _MOST else "."),
    )
    return Content((figure,))


def _histograms(context: Context, nodes: Sequence[Node]) -> tuple[Panel, ...]:
    # All by one query. The scale of a region: where it begins, the width of a bar, and whether both are logarithms.
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
    return tuple(
        Panel(_histogram(context.colour(node.name), counts[path], *scales[path]), shown(node.name))
        for node in nodes
        if (path := path_text(node.path)) in counts
    )


def _histogram(colour: str, counts: dict[int, int], first: float, width: float, is_log: bool) -> dict[str, Any]:
    edges = [math.exp(edge) if is_log else edge for edge in (first + width * bar for bar in range(_BARS + 1))]
    rows = [
        {"from": rounded(edges[bar], 6), "to": rounded(edges[bar + 1], 6), "n": n}
        | {"range": f"{format_time(edges[bar])} to {format_time(edges[bar + 1])}"}
        for bar, n in counts.items()
    ]
    scale = {"domain": [edges[0], edges[-1]], "nice": False, **({"type": "log"} if is_log else {"zero": False})}
    x_axis = time_axis(None) | {"tickCount": 3, "grid": False, "labelOverlap": True, "labelSeparation": 8}
    y_axis = {"title": None, "tickCount": 3, "tickMinStep": 1, "labelExpr": WHOLE_LABELS.format("~s")}
    x = quantity("from", bin={"binned": True}, scale=scale, axis=x_axis)
    tip = tooltip(range="takes", n="intervals")
    bar = layer({"type": "bar", "color": colour}, rows, x=x, x2="to", y=quantity("n", axis=y_axis), tooltip=tip)
    return {"height": 110, **bar}
