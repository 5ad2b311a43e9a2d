"""Over the run: the time of a step, with its parts, and which were slow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._summary.text import format_time
from deep500_timing._views.page._colours import GREY
from deep500_timing._views.page._context import literal, shown
from deep500_timing._views.page._parts import ZOOM, colour_by_datum, data, rounded, step_axis, time_axis, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel
from deep500_timing._views.tree import REST

if TYPE_CHECKING:
    from deep500_timing._views.page._context import Context, Steps

_PARTS = 8
"""Regions that are told apart; smaller ones are together."""
_SPIKE = 4
"""Times the median from which on a step is marked."""
_MARKED = 60


class Over:
    """Steps over the run."""

    name, title, place = "over-the-run", "Over the run", 40
    missing = "No step was timed as BATCH."

    def build(self, context: Context) -> Content | None:
        """See :class:`Section`."""
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
        spikes = [row for row in batches if row["longest"] / 1e9 > _SPIKE * median]
        spikes = sorted(spikes, key=lambda row: (-row["longest"], row["bucket"]))[:_MARKED]
        marked = [
            {"step": row["at"] + 0.5, "s": rounded(row["longest"] / 1e9), "time": format_time(row["longest"] / 1e9)}
            | {"rank": row["rank"], "what": f"step {row['at']}"}
            for row in spikes
        ]
        layers: list[dict[str, Any]] = [
            _warm_up(context),
            _bars(parts, steps.width, _top(batches, spikes)),
            _spikes(marked),
        ]
        figure = Figure(
            "Time of a step, by its parts",
            f"The median step takes {format_time(median)}, the longest {format_time(longest / 1e9)}. "
            f"{_spiked(sum(row['slow'] for row in batches), sum(row['n'] for row in batches))}",
            (Panel({"height": 260, "layer": [layer for layer in layers if layer]}),),
            ("first step", "steps timed", "mean", "longest", "in step", "on rank"),
            [_row(row) for row in batches],
            note=_note(steps, len(spikes)),
            zooms=True,
            legend=tuple(dict.fromkeys((row["region"], row["colour"]) for row in parts)),
        )
        return Content((figure,))


def _row(row: dict[str, Any]) -> tuple[object, ...]:
    mean, longest = format_time(row["total"] / row["n"] / 1e9), format_time(row["longest"] / 1e9)
    return row["bucket"], row["n"], mean, longest, row["at"], row["rank"]


def _spiked(number: int, of: int) -> str:
    return (
        f"{number} of {of} took more than {_SPIKE} × the median, warm-up included."
        if number
        else f"None is over {_SPIKE} × the median."
    )


def _note(steps: Steps, spikes: int) -> str:
    said = f"Each bar is the mean of {steps.width} steps" if steps.width > 1 else "Each bar is a step"
    marks = f"; a mark is a step over {_SPIKE} × the median" if spikes else ""
    return f"{said}, all ranks together{marks}."


def _parts(context: Context, steps: Steps, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
    found = []
    for batch in batches:
        of, n = by_bucket.get(batch["bucket"], {}), batch["n"]
        rest = max(batch["total"] - sum(of.values()), 0.0)
        for place, name in enumerate([*order, "other regions", REST]):
            total = rest if name == REST else of.get(name)
            if not total:
                continue
            seconds = total / n / 1e9
            colour = GREY if name == REST else "#c9c9c9" if name == "other regions" else context.colour(name)
            found.append(
                {"step": batch["bucket"], "end": batch["bucket"] + steps.width, "order": place, "region": shown(name)}
                | {"s": rounded(seconds), "time": format_time(seconds), "colour": colour}
            )
    return found


def _top(batches: list[dict[str, Any]], spikes: list[dict[str, Any]]) -> float:
    # Room for a mark over the longest step.
    lengths: list[float] = [row["total"] / row["n"] for row in batches] + [row["longest"] for row in spikes]
    return 1.08 * max(lengths) / 1e9


def _bars(parts: list[dict[str, Any]], width: int, top: float) -> dict[str, Any]:
    return {
        "data": data(parts),
        "params": [ZOOM],
        "mark": {"type": "bar", "clip": True, "binSpacing": 0 if width > 1 or len(parts) > 600 else 1},
        "encoding": {
            "x": {
                "field": "step",
                "type": "quantitative",
                "bin": {"binned": True},
                "scale": {"nice": False, "zero": False},
                "axis": step_axis(),
            },
            "x2": {"field": "end"},
            "y": {"field": "s", "type": "quantitative", "stack": "zero", "axis": time_axis(None)}
            | {"scale": {"domain": [0, rounded(top)], "nice": False}},
            "order": {"field": "order"},
            "color": colour_by_datum(),
            "tooltip": tooltip(step="from step", region="region", time="mean"),
        },
    }


def _spikes(marked: list[dict[str, Any]]) -> dict[str, Any]:
    if not marked:
        return {}
    return {
        "data": data(marked),
        "mark": {
            "type": "point",
            "shape": "triangle-down",
            "size": 60,
            "yOffset": -6,
            "filled": True,
            "color": "currentColor",
        },
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "y": {"field": "s", "type": "quantitative"},
            "tooltip": tooltip(what="slow", time="took", rank="on rank"),
        },
    }


def _warm_up(context: Context) -> dict[str, Any]:
    steps = context.steps
    last = max((step for found in context.findings if found.rule == "warm-up" for step in found.steps), default=None)
    if last is None or steps is None:
        return {}
    return {
        "data": data([{"step": steps.first, "end": last + 1, "what": "warm-up"}]),
        "mark": {"type": "rect", "opacity": 0.15, "color": GREY, "clip": True},
        "encoding": {
            "x": {"field": "step", "type": "quantitative"},
            "x2": {"field": "end"},
            "tooltip": tooltip(what="stretch"),
        },
    }
