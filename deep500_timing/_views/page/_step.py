"""One step: where it goes, by the tree as an icicle; and a typical step and the slowest, as timelines.

In the icicle each region of the steps is as wide as its share. A timeline has a row for each rank, thread and device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU, GPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._summary.text import UNKNOWN, format_share, format_time, safe_name
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
from deep500_timing._views.page._section import Content, Context, Figure, Panel, shown
from deep500_timing._views.table import FEW
from deep500_timing._views.timeline import places_of as clocks_of
from deep500_timing.runs._tree import region_rows, tree_of_rows

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node, Tree

_LEVEL = 30
_REGIONS = 8
"""Regions that are listed with lines: those with the most own time."""
_LEAST = 0.0004
"""Share of the chart below which a region is not drawn; the table has it."""
_RANKS = 8
_BARS = 1500
"""Of a chart; the shortest are left out first."""
_LANE = 20
_ROWS = 200
"""Of a timeline's table."""


def where(context: Context) -> Content | None:
    rows, start = _in_steps(context)
    tree = tree_of_rows(rows, {})
    if not any(map(_total, tree.roots)):
        return None
    figures = [_figure(context, tree, CPU)]
    on_device = [row | {"device": CPU} for row in rows if row["device"] != CPU]
    if on_device:
        figures.append(_figure(context, tree_of_rows(on_device, {}), GPU))
    ranks = len(context.about.ranks)
    every = "Both" if ranks == 2 else f"All {ranks}"
    ranks_said = f"{every} ranks together" if ranks > 1 else f"Rank {context.about.ranks[0]}"
    text = f"{ranks_said}, {start}. A region lies below its parent, and is as wide as its share of it."
    return Content(tuple(figures), (text,), _lines_of(context))


def _in_steps(context: Context) -> tuple[list[dict[str, Any]], str]:
    """The regions of the steps, without the first steps, which pay for the start; all regions where none is a step."""
    rows, steps, evidence = region_rows(context.run), context.steps, context.evidence
    if steps is None or evidence.steps is None:
        return rows, "the whole run"
    count, said = evidence.warm_up_steps, "all steps"
    around = steps.path[: -len(path_text(split_path(steps.path)[-1:]))]
    rows = [row for row in rows if f"{row['path']}/".startswith(f"{steps.path}/")]
    if count:
        session, last = int(evidence.steps.sessions[0]), int(evidence.steps.numbers[count - 1])
        warm_up = {
            (row["path"], row["device"]): row
            for row in context.rows(
                "select path, device, sum(dur_ns)::bigint as total_ns, sum(overlap_ns)::bigint as overlap_ns "
                f"from intervals where session = {session} and step <= {last} group by path, device"
            )
        }
        for row in rows:
            less = warm_up.get((row["path"], row["device"]), {})
            for name in less.keys() & {"total_ns", "overlap_ns"}:
                row[name] -= less[name]
        spent_ns = warm_up[steps.path, CPU]["total_ns"]
        first = "the first step" if count == 1 else f"the first {count} steps"
        said = f"without {first}, {format_time(spent_ns / 1e9)}"
    return [row | {"path": row["path"].removeprefix(around)} for row in rows if row["total_ns"] > 0], said


def _figure(context: Context, tree: Tree, device: str) -> Figure:
    boxes = list(_boxes(context, tree.roots, 0.0, 0.0, 1.0, 0))
    depth = max((box["depth"] for box in boxes), default=0) + 1
    percents = {"labelExpr": "format(100 * datum.value, 'd') + '\u00a0%'", "title": None, "grid": False, "tickCount": 5}
    x = quantity("x", scale={"domain": [0, 1], "nice": False}, axis=percents)
    y = {"axis": None, "scale": {"domain": [0, depth], "reverse": True}}
    tip = tooltip(region="region", total="total", share="of its parent", median="median", p95="p95")
    mark = {"type": "rect", "stroke": "white", "strokeWidth": 1}
    bar = layer(mark, x=x, x2="x2", y=quantity("depth", **y), y2="below", color=COLOUR, tooltip=tip)
    label = layer(fitting("x", "x2"), x=quantity("x"), y=quantity("middle", **y), text="label", color=INK)
    spec = {"height": depth * _LEVEL, "data": {"values": boxes}, "layer": [bar, label]}
    whole = max(tree.roots, key=_total)
    parts = [f"{shown(child.name)} {_share(child, _total(whole))}" for child in whole.children if _total(child)]
    alt = f"Times on the {device}. {shown(whole.name)} takes {format_time(_total(whole))}"
    alt += f": {', '.join(parts[:6])}." if parts else "."
    nodes = [node for node in tree.walk() if _total(node)]
    notes = []
    if any(node.overlaps for node in nodes):
        notes.append("A region that overlaps its siblings is drawn without the overlap.")
    still_open = [shown(node.name) for node in nodes if node.total_s is None]
    if still_open and device == CPU:
        notes.append(f"Grey and not ended yet: {', '.join(still_open)}.")
    return Figure(
        f"On the {device}",
        alt,
        (Panel(spec),),
        ("region", "total", "share of its parent", "count", "median", "95th percentile"),
        [_row(tree, node) for node in nodes],
        note=" ".join(notes),
    )


def _total(node: Node) -> float:
    # A region that is still open is at least as long as the ended regions inside it.
    return sum(map(_total, node.children)) if node.total_s is None else node.total_s


def _share(node: Node, parent_s: float) -> str:
    share = node.share
    if share is None and parent_s:
        share = _total(node) / parent_s
    return format_share(share).replace(" ", "\u00a0")


def _boxes(
    context: Context, siblings: Iterable[Node], parent_s: float, left: float, width: float, depth: int
) -> Iterator[dict[str, Any]]:
    """A box for each of the siblings, from left to right, followed by the boxes of the regions inside it."""
    # Counted twice, an overlap would make the parts more than the whole.
    adds = {node: max(_total(node) - node.overlap_s, 0.0) for node in siblings}
    scale = width / (max(parent_s, sum(adds.values())) or 1.0)
    for node, add in adds.items():
        if add * scale >= _LEAST:
            # A region that is open, or not timed on the device, is known by the regions inside it only.
            is_known = not node.is_rest and node.total_s is not None
            name, colour = shown(node.name), context.colour(node.name) if is_known else GREY
            share = _share(node, parent_s) if node.parent and (is_known or node.is_rest) else UNKNOWN
            label = f"{name}  {share}" if share != UNKNOWN else name
            yield (
                {"x": rounded(left, 6), "x2": rounded(left + add * scale, 6), "depth": depth, "below": depth + 1}
                | {"middle": depth + 0.5, "region": name, "label": label, "colour": colour, "ink": on(colour)}
                | {"total": format_time(_total(node)), "share": share}
                | {"median": format_time(node.median_s), "p95": format_time(node.p95_s)}
            )
            yield from _boxes(context, node.children, _total(node), left, add * scale, depth + 1)
        left += add * scale


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
    nodes = [node for node in context.tree.walk() if not node.is_rest and node.total_s]
    nodes.sort(key=lambda node: -((node.total_s or 0.0) if node.rest_s is None else node.rest_s))
    rows = []
    for node in nodes[:_REGIONS]:
        for place in context.evidence.places_in(node.path):
            said = place.expression or place.inside
            share = f"{100 * place.share:.0f}\u00a0%"
            rows.append((shown(node.name), share, shown(place.name), shown(place.file), shown(said), place.samples))
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
        f"where path = {literal(steps.path)} and device = '{CPU}' and step is not null group by all), "
        "middle as (select quantile_disc(longest, 0.5) as length from lengths) "
        f"select arg_min({step}, (abs(longest - length), step)) as typical, "
        f"arg_max({step}, (longest, -step)) as slowest from lengths, middle"
    )
    figures = [_timeline(context, steps.path, row["typical"], f"Step {row['typical']['step']}, a typical one")]
    if row["slowest"]["step"] != row["typical"]["step"]:
        figures.append(_timeline(context, steps.path, row["slowest"], f"Step {row['slowest']['step']}, the slowest"))
    return Content(tuple(figures), (f"The whole run: deep500-timing timeline {safe_name(context.about.folder)}",))


def _timeline(context: Context, path: str, step: dict[str, Any], title: str) -> Figure:
    every = context.about.ranks
    ranks = sorted(sorted(every, key=lambda rank: rank != step["rank"])[:_RANKS])
    rows = context.rows(
        "select rank, thread, device, region, path, depth, start_ns, dur_ns from intervals "
        f"where step = {step['step']} and session = {step['session']} and rank in ({', '.join(map(str, ranks))}) "
        f"order by dur_ns desc, rank, start_ns limit {_BARS + 1}"
    )
    is_cut, rows = len(rows) > _BARS, rows[:_BARS]
    places = {rank: place for (rank, at), place in clocks_of(context.run, ranks).items() if at == step["session"]}
    for row in rows:
        [row["at_ns"]] = places[row["rank"]]([row["start_ns"]])
    batch = [row for row in rows if row["path"] == path and row["device"] == CPU]
    starts: dict[int, int] = {}
    for row in batch:
        starts[row["rank"]] = min(starts.get(row["rank"], row["at_ns"]), row["at_ns"])
    one_clock = all(place.compared and place.log["unix_offset_ns"] is not None for place in places.values())
    if one_clock:
        starts = dict.fromkeys(starts, min(starts.values()))
    # What encloses the step lies around the picture.
    top = min(row["depth"] for row in batch)
    rows = [row for row in rows if row["rank"] in starts and (row["depth"] >= top or row["thread"])]
    bars, labels, height = _bars_of(context, rows, starts)
    within_s = max(place.within_s for place in places.values())
    notes = [] if one_clock else ["Each rank begins at 0: their hosts' clocks are not compared."]
    if one_clock and within_s > 0:
        notes.append(f"Their hosts' clocks are compared to within {format_time(within_s)}.")
    if is_cut:
        notes.append(f"The {_BARS} longest intervals are drawn.")
    if len(every) > len(ranks):
        notes.append(f"Of {len(every)} ranks {len(ranks)} are shown.")
    on_rank = f", on rank {step['rank']} longest" if len(every) > 1 else ""
    return Figure(
        title,
        f"It took {format_time(step['longest'] / 1e9)}{on_rank}.",
        (Panel(_timeline_spec(bars, labels, height)),),
        ("rank", "row", "region", "begins at", "takes"),
        [(bar["rank"], bar["track"], bar["region"], format_time(bar["start"]), bar["takes"]) for bar in bars[:_ROWS]],
        note=" ".join(notes),
        zooms=True,
    )


def _bars_of(
    context: Context, rows: list[dict[str, Any]], starts: dict[int, int]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """The bars, the names of the tracks, and the height in bars."""
    tracks: dict[tuple[int, int, bool, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        tracks[row["rank"], row["thread"], row["device"] != CPU, row["device"]].append(row)
    bars: list[dict[str, Any]] = []
    labels: list[dict[str, Any]] = []
    height = 0
    many = len({rank for rank, *_ in tracks}) > 1
    for (rank, thread, _, device), own in sorted(tracks.items(), key=lambda item: item[0]):
        depths = sorted({row["depth"] for row in own})
        what = device if thread == 0 else f"{device} {thread}"
        labels.append({"y": height + 0.5, "label": f"rank {rank} {what}" if many else what})
        for row in sorted(own, key=lambda row: (row["at_ns"], -row["dur_ns"])):
            level = height + depths.index(row["depth"])
            start, seconds = (row["at_ns"] - starts[rank]) / 1e9, row["dur_ns"] / 1e9
            colour = context.colour(row["region"])
            bars.append(
                {"start": rounded(start, 6), "end": rounded(start + seconds, 6), "y": level + 0.06, "y2": level + 0.94}
                | {"middle": level + 0.5, "region": shown(row["region"]), "takes": format_time(seconds)}
                | {"colour": colour, "ink": on(colour), "rank": rank, "track": what}
            )
        height += len(depths)
    return bars, labels, height


def _timeline_spec(bars: list[dict[str, Any]], labels: list[dict[str, Any]], height: int) -> dict[str, Any]:
    end = max(bar["end"] for bar in bars)
    y = {"axis": None, "scale": {"domain": [0, height], "reverse": True}}
    x = quantity("start", scale={"domain": [0, end], "nice": False}, axis=time_axis(None))
    mark = {"type": "rect", "clip": True, "stroke": "white", "strokeWidth": 0.5}
    tip = tooltip(region="region", takes="takes", rank="rank", track="on")
    bar = layer(mark, bars, x=x, x2="end", y=quantity("y", **y), y2="y2", color=COLOUR, tooltip=tip)
    fits = fitting("start", "end") | {"dx": 3, "fontSize": 11, "clip": True}
    text = layer(fits, bars, x=x, y=quantity("middle", **y), text="region", color=INK)
    look = {"align": "right", "baseline": "middle", "fontSize": 11, "color": "currentColor", "clip": False}
    names = layer({"type": "text", **look}, labels, x={"value": -6}, y=quantity("y", **y), text="label")
    # No axis makes room for the names: a name as an axis' label would be code.
    padding = {"left": 14 + 7 * max(len(label["label"]) for label in labels), "right": 8, "top": 4, "bottom": 4}
    return {"height": height * _LANE, "padding": padding, "layer": [bar | {"params": [ZOOM]}, text, names]}
