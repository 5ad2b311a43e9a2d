"""The tree of regions out of a snapshot: nested where the snapshot knows places, flat where it does not."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from deep500_timing._summary.snapshot import COUNTERS, CPU, GPU
from deep500_timing._views.tree import Node, OnDevice, Tree, rest_of

if TYPE_CHECKING:
    from deep500_timing._summary.place import Place
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot
    from deep500_timing._summary.stats import TimeStats


_TIMES = {item.name for item in fields(Node)} - {"total_s", "rest_s", "first_s", "warm_up_s", "overlap_s"}


def tree_of_snapshot(snapshot: Snapshot) -> Tree:
    """Lay out a snapshot's regions by where they lie, or side by side where it does not say."""
    counters = {
        (region.name, region.device): counts
        for region in snapshot
        if (counts := {name: getattr(region, name) for name in COUNTERS if getattr(region, name)})
    }
    if snapshot.places is None:
        return Tree(_flat(snapshot), rank=snapshot.rank, is_nested=False, counters=counters)
    on_host = [place for place in snapshot.places if place.device == CPU]
    on_device = {place.path: place for place in snapshot.places if place.device == GPU}
    children: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for place in on_host:
        children[place.path[:-1]].append(place)
    largest: dict[str, tuple[float, tuple[str, ...]]] = {}
    for place in on_host:
        total = place.stats.total if place.stats is not None else 0.0
        if total >= largest.get(place.path[-1], (-1.0, ()))[0]:
            largest[place.path[-1]] = (total, place.path)

    def node(place: Place) -> Node:
        inside = sorted(map(node, children[place.path]), key=lambda child: -(child.total_s or 0.0))
        counted = counters.get((place.path[-1], CPU), {}) if largest[place.path[-1]][1] == place.path else {}
        stats = place.stats
        total_s = None if stats is None else stats.total
        return Node(
            place.path[-1],
            place.path,
            total_s=total_s,
            rest_s=place.rest_s,
            share=place.share,
            **_times(stats),
            trend=place.trend,
            gpu=_on_device(on_device.get(place.path)),
            first_s=place.first_s,
            warm_up=place.warm_up,
            warm_up_s=place.warm_up_s,
            failed=counted.get("failed", 0),
            running=counted.get("running", 0),
            overlap_s=place.overlap_s,
            children=tuple(inside) + rest_of(total_s, place.rest_s, place.path),
        )

    roots = sorted(map(node, children[()]), key=lambda root: -(root.total_s or 0.0))
    # What is open now holds what has ended inside it.
    roots.sort(key=lambda root: not root.running)
    kept_only = any(place.is_estimate for place in snapshot.places)
    return Tree(tuple(roots), rank=snapshot.rank, kept_only=kept_only, counters=counters)


def _flat(snapshot: Snapshot) -> tuple[Node, ...]:
    by_name: dict[str, dict[str, RegionTimes]] = defaultdict(dict)
    for region in snapshot:
        if region.stats is not None:
            by_name[region.name][region.device] = region
    nodes = []
    for name, on in by_name.items():
        host, device = on.get(CPU), on.get(GPU)
        stats = None if host is None else host.stats
        gpu = None
        if device is not None and device.stats is not None:
            times = device.stats
            gpu = OnDevice(times.total, None, times.count, times.median, times.p95)
        total_s = None if stats is None else stats.total
        nodes.append(Node(name, (name,), total_s=total_s, **_times(stats), gpu=gpu))
    return tuple(sorted(nodes, key=lambda node: -(node.total_s or 0.0)))


def _on_device(place: Place | None) -> OnDevice | None:
    if place is None or place.stats is None:
        return None
    stats = place.stats
    return OnDevice(stats.total, place.share, stats.count, stats.median, stats.p95)


def _times(stats: TimeStats | None) -> dict[str, Any]:
    # Every statistic that a node has a field for.
    if stats is None:
        return {}
    return {"count": stats.count} | {
        f"{item.name}_s": getattr(stats, item.name) for item in fields(stats) if f"{item.name}_s" in _TIMES
    }
