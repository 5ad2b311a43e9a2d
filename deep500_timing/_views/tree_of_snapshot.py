"""The tree of a snapshot: nested if the snapshot has one, else flat."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deep500_timing._base.names import CPU
from deep500_timing._summary.snapshot import counters_of
from deep500_timing._summary.tree import OnDevice, Tree, build_tree, node_of

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import Snapshot
    from deep500_timing._summary.tree import Node


def tree_of_snapshot(snapshot: Snapshot) -> Tree:
    """The snapshot's tree, or a flat one of its regions if their nesting is unknown."""
    if snapshot.tree is not None:
        return snapshot.tree
    nodes: dict[str, Node] = {}
    for region in snapshot:
        stats, path = region.stats, (region.name,)
        if stats is None:
            continue
        if region.device == CPU:
            nodes[region.name] = node_of(path, stats)
        else:
            gpu = OnDevice(stats.total, None, stats.count, stats.median, stats.p95)
            nodes[region.name] = replace(nodes.get(region.name) or node_of(path, None), gpu=gpu)
    return build_tree(nodes.values(), rank=snapshot.rank, is_nested=False, counters=counters_of(snapshot))
