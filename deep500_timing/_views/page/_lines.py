"""The lines of the program that the regions' own time goes to, from sampled stacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings._evidence import STACKS_LEAST
from deep500_timing._views.page._context import shown
from deep500_timing.runs._places import places_of, samples_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.page._context import Context

_REGIONS = 8
"""Regions with the most own time."""


def lines_of(context: Context) -> tuple[tuple[str, tuple[str, ...], Sequence[Sequence[object]]], ...]:
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
