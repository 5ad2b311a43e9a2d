"""The line beneath a table on regions whose first interval is long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.columns import times

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node, Tree

RATIO = 3.0
"""Medians from which on a first interval is worth a line."""
LEAST_COUNT = 6
"""Intervals below which the median says little."""
LEAST_SHARE = 0.01
"""Share of the run below which a first interval is not named."""
_MOST = 3
_WIDTH = 32


def firsts_of(tree: Tree) -> list[Node]:
    """The regions whose first interval stands out, the longest first, without regions inside another of them."""
    whole = sum(root.total_s or 0.0 for root in tree.roots)
    found = [
        node
        for node in tree.walk()
        if node.first_s is not None
        and node.median_s
        and node.count >= LEAST_COUNT
        and node.first_s >= RATIO * node.median_s
        and node.first_s >= LEAST_SHARE * whole
    ]
    paths = {node.path for node in found}
    outer = [node for node in found if not any(node.path[:end] in paths for end in range(1, len(node.path)))]
    return sorted(outer, key=lambda node: -(node.first_s or 0.0))


def first_note(tree: Tree) -> list[tuple[str, str]]:
    """The line, or none."""
    found = firsts_of(tree)[:_MOST]
    if not found:
        return []
    parts = []
    for node in found:
        assert node.first_s is not None
        assert node.median_s is not None
        took = times([node.first_s])[0]
        parts.append(
            f"{shorten(safe_name(node.name), _WIDTH)} {took}, {_ratio(node.first_s / node.median_s)} its median"
        )
    return [("first", "; ".join(parts))]


def _ratio(ratio: float) -> str:
    return f"{ratio:.1f} ×" if ratio < 10 else f"{ratio:.0f} ×"
