"""Over the run: the time of each step with its parts, and the slow ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.sql import literal
from deep500_timing._summary.text import format_time
from deep500_timing._summary.tree import REST
from deep500_timing._views.page._colours import GREY
from deep500_timing._views.page._context import shown
from deep500_timing._views.page._parts import (
    COLOUR,
    TIME_LABELS,
    ZOOM,
    by_step,
    data,
    quantity,
    rounded,
    time_axis,
    tooltip,
)
from deep500_timing._views.page._section import Content, Figure, Panel

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context, Steps

_PARTS = 8
"""The largest regions; smaller ones share a colour."""
_SPIKE = 4
"""Times the median from which on a step is slow."""
_MARKED = 60
_LABELLED = 3
"""Marks at the edge that carry their time, if they are this share of the chart apart."""
_APART = 0.2


def over(context: Context) -> Content | None:
    steps = context.steps
    if steps is None:
        return None
    of_steps = f"from intervals where path = {literal(steps.path)} and device = 'CPU' and step is not null"
    median = context.rows(f"select median(dur_ns) / 1e9 as middle {of_steps}")[0]["middle"]
    batches = context.rows(
        f"select {steps.bucket_sql} as bucket, count(*) as n, sum(dur_ns)::double as total, "
        "max(dur_ns) as longest, arg_max(step, dur_ns) as at, "
        f"count(*) filter (dur_ns > {_SPIKE * median * 1e9}) as slow, "
        f"arg_max(rank, dur_ns) as rank {of_steps} group by 1 order by 1"
    )
    parts = _parts(context, steps, batches)
    longest = max(row["longest"] for row in batches)
    top, slow = _top(batches, median), sum(row["slow"] for row in batches)
    marked = _marked(batches, median, top)
    layers = [_warm_up(context, steps), _bars(parts, steps.width, top), *_marks(marked)]
    figure = Figure(
        "Time of a step, by its parts",
        f"The median step takes {format_time(median)}, the longest {format_time(longest / 1e9)}. "
        + (f"{slow} of {sum(row['n'] for row in batches)} took" if slow else "None took")
        + f" more than {_SPIKE} × the median{', warm-up included' if slow else ''}.",
        (Panel({"height": 260, "layer": [layer for layer in layers if layer]}),),
        ("first step", "steps timed", "mean", "longest", "in step", "on rank"),
        [_row(row) for row in batches],
        note=_note(steps, marked, top, min(_SPIKE * median, top)),
        zooms=True,
        legend=tuple((part["region"], part["colour"]) for part in parts.names),
    )
    return Content((figure,))


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    mean, longest = format_time(row["total"] / row["n"] / 1e9), format_time(row["longest"] / 1e9)
    return row["bucket"], row["n"], mean, longest, row["at"], row["rank"]


def _note(steps: Steps, marked: list[dict[str, Any]], top: float, least: float) -> str:
    said = f"Each bar is the mean of {steps.width} steps" if steps.width > 1 else "Each bar is a step"
    marks = f"; a mark is a step over {format_time(least)}" if marked else ""
    cut = (
        f". The chart ends at {format_time(top)}: a mark at its edge has its time"
        if any(mark["cut"] for mark in marked)
        else ""
    )
    return f"{said}, all ranks together{marks}{cut}."


class _Parts(NamedTuple):
    names: list[dict[str, Any]]
    """Each part with its name, its colour and its place from below."""
    bars: list[dict[str, Any]]


def _parts(context: Context, steps: Steps, batches: list[dict[str, Any]]) -> _Parts:
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
    return _Parts([name for name in names if any(bar["k"] == name["k"] for bar in bars)], bars)


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


def _bars(parts: _Parts, width: int, top: float) -> dict[str, Any]:
    # Names and colours are looked up: a thousand steps repeat them too often.
    names = {"data": data(parts.names), "key": "k", "fields": ["region", "colour"]}
    scale = {"domain": [0, rounded(top)], "nice": False}
    return {
        "data": data(parts.bars),
        "transform": [
            {"lookup": "k", "from": names},
            {"calculate": f"datum.step + {width}", "as": "end"},
            {"calculate": TIME_LABELS.replace("datum.value", "datum.s").replace("'~s'", "'.3~s'"), "as": "time"},
        ],
        "params": [ZOOM],
        "mark": {"type": "bar", "clip": True, "binSpacing": 0 if width > 1 or len(parts.bars) > 600 else 1},
        "encoding": by_step()
        | {
            "y": quantity("s", stack="zero", axis=time_axis(None), scale=scale),
            "order": {"field": "k"},
            "color": COLOUR,
            "tooltip": tooltip(step="from step", region="region", time="mean"),
        },
    }


def _marks(marked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if not marked:
        return []
    at = {"x": quantity("step"), "y": quantity("s")}
    ink = {"color": "currentColor", "clip": False}
    point = {"type": "point", "shape": "triangle-down", "size": 60, "yOffset": -6, "filled": True} | ink
    label = {"type": "text", "align": "left", "xOffset": 8, "yOffset": -4, "fontSize": 11} | ink
    tip, text = tooltip(what="slow", time="took", rank="on rank"), {"field": "label", "type": "nominal"}
    return [
        {"data": data(marked), "mark": point, "encoding": at | {"tooltip": tip}},
        {"data": data(marked), "mark": label, "encoding": at | {"text": text}},
    ]


def _warm_up(context: Context, steps: Steps) -> dict[str, Any]:
    last = max((step for found in context.findings if found.rule == "warm-up" for step in found.steps), default=None)
    if last is None:
        return {}
    return {
        "data": data([{"step": steps.first, "end": last + 1, "what": "warm-up"}]),
        "mark": {"type": "rect", "opacity": 0.15, "color": GREY, "clip": True},
        "encoding": {"x": quantity("step"), "x2": {"field": "end"}, "tooltip": tooltip(what="stretch")},
    }
