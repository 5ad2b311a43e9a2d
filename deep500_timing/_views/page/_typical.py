"""A typical step and the slowest, as timelines: ranks, threads and devices as rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.text import format_time, safe_name
from deep500_timing._views.page._charts import (
    COLOUR,
    INK,
    ZOOM,
    fitting,
    layer,
    on,
    quantity,
    rounded,
    time_axis,
    tooltip,
)
from deep500_timing._views.page._section import Content, Figure, Panel, shown
from deep500_timing._views.timeline.write import places_of

if TYPE_CHECKING:
    from deep500_timing._views.page._section import Context

_RANKS = 8
_BARS = 1500
"""Of a chart; the shortest are left out first."""
_ROW = 20


def typical(context: Context) -> Content | None:
    steps = context.steps
    if steps is None:
        return None
    # Of several ranks a step is as long as on the slowest.
    step = "struct_pack(step := step, session := session, rank := rank, longest := longest)"
    [row] = context.rows(
        "with lengths as (select step, session, max(dur_ns) as longest, arg_max(rank, dur_ns) as rank from intervals "
        f"where path = {literal(steps.path)} and device = 'CPU' and step is not null group by all), "
        "middle as (select quantile_disc(longest, 0.5) as length from lengths) "
        f"select arg_min({step}, (abs(longest - length), step)) as typical, "
        f"arg_max({step}, (longest, -step)) as slowest from lengths, middle"
    )
    figures = [_figure(context, steps.path, row["typical"], f"Step {row['typical']['step']}, a typical one")]
    if row["slowest"]["step"] != row["typical"]["step"]:
        figures.append(_figure(context, steps.path, row["slowest"], f"Step {row['slowest']['step']}, the slowest"))
    return Content(
        tuple(figures),
        (
            "Drag to move, Ctrl and the wheel to zoom, or the buttons. "
            f"The whole run: deep500-timing timeline {safe_name(context.about.folder)}",
        ),
    )


def _figure(context: Context, path: str, step: dict[str, Any], title: str) -> Figure:
    ranks = _ranks(context, step)
    wanted = ", ".join(map(str, ranks))
    rows = context.rows(
        "select rank, thread, device, region, path, depth, unix_ns, start_ns, dur_ns from intervals "
        f"where step = {step['step']} and session = {step['session']} and rank in ({wanted}) "
        f"order by dur_ns desc, rank, start_ns limit {_BARS + 1}"
    )
    is_cut, rows = len(rows) > _BARS, rows[:_BARS]
    batch = [row for row in rows if row["path"] == path and row["device"] == CPU]
    one_clock, within_s = _on_one_clock(context, rows, step["session"])
    clock = "at_ns" if one_clock else "start_ns"
    starts: dict[int, int] = {}
    for row in batch:
        starts[row["rank"]] = min(starts.get(row["rank"], row[clock]), row[clock])
    if one_clock and starts:
        starts = dict.fromkeys(starts, min(starts.values()))
    # What encloses the step lies around the picture.
    top = min((row["depth"] for row in batch), default=0)
    rows = [row for row in rows if row["rank"] in starts and (row["depth"] >= top or row["thread"])]
    bars, labels, height = _lay(context, rows, starts, clock, top)
    end = max((bar["end"] for bar in bars), default=1.0)
    longest = format_time(step["longest"] / 1e9)
    on_rank = f", on rank {step['rank']} longest" if len(context.about.ranks) > 1 else ""
    note = "" if one_clock else "Each rank begins at 0: their hosts' clocks are not compared. "
    if one_clock and within_s > 0:
        note = f"Their hosts' clocks are compared to within {format_time(within_s)}. "
    if is_cut:
        note += f"The {_BARS} longest intervals are drawn. "
    if len(context.about.ranks) > len(ranks):
        note += f"Of {len(context.about.ranks)} ranks {len(ranks)} are shown."
    return Figure(
        title,
        f"It took {longest}{on_rank}.",
        (Panel(_spec(bars, labels, height, end)),),
        ("rank", "row", "region", "begins at", "takes"),
        [(bar["rank"], bar["track"], bar["region"], format_time(bar["start"]), bar["takes"]) for bar in bars[:200]],
        note=note.strip(),
        zooms=True,
    )


def _on_one_clock(context: Context, rows: list[dict[str, Any]], session: int) -> tuple[bool, float]:
    # Adds `at_ns`, on one clock, to all rows or to none; and how exact that is.
    every = places_of(context.run, None)
    places = {rank: every[rank, session] for rank in {row["rank"] for row in rows}}
    if any(row["unix_ns"] is None for row in rows) or not all(place.compared for place in places.values()):
        return False, 0.0
    for row in rows:
        [row["at_ns"]] = places[row["rank"]]([row["start_ns"]])
    return True, max((place.within_s for place in places.values()), default=0.0)


def _ranks(context: Context, step: dict[str, Any]) -> list[int]:
    ranks = list(context.about.ranks)
    if len(ranks) <= _RANKS:
        return ranks
    return sorted({step["rank"], *[rank for rank in ranks if rank != step["rank"]][: _RANKS - 1]})


def _lay(
    context: Context, rows: list[dict[str, Any]], starts: dict[int, int], clock: str, top: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    tracks: dict[tuple[int, int, bool, str], list[dict[str, Any]]] = {}
    for row in rows:
        tracks.setdefault((row["rank"], row["thread"], row["device"] != CPU, row["device"]), []).append(row)
    bars: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    height = 0
    many = len({rank for rank, *_ in tracks}) > 1
    for rank, thread, on_device, device in sorted(tracks):
        own = tracks[rank, thread, on_device, device]
        depths = sorted({row["depth"] for row in own})
        what = device if thread == 0 else f"{device} {thread}"
        labels.append({"y": height + 0.5, "label": f"rank {rank} {what}" if many else what})
        for row in sorted(own, key=lambda row: (row[clock], -row["dur_ns"])):
            level = height + depths.index(row["depth"])
            start, colour = (row[clock] - starts[rank]) / 1e9, context.colour(row["region"])
            seconds = row["dur_ns"] / 1e9
            bars.append(
                {"start": rounded(start, 6), "end": rounded(start + seconds, 6), "y": level + 0.06, "y2": level + 0.94}
                | {"middle": level + 0.5, "region": shown(row["region"]), "takes": format_time(seconds)}
                | {"colour": colour, "ink": on(colour), "rank": rank, "track": what}
            )
        height += len(depths)
    return bars, labels, height


def _spec(bars: list[dict[str, Any]], labels: list[dict[str, Any]], height: int, end: float) -> dict[str, Any]:
    y = {"axis": None, "scale": {"domain": [0, max(height, 1)], "reverse": True}}
    x = quantity("start", scale={"domain": [0, end], "nice": False}, axis=time_axis(None))
    mark = {"type": "rect", "clip": True, "stroke": "white", "strokeWidth": 0.5}
    tip = tooltip(region="region", takes="takes", rank="rank", track="on")
    bar = layer(mark, bars, x=x, x2="end", y=quantity("y", **y), y2="y2", color=COLOUR, tooltip=tip)
    fits = fitting("start", "end") | {"dx": 3, "fontSize": 11, "clip": True}
    text = layer(fits, bars, x=x, y=quantity("middle", **y), text="region", color=INK)
    look = {"align": "right", "baseline": "middle", "fontSize": 11, "color": "currentColor", "clip": False}
    names = layer({"type": "text", **look}, labels, x={"value": -6}, y=quantity("y", **y), text="label")
    # No axis makes room for the names: a name as an axis' label would be code.
    room = 14 + 7 * max((len(label["label"]) for label in labels), default=0)
    padding = {"left": room, "right": 8, "top": 4, "bottom": 4}
    return {"height": max(height, 1) * _ROW, "padding": padding, "layer": [bar | {"params": [ZOOM]}, text, names]}
