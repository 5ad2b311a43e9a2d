"""One step: where it goes, by the tree as an icicle; and a typical step and the slowest, as timelines.

In the icicle each region is as wide as its share, the start-up left out. A timeline has a row for each rank, thread and
device.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU, GPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._summary.text import UNKNOWN, format_time, safe_name
from deep500_timing._views.columns import FEW
from deep500_timing._views.findings import FIRST_STEP
from deep500_timing._views.findings._evidence import STACKS_LEAST
from deep500_timing._views.page._charts import (
    COLOUR,
    GREY,
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
from deep500_timing._views.timeline import places_of as clocks_of
from deep500_timing.runs._places import places_of, samples_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node, Tree
    from deep500_timing._views.page._section import Context

_ROW = 30
_REGIONS = 8
"""Regions with the most own time, whose lines are listed."""
_LEAST = 0.0004
"""Share of the chart below which a region is not drawn; the table has it."""
_RANKS = 8
_BARS = 1500
"""Of a chart; the shortest are left out first."""
_LANE = 20


def where(context: Context) -> Content | None:
    tree, start = _steady(context)
    if not any(map(_total, tree.roots)):
        return None
    figures = [_figure(context, tree, CPU)]
    if tree.has_device_times:
        figures.append(_figure(context, replace(tree, roots=tuple(map(_on_device, tree.roots))), GPU))
    ranks = len(context.about.ranks)
    every = "Both" if ranks == 2 else f"All {ranks}"
    ranks_said = f"{every} ranks together" if ranks > 1 else f"Rank {context.about.ranks[0]}"
    text = f"{ranks_said}, {start}. A region lies below its parent, and is as wide as its share of it."
    return Content(tuple(figures), (text,), _lines_of(context))


def _steady(context: Context) -> tuple[Tree, str]:
    # The tree without the first steps, which pay for the start: all of the run if there are none.
    tree, steps, evidence = context.tree, context.steps, context.evidence
    count = evidence.warm_up_steps
    first = [node for node in tree.walk() if node.name == FIRST_STEP and node.total_s]
    taken: dict[tuple[str, ...], tuple[float, float]] = {node.path: (node.total_s or 0.0, 0.0) for node in first}
    if steps is not None and evidence.steps is not None and count:
        session, before = int(evidence.steps.sessions[0]), int(evidence.steps.numbers[count - 1])
        rows = context.rows(
            "select path, sum(case when device = 'CPU' then dur_ns - overlap_ns else 0 end)::double as total, "
            "sum(case when device <> 'CPU' then dur_ns else 0 end)::double as gpu from intervals "
            f"where session = {session} and step <= {before} and (path = {literal(steps.path)} "
            f"or starts_with(path, {literal(steps.path + '/')})) group by path"
        )
        taken |= {tuple(split_path(row["path"])): (row["total"] / 1e9, row["gpu"] / 1e9) for row in rows}
    outer = {path: both for path, both in taken.items() if path[:-1] not in taken}
    spent_s = sum(total for total, _ in outer.values())
    if not spent_s:
        return tree, "the whole run"
    said = f"without the start: {'' if not count else f'{count} steps, '}{format_time(spent_s)}"
    return replace(tree, roots=tuple(_without(node, taken, outer) for node in tree.roots)), said


def _without(
    node: Node, taken: dict[tuple[str, ...], tuple[float, float]], outer: dict[tuple[str, ...], tuple[float, float]]
) -> Node:
    less_s, less_gpu_s = taken.get(node.path, (0.0, 0.0))
    if node.path not in taken:
        inside = [both for path, both in outer.items() if path[: len(node.path)] == node.path]
        less_s, less_gpu_s = sum(total for total, _ in inside), sum(gpu for _, gpu in inside)
    children = [_without(child, taken, outer) for child in node.children if not child.is_rest]
    total_s = None if node.total_s is None else max(node.total_s - less_s, 0.0)
    gpu = None if node.gpu is None else replace(node.gpu, total_s=max(node.gpu.total_s - less_gpu_s, 0.0))
    for rest in node.children:
        if rest.is_rest and total_s is not None:
            covered_s = sum((child.total_s or 0.0) - child.overlap_s for child in children)
            children.append(replace(rest, total_s=max(total_s - covered_s, 0.0)))
    children = [
        replace(child, share=child.total_s / total_s if total_s and child.total_s is not None else child.share)
        for child in children
        if child.total_s is None or child.total_s > 0 or child.gpu is not None
    ]
    children.sort(key=lambda child: (child.is_rest, -(child.total_s or 0.0)))
    return replace(node, total_s=total_s, gpu=gpu, children=tuple(children))


def _on_device(node: Node) -> Node:
    # The same node with its times on the device; a total of None where it was not timed there.
    gpu = node.gpu
    times: dict[str, Any] = {
        name: None if gpu is None else getattr(gpu, name) for name in ("total_s", "median_s", "p95_s")
    }
    children = tuple(_on_device(child) for child in node.children if not child.is_rest)
    return replace(node, **times, count=gpu.count if gpu else 0, share=None, overlap_s=0.0, children=children)


def _figure(context: Context, tree: Tree, device: str) -> Figure:
    boxes: list[dict[str, Any]] = []
    whole = sum(map(_total, tree.roots))
    left = 0.0
    for root in tree.roots:
        width = _total(root) / whole if whole else 0.0
        _lay(context, root, left, width, 0, boxes)
        left += width
    depth = max((box["depth"] for box in boxes), default=0) + 1
    percents = {"labelExpr": "format(100 * datum.value, 'd') + '\u00a0%'", "title": None, "grid": False, "tickCount": 5}
    x = quantity("x", scale={"domain": [0, 1], "nice": False}, axis=percents)
    y = {"axis": None, "scale": {"domain": [0, depth], "reverse": True}}
    tip = tooltip(region="region", total="total", share="of its parent", median="median", p95="p95")
    mark = {"type": "rect", "stroke": "white", "strokeWidth": 1}
    bar = layer(mark, x=x, x2="x2", y=quantity("depth", **y), y2="below", color=COLOUR, tooltip=tip)
    label = layer(fitting("x", "x2"), x=quantity("x"), y=quantity("middle", **y), text="label", color=INK)
    spec = {"height": depth * _ROW, "data": {"values": boxes}, "layer": [bar, label]}
    nodes = [node for node in tree.walk() if _total(node)]
    overlaps = any(node.overlaps for node in nodes)
    first = max(tree.roots, key=_total)
    # Down to where the time divides.
    while len(inner := [child for child in first.children if _total(child)]) == 1 or (
        inner and _total(inner[0]) > 0.9 * _total(first)
    ):
        first = inner[0]
    whole = _total(first)
    inside = [f"{shown(c.name)} {_share(c, whole)}" for c in first.children if _total(c)]
    alt = f"Times on the {device}. {shown(first.name)} takes {format_time(whole)}"
    alt += f": {', '.join(inside[:6])}." if inside else "."
    still_open = [shown(node.name) for node in nodes if node.total_s is None] if device == CPU else []
    return Figure(
        f"On the {device}",
        alt,
        (Panel(spec),),
        ("region", "total", "share of its parent", "count", "median", "95th percentile"),
        [_row(tree, node) for node in nodes],
        note=("A region that overlaps its siblings is drawn without the overlap. " if overlaps else "")
        + (f"Grey and not ended yet: {', '.join(still_open)}." if still_open else ""),
    )


def _total(node: Node) -> float:
    # A region that is still open is at least as long as the ended regions inside it.
    return sum(map(_total, node.children)) if node.total_s is None else node.total_s


def _share(node: Node, above: float | None = None) -> str:
    share = node.share
    if share is None and above:
        share = _total(node) / above
    if share is None:
        return UNKNOWN
    # Small is not zero.
    return "<1\u00a0%" if 0 < share < 0.005 else f"{100 * share:.0f}\u00a0%"


def _lay(
    context: Context,
    node: Node,
    left: float,
    width: float,
    depth: int,
    boxes: list[dict[str, Any]],
    above: float | None = None,
) -> None:
    if width < _LEAST:
        return
    total = _total(node)
    # A region that is open, or not timed on the device, is known by the regions inside it only.
    is_known = not node.is_rest and node.total_s is not None
    name, colour, share = shown(node.name), context.colour(node.name) if is_known else GREY, UNKNOWN
    if node.parent and (is_known or node.is_rest):
        share = _share(node, above)
    label = f"{name}  {share}" if share != UNKNOWN else name
    boxes.append(
        {"x": rounded(left, 6), "x2": rounded(left + width, 6), "depth": depth, "below": depth + 1}
        | {"middle": depth + 0.5, "region": name, "label": label, "colour": colour, "ink": on(colour)}
        | {"total": format_time(total), "share": share}
        | {"median": format_time(node.median_s), "p95": format_time(node.p95_s)}
    )
    # Counted twice, an overlap would make the parts more than the whole.
    inside = [(child, max(_total(child) - child.overlap_s, 0.0)) for child in node.children]
    whole = max(total, sum(adds for _, adds in inside))
    for child, adds in inside:
        part = adds / whole if whole else 0.0
        _lay(context, child, left, width * part, depth + 1, boxes, total)
        left += width * part


def _row(tree: Tree, node: Node) -> tuple[object, ...]:
    indent = "\u2003" * (len(node.path) - 1) + shown(node.name)
    parent = tree.parent_of(node)
    share = _share(node, _total(parent)) if parent is not None else ""
    if node.is_rest:
        return (indent, format_time(node.total_s), share, "", "", "")
    p95 = UNKNOWN if node.count < FEW else format_time(node.p95_s)
    return indent, format_time(_total(node)), share, node.count, format_time(node.median_s), p95


def _lines_of(context: Context) -> tuple[tuple[str, tuple[str, ...], Sequence[Sequence[object]]], ...]:
    """A table for :class:`Content`; none without sampled stacks."""
    if not context.rows("select count(*) as n from stacks")[0]["n"]:
        return ()
    nodes = [node for node in context.tree.walk() if not node.is_rest and node.total_s]
    nodes.sort(key=lambda node: -((node.total_s or 0.0) if node.rest_s is None else node.rest_s))
    rows = []
    for node in nodes[:_REGIONS]:
        samples = samples_in(context.run, path_text(node.path), rank=context.evidence.rank)
        total = sum(samples.values())
        for place in places_of(samples) if total >= STACKS_LEAST else ():
            said = place.expression or place.inside
            share = f"{100 * place.share:.0f}\u00a0%"
            rows.append((shown(node.name), share, shown(place.name), shown(place.file), shown(said), total))
    heads = ("region", "of its own time", "function", "line", "calls", "samples")
    return (("Lines that the regions' own time goes to", heads, rows),) if rows else ()


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
    figures = [_timeline(context, steps.path, row["typical"], f"Step {row['typical']['step']}, a typical one")]
    if row["slowest"]["step"] != row["typical"]["step"]:
        figures.append(_timeline(context, steps.path, row["slowest"], f"Step {row['slowest']['step']}, the slowest"))
    return Content(
        tuple(figures),
        (
            "Drag to move, Ctrl and the wheel to zoom, or the buttons. "
            f"The whole run: deep500-timing timeline {safe_name(context.about.folder)}",
        ),
    )


def _timeline(context: Context, path: str, step: dict[str, Any], title: str) -> Figure:
    ranks = _ranks_shown(context, step)
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
    bars, labels, height = _bars_of(context, rows, starts, clock, top)
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
        (Panel(_timeline_spec(bars, labels, height, end)),),
        ("rank", "row", "region", "begins at", "takes"),
        [(bar["rank"], bar["track"], bar["region"], format_time(bar["start"]), bar["takes"]) for bar in bars[:200]],
        note=note.strip(),
        zooms=True,
    )


def _on_one_clock(context: Context, rows: list[dict[str, Any]], session: int) -> tuple[bool, float]:
    # Adds `at_ns`, on one clock, to all rows or to none; and how exact that is.
    every = clocks_of(context.run, None)
    places = {rank: every[rank, session] for rank in {row["rank"] for row in rows}}
    if any(row["unix_ns"] is None for row in rows) or not all(place.compared for place in places.values()):
        return False, 0.0
    for row in rows:
        [row["at_ns"]] = places[row["rank"]]([row["start_ns"]])
    return True, max((place.within_s for place in places.values()), default=0.0)


def _ranks_shown(context: Context, step: dict[str, Any]) -> list[int]:
    ranks = list(context.about.ranks)
    if len(ranks) <= _RANKS:
        return ranks
    return sorted({step["rank"], *[rank for rank in ranks if rank != step["rank"]][: _RANKS - 1]})


def _bars_of(
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


def _timeline_spec(bars: list[dict[str, Any]], labels: list[dict[str, Any]], height: int, end: float) -> dict[str, Any]:
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
    return {"height": max(height, 1) * _LANE, "padding": padding, "layer": [bar | {"params": [ZOOM]}, text, names]}
