"""Where a step goes: the tree as an icicle. Each region is as wide as its share, the start-up left out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU, GPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._summary.text import UNKNOWN, format_time
from deep500_timing._views.columns import FEW
from deep500_timing._views.findings import FIRST_STEP
from deep500_timing._views.findings._evidence import STACKS_LEAST
from deep500_timing._views.page._charts import COLOUR, GREY, INK, fitting, layer, on, quantity, rounded, tooltip
from deep500_timing._views.page._section import Content, Figure, Panel, shown
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
    nodes.sort(key=_own_s, reverse=True)
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


def _own_s(node: Node) -> float:
    return (node.total_s or 0.0) if node.rest_s is None else node.rest_s
