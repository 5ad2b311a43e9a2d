"""How long steps and regions take: each step of the run with its parts, and the distribution of each region."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from deep500_timing._base.names import CPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import format_time
from deep500_timing._summary.tree import REST, Node
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
from deep500_timing._views.page._section import Content, Context, Figure, Panel, StepBars, shown

_PARTS = 8
"""The largest regions; smaller ones share a colour."""
_OTHER = "other regions"
_SPIKE = 4
"""Times the median from which on a step is slow."""
_MARKED = 60
_MOST = 12
"""Distributions that are drawn."""
_LEAST = 10
"""Intervals below which no distribution is drawn."""
_BARS = 36


def over(context: Context) -> Content | None:
    steps = context.steps
    if steps is None:
        return None
    of_steps = f"from intervals where path = {literal(steps.path)} and device = '{CPU}' and step is not null"
    median = context.rows(f"select median(dur_ns) / 1e9 as middle {of_steps}")[0]["middle"]
    batches = context.rows(
        f"select {steps.bucket_sql} as bucket, count(*) as n, sum(dur_ns)::double as total_ns, "
        "max(dur_ns) / 1e9 as longest, "
        f"arg_max(step, dur_ns) as at, count(*) filter (dur_ns > {_SPIKE * median * 1e9}) as slow, "
        f"arg_max(rank, dur_ns) as rank {of_steps} group by 1 order by 1"
    )
    for row in batches:
        row["mean"] = row["total_ns"] / row["n"] / 1e9
    parts, bars = _parts(context, steps, batches)
    slow = sum(row["slow"] for row in batches)
    # A few long steps must not flatten the others: the chart ends above 98 % of the bars.
    means = sorted(row["mean"] for row in batches)
    usual = means[min(int(0.98 * len(means)), len(means) - 1)]
    top = 1.15 * min(means[-1], max(usual, 1.5 * median))
    marks = _marks(batches, min(_SPIKE * median, top), top)
    note = f"Each bar is the mean of {steps.width} steps" if steps.width > 1 else "Each bar is a step"
    note += ", all ranks together"
    if marks:
        note += f"; a mark is a step over {format_time(min(_SPIKE * median, top))}"
    if any(mark["s"] == rounded(top) for mark in marks):
        note += f". The chart ends at {format_time(top)}: the largest mark at its edge has its time"
    longest = max(row["longest"] for row in batches)
    figure = Figure(
        "Time of a step, by its parts",
        f"The median step takes {format_time(median)}, the longest {format_time(longest)}. "
        + (f"{slow} of {sum(row['n'] for row in batches)} took" if slow else "None took")
        + f" more than {_SPIKE} × the median{', warm-up included' if slow else ''}.",
        (Panel(_steps_spec(context, steps, parts, bars, marks, top)),),
        ("first step", "steps timed", "mean", "longest", "in step", "on rank"),
        [
            (row["bucket"], row["n"], format_time(row["mean"]), format_time(row["longest"]), row["at"], row["rank"])
            for row in batches
        ],
        note=f"{note}.",
        zooms=True,
        legend=tuple((part["region"], part["colour"]) for part in parts),
    )
    return Content((figure,))


def _parts(
    context: Context, steps: StepBars, batches: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parts with name, colour and place from below; and the bars."""
    depth = steps.path.count("/") - steps.path.count("\\/") + 1
    rows = context.rows(
        f"select {steps.bucket_sql} as bucket, region, sum(dur_ns)::double as total_ns from intervals "
        f"where depth = {depth} and device = '{CPU}' and not \"overlaps\" and step is not null "
        f"and starts_with(path, {literal(steps.path + '/')}) group by 1, 2"
    )
    totals: dict[str, float] = defaultdict(float)
    for row in rows:
        totals[row["region"]] += row["total_ns"]
    largest = sorted(totals, key=lambda name: (-totals[name], name))[:_PARTS]
    by_bucket: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        by_bucket[row["bucket"]][row["region"] if row["region"] in largest else _OTHER] += row["total_ns"]
    order = [*largest, _OTHER, REST]
    bars = []
    for batch in batches:
        of_bucket = by_bucket[batch["bucket"]]
        of_bucket[REST] = batch["total_ns"] - sum(of_bucket.values())
        bars += [
            {"step": batch["bucket"], "k": place, "s": rounded(of_bucket[name] / batch["n"] / 1e9)}
            for place, name in enumerate(order)
            if of_bucket[name] > 0
        ]
    drawn = {bar["k"] for bar in bars}
    colours = {REST: GREY, _OTHER: "#c9c9c9"}
    parts = [
        {"k": place, "region": shown(name), "colour": colours.get(name) or context.colour(name)}
        for place, name in enumerate(order)
        if place in drawn
    ]
    return parts, bars


def _marks(batches: list[dict[str, Any]], least: float, top: float) -> list[dict[str, Any]]:
    """The slowest steps. The first of those that are longer than the chart has its time as a label."""
    spikes = sorted(
        (row for row in batches if row["longest"] > least), key=lambda row: (-row["longest"], row["bucket"])
    )
    marks = [
        {"step": row["at"] + 0.5, "s": rounded(min(row["longest"], top)), "time": format_time(row["longest"])}
        | {"rank": row["rank"], "what": f"step {row['at']}", "label": ""}
        for row in spikes[:_MARKED]
    ]
    if marks and spikes[0]["longest"] > top:
        marks[0]["label"] = marks[0]["time"]
    return marks


def _steps_spec(
    context: Context,
    steps: StepBars,
    parts: list[dict[str, Any]],
    bars: list[dict[str, Any]],
    marks: list[dict[str, Any]],
    top: float,
) -> dict[str, Any]:
    layers = []
    warm_up = [step for found in context.findings if found.rule == "warm-up" for step in found.steps]
    if warm_up:
        stretch = [{"step": steps.first, "end": max(warm_up) + 1, "what": "warm-up"}]
        mark = {"type": "rect", "opacity": 0.15, "color": GREY, "clip": True}
        layers.append(layer(mark, stretch, x=quantity("step"), x2="end", tooltip=tooltip(what="stretch")))
    # Names and colours are looked up: a thousand steps repeat them too often.
    names = {"data": {"values": parts}, "key": "k", "fields": ["region", "colour"]}
    scale = {"domain": [0, rounded(top)], "nice": False}
    mark = {"type": "bar", "clip": True, "binSpacing": 0 if steps.width > 1 or len(bars) > 600 else 1}
    tip = tooltip(step="from step", region="region", time="mean")
    y = quantity("s", stack="zero", axis=time_axis(None), scale=scale)
    bar = layer(mark, bars, **by_step(), y=y, order="k", color=COLOUR, tooltip=tip)
    bar["transform"] = [
        {"lookup": "k", "from": names},
        {"calculate": f"datum.step + {steps.width}", "as": "end"},
        {"calculate": TIME_LABELS.replace("datum.value", "datum.s").replace("'~s'", "'.3~s'"), "as": "time"},
    ]
    layers.append(bar | {"params": [ZOOM]})
    if marks:
        at = {"x": quantity("step"), "y": quantity("s")}
        ink = {"color": "currentColor", "clip": False}
        point = {"type": "point", "shape": "triangle-down", "size": 60, "yOffset": -6, "filled": True} | ink
        label = {"type": "text", "align": "left", "xOffset": 8, "yOffset": -4, "fontSize": 11} | ink
        layers.append(layer(point, marks, **at, tooltip=tooltip(what="slow", time="took", rank="on rank")))
        layers.append(layer(label, marks, **at, text={"field": "label", "type": "nominal"}))
    return {"height": 260, "layer": layers}


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
    medians = ", ".join(f"{shown(node.name)} median {format_time(node.median_s)}" for node in chosen)
    figure = Figure(
        "Distributions",
        f"A histogram for each region, of all ranks together: {medians}.",
        tuple(_histograms(context, chosen)),
        ("region", "count", "shortest", "median", "95th percentile", "99th percentile", "longest"),
        rows,
        note="Each chart has its own scale, which is logarithmic"
        + (f"; of {len(nodes)} regions the {_MOST} with the largest totals." if len(nodes) > _MOST else "."),
    )
    return Content((figure,))


def _histograms(context: Context, nodes: list[Node]) -> Iterator[Panel]:
    # The logarithm of the first edge in ns, and the width of a bar.
    scales = {}
    for node in nodes:
        low, high = 0.98 * max((node.min_s or 0.0) * 1e9, 1.0), 1.02 * max((node.max_s or 0.0) * 1e9, 1.0)
        scales[path_text(node.path)] = math.log(low), math.log(high / low) / _BARS
    values = ", ".join(f"({literal(path)}, {first}, {width})" for path, (first, width) in scales.items())
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for row in context.rows(
        f"select path, least(floor((ln(greatest(dur_ns, 1)) - first) / width), {_BARS - 1})::integer as bar, "
        f"count(*) as n from intervals join (values {values}) as scales(of_path, first, width) on path = of_path "
        f"where device = '{CPU}' group by 1, 2 order by 1, 2"
    ):
        counts[row["path"]][row["bar"]] = row["n"]
    for node in nodes:
        path = path_text(node.path)
        yield Panel(_histogram(context.colour(node.name), counts[path], *scales[path]), shown(node.name))


def _histogram(colour: str, counts: dict[int, int], first: float, width: float) -> dict[str, Any]:
    edges = [math.exp(first + width * bar) / 1e9 for bar in range(_BARS + 1)]
    rows = [
        {"from": rounded(edges[bar], 6), "to": rounded(edges[bar + 1], 6), "n": n}
        | {"range": f"{format_time(edges[bar])} to {format_time(edges[bar + 1])}"}
        for bar, n in counts.items()
    ]
    scale = {"type": "log", "domain": [edges[0], edges[-1]], "nice": False}
    x_axis = time_axis(None) | {"tickCount": 3, "grid": False, "labelOverlap": True, "labelSeparation": 8}
    y_axis = {"title": None, "tickCount": 3, "tickMinStep": 1, "labelExpr": WHOLE_LABELS.format("~s")}
    x = quantity("from", bin={"binned": True}, scale=scale, axis=x_axis)
    tip = tooltip(range="takes", n="intervals")
    bar = layer({"type": "bar", "color": colour}, rows, x=x, x2="to", y=quantity("n", axis=y_axis), tooltip=tip)
    return {"height": 110, **bar}
