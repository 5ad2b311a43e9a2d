"""What a region's first time paid for, in one line beneath a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.columns import times

if TYPE_CHECKING:
    from deep500_timing._views.tree import Node, Tree

RATIO = 3.0
"""By how many medians a first time is worth a line."""
LEAST_COUNT = 6
"""Of fewer times the median says little."""
LEAST_SHARE = 0.01
"""Of the run, below which a first time is not named."""
_MOST = 3
_WIDTH = 32


def firsts_of(tree: Tree) -> list[Node]:
    """The regions whose first time stands out, the longest first; not those inside one whose first is the same."""
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
