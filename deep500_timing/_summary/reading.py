"""Reads the regions of a timer, while its threads go on, into plain data: a snapshot, with the tree of regions.

The tree is computed when a table is printed. Recording does nothing for it. A region with ``keep_last`` is placed where
its newest intervals lie, with the times of the whole run.
"""

from __future__ import annotations

import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.arrays import BoolArray, Int64Array
from deep500_timing._base.names import CPU, GPU, TimeType
from deep500_timing._distributed.launchers import known_rank_and_world
from deep500_timing._summary.distribution import RecordedTimes, kept_of
from deep500_timing._summary.nesting import ENDLESS, ROOT, Paths, place_of
from deep500_timing._summary.snapshot import STORED_COUNTERS, RegionTimes, Snapshot, counters_of, take_anchor
from deep500_timing._summary.stats import TimeStats, stats_of
from deep500_timing._summary.tree import BUCKETS, Node, OnDevice, Tree, build_tree, node_of, on_device

if TYPE_CHECKING:
    from deep500_timing._base.memory_usage import RegionMemory
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder

Path = tuple[str, ...]


_ORDER = {member.name: position for position, member in enumerate(TimeType)}


@dataclass
class Store:
    """The intervals of one region on one thread and device, as of one moment."""

    name: str
    device: str
    thread: int
    intervals: Intervals
    open_ns: int | None
    """The start of the region if it is open."""
    pending: int
    """Ended regions that the device has not reached."""
    digest: tuple[Any, ...]
    """From ``Intervals.digest()``."""

    @cached_property
    def kept(self) -> tuple[Int64Array, int]:
        """The intervals that are kept, start and end in ns first, and the number of those that are not."""
        return kept_of(self.intervals, self.digest[0])

    @cached_property
    def counted(self) -> BoolArray:
        """Which intervals are not warm-up."""
        pairs, dropped = self.kept
        return np.arange(len(pairs), dtype=np.int64) >= self.intervals.skip_first - dropped

    @property
    def durations(self) -> Int64Array:
        """The lengths of the intervals that are not warm-up, in ns. Negative ones become 0."""
        pairs, _ = self.kept
        lengths: Int64Array = np.maximum(pairs[:, 1] - pairs[:, 0], 0)[self.counted]
        return lengths


def take_snapshot(recorder: Recorder, pending: dict[int, int], *, places: bool = False) -> Snapshot:
    """Read every region of a timer once, while its threads go on.

    Only the new part of the aggregates is read, and regions are made when they are asked for: the cost does not grow
    with the run.
    """
    stores: list[Store] = []
    for region in recorder._regions():
        # Read before the intervals: a region that ends in between is then among them.
        open_ns = int(region._start_ns) if region.is_open else None
        name, thread, own, on_device = region.name, id(region._thread), region._intervals, region._device_intervals
        stores.append(Store(name, CPU, thread, own, open_ns, 0, own.digest()))
        if on_device is not None:
            waiting = pending.get(id(on_device), 0)
            stores.append(Store(name, GPU, thread, on_device, None, waiting, on_device.digest()))
    memory = {name: samples.total() for name, samples in list(recorder._memory_at_ends.items())}
    rank, world_size = known_rank_and_world()
    snapshot = Snapshot.later(
        lambda: {"regions": _regions_of(stores, memory)},
        unix_time_s=time.time(),
        host=socket.gethostname(),
        pid=os.getpid(),
        rank=rank,
        world_size=world_size,
        anchor=take_anchor(recorder.now_ns),
        since_unix_time_s=None,
        tree=None,
        enabled=recorder.enabled,
    )
    return replace(snapshot, tree=_tree_of(stores, snapshot)) if places else snapshot


def summarize(stores: Iterable[Intervals]) -> RecordedTimes:
    """The times of several threads without warm-up."""
    return RecordedTimes((store, store.digest()) for store in stores)


def _regions_of(stores: list[Store], memory: Mapping[str, RegionMemory | None]) -> tuple[RegionTimes, ...]:
    by_region: dict[tuple[str, str], list[Store]] = defaultdict(list)
    for store in stores:
        by_region[store.name, store.device].append(store)
    found = []
    for name, device in sorted(by_region, key=lambda key: (_ORDER.get(key[0], len(_ORDER)), key)):
        of_region = by_region[name, device]
        times = RecordedTimes((store.intervals, store.digest) for store in of_region)
        running = sum([store.open_ns is not None for store in of_region])
        pending = sum([store.pending for store in of_region])
        stats = times.stats()
        if stats is None and not (times.skipped or running or pending or any(times.counters)):
            continue
        at_ends = memory.get(name) if device == CPU else None
        distribution = None if stats is None else times.distribution
        counted = dict(zip(STORED_COUNTERS, times.counters, strict=True))
        found.append(
            RegionTimes(name, device, stats, running, pending, memory=at_ends, distribution=distribution, **counted)
        )
    return tuple(found)


# --- the tree ---------------------------------------------------------------------------------------------------------


@dataclass
class _Kept:
    """All intervals on the host; each array has one entry for each interval."""

    starts: Int64Array
    ends: Int64Array
    counted: BoolArray
    parents: Int64Array
    covered: Int64Array
    """Time in ns that earlier siblings cover."""
    paths: Int64Array
    stores: Int64Array


def _tree_of(stores: Sequence[Store], snapshot: Snapshot) -> Tree:
    names = list(dict.fromkeys(store.name for store in stores))
    paths = Paths()
    kept = _nest(stores, names, paths)
    path_of = [tuple(names[region] for region in paths.regions_of(number)) for number in range(len(paths.parents))]
    whole = {(times.name, times.device): times.stats for times in snapshot}
    # The most frequent path of each region.
    frequency = np.bincount(kept.paths, minlength=len(path_of))
    home = {path_of[number][-1]: number for number in np.argsort(frequency, kind="stable").tolist()}
    nodes = _exact(kept, path_of)
    forgotten = {store.name for store in stores if store.device == CPU and store.kept[1]}
    if forgotten:
        nodes = _with_whole_run(nodes, forgotten, {path_of[number] for number in home.values()}, whole)
    devices, is_estimate = _on_devices(stores, kept, path_of, home, whole)
    return build_tree(
        [replace(node, gpu=devices.get(path)) for path, node in nodes.items()],
        counters=counters_of(snapshot),
        rank=snapshot.rank,
        kept_only=bool(forgotten) or is_estimate,
    )


def _nest(stores: Sequence[Store], names: list[str], paths: Paths) -> _Kept:
    numbers = {name: number for number, name in enumerate(names)}
    threads: dict[int, int] = {}
    none = np.zeros(0, dtype=np.int64)
    parts: list[tuple[Any, ...]] = [(none.reshape(0, 2), none.astype(np.bool_), none, none, none)]
    for index, store in enumerate(stores):
        if store.device == CPU:
            (pairs, _), counted = store.kept, store.counted
            # A region that ended after `open_ns` was read is among the pairs.
            if store.open_ns is not None and not (len(pairs) and pairs[-1, 0] >= store.open_ns):
                pairs = np.concatenate((pairs, np.array([[store.open_ns, ENDLESS]], dtype=np.int64)))
                counted = np.append(counted, False)
            of_store = numbers[store.name], threads.setdefault(store.thread, len(threads)), index
            parts.append((pairs, counted, *(np.full(len(pairs), number, dtype=np.int64) for number in of_store)))
    pairs, counted, regions, of_thread, indices = (np.concatenate(of) for of in zip(*parts, strict=True))
    starts, ends = pairs[:, 0], np.maximum(pairs[:, 1], pairs[:, 0])
    nested = paths.nest_on_host(starts, ends, regions, of_thread)
    return _Kept(starts, ends, counted, nested.parents, nested.covered, nested.paths, indices)


def _exact(kept: _Kept, path_of: list[Path]) -> dict[Path, Node]:
    # Warm-up is in no total, so only time inside a counted interval of the parent is a share of it or covers it.
    is_open = kept.ends == ENDLESS
    durations = np.where(is_open, 0, kept.ends - kept.starts)
    counts = kept.counted & ~is_open
    in_counted = kept.parents != ROOT
    in_counted[in_counted] = counts[kept.parents[in_counted]]
    trends = _trends(kept, counts, durations, len(path_of))
    nodes: dict[Path, Node] = {}
    in_parent_ns: dict[Path, int] = {}
    covered_ns: dict[Path, int] = defaultdict(int)
    order = np.argsort(kept.paths, kind="stable")  # the places of each path's intervals
    ends = np.cumsum(np.bincount(kept.paths, minlength=len(path_of)))
    for number, rows in enumerate(np.split(order, ends[:-1])[: len(path_of)]):
        path = path_of[number]
        own, ended = rows[counts[rows]], rows[~is_open[rows]]
        warm_up, begun = ended[~counts[ended]], kept.starts[ended]
        inside, shared = ended[in_counted[ended]], own[in_counted[own]]
        nodes[path] = node_of(
            path,
            stats_of(durations[own]) if len(own) else None,
            overlap_s=int(kept.covered[shared].sum()) / 1e9,
            first_s=int(durations[ended[begun == begun.min()]].max()) / 1e9 if len(ended) else None,
            warm_up=len(warm_up),
            warm_up_s=int(durations[warm_up].sum()) / 1e9 if len(warm_up) else None,
            trend=trends[number],
        )
        in_parent_ns[path] = int(durations[shared].sum())
        covered_ns[path[:-1]] += int((durations[inside] - kept.covered[inside]).sum())
    found = {}
    for path, node in nodes.items():
        above = nodes.get(path[:-1])
        share = in_parent_ns[path] / 1e9 / above.total_s if above is not None and above.total_s else None
        rest_s = None
        if node.total_s is not None and path in covered_ns:
            rest_s = (round(node.total_s * 1e9) - covered_ns[path]) / 1e9
        found[path] = replace(node, share=None if node.total_s is None else share, rest_s=rest_s)
    return found


def _trends(kept: _Kept, counts: BoolArray, durations: Int64Array, paths: int) -> list[tuple[float | None, ...]]:
    if not counts.any():
        return [()] * paths
    first = int(kept.starts[counts].min())
    width = max(-(-(int(kept.ends[counts].max()) - first + 1) // BUCKETS), 1)
    keys = kept.paths[counts] * BUCKETS + (kept.starts[counts] - first) // width
    sums = np.bincount(keys, durations[counts], paths * BUCKETS)
    numbers = np.bincount(keys, minlength=paths * BUCKETS)
    means = np.divide(sums, numbers, out=np.full(len(sums), np.nan), where=numbers > 0) / 1e9
    rows = means.reshape(paths, BUCKETS).tolist()
    return [tuple(None if mean != mean else mean for mean in row) for row in rows]


def _with_whole_run(
    nodes: dict[Path, Node], forgotten: set[str], homes: set[Path], whole: Mapping[tuple[str, str], TimeStats | None]
) -> dict[Path, Node]:
    # Regions whose intervals are not all kept stand at their most frequent path only. Their relations are estimates,
    # which build_tree makes of the totals.
    found: dict[Path, Node] = {}
    for path, node in nodes.items():
        if node.name not in forgotten:
            found[path] = replace(node, share=None) if forgotten.intersection(path[-2:-1]) else node
        elif path in homes:
            stats = whole.get((node.name, CPU))
            found[path] = node_of(path, stats, warm_up=stats.skipped if stats else 0)
    found = {path: node for path, node in found.items() if all(path[:end] in found for end in range(1, len(path)))}
    for above in {path[:-1] for path in found if path[-1] in forgotten and len(path) > 1}:
        found[above] = replace(found[above], rest_s=None)
    return found


def _on_devices(
    stores: Sequence[Store],
    kept: _Kept,
    path_of: list[Path],
    home: dict[str, int],
    whole: Mapping[tuple[str, str], TimeStats | None],
) -> tuple[dict[Path, OnDevice], bool]:
    # A device time has the path of its host interval; without one that is kept, the most frequent path.
    durations: dict[int, list[Int64Array]] = defaultdict(list)
    estimates: dict[Path, OnDevice] = {}
    for index, store in enumerate(stores):
        if store.device == CPU or store.name not in home:
            continue
        if store.kept[1]:
            stats = whole.get((store.name, GPU))
            if stats is not None:
                estimates[path_of[home[store.name]]] = on_device(stats)
            continue
        # A store of a device follows the one of its host.
        own = np.flatnonzero(kept.stores == index - 1)
        at = place_of(store.kept[0][:, 2], kept.starts[own])
        paths = np.where(at < 0, home[store.name], np.append(kept.paths[own], ROOT)[at])[store.counted]
        for number in np.unique(paths).tolist():
            durations[number].append(store.durations[paths == number])
    exact = {path_of[number]: on_device(stats_of(np.concatenate(parts))) for number, parts in durations.items()}
    return exact | estimates, bool(estimates)


# --- kept intervals ---------------------------------------------------------------------------------------------------


def kept_intervals(stores: Iterable[Intervals]) -> Int64Array:
    """The intervals that are kept, in the order in which they ended.

    Returns:
        Shape ``(n, 2)``: start and end in nanoseconds of the timer's host clock.
    """
    parts = []
    for store in stores:
        joined, _ = kept_of(store, store.count)
        joined = joined[:, :2]
        if store.keep_last >= 0:
            joined = joined[max(len(joined) - store.keep_last, 0) :]
        parts.append(joined)
    if len(parts) == 1:
        return parts[0] if parts[0].flags.writeable else parts[0].copy()
    merged = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    return merged[np.argsort(merged[:, 1], kind="stable")]
