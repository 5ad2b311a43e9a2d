"""The tree of regions of one process, from the intervals that a timer keeps.

It is computed when a table is printed. Recording does nothing for it. A region with ``keep_last`` is placed where its
newest intervals lie, with the times of the whole run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import CPU, GPU
from deep500_timing._summary.nesting import ENDLESS, ROOT, Paths
from deep500_timing._summary.stats import stats_of
from deep500_timing._summary.tree import BUCKETS, Node, OnDevice, Tree, build_tree, node_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from deep500_timing._summary.stats import TimeStats

    Int64Array = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]
    Path = tuple[str, ...]


class Store(NamedTuple):
    """The intervals of one region on one thread and device, read once."""

    name: str
    device: str
    thread: int
    copied: dict[str, Any]
    """From ``Intervals.copy()``."""
    pairs: NDArray[np.int64]
    """Start and end in ns, shape ``(n, 2)``."""
    open_ns: int | None = None
    """The start of the region if it is open."""

    @property
    def counted(self) -> NDArray[np.bool_]:
        """Which intervals are not warm-up."""
        warm_up: int = self.copied["skip_first"] - self.copied["aggregated"]
        return np.arange(len(self.pairs), dtype=np.int64) >= warm_up


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


def tree_of_kept(
    stores: Sequence[Store],
    whole: Mapping[tuple[str, str], TimeStats | None],
    counters: Mapping[tuple[str, str], Mapping[str, int]],
    rank: int | None,
) -> Tree:
    names = list(dict.fromkeys(store.name for store in stores))
    paths = Paths()
    kept = _nest(stores, names, paths)
    path_of = [tuple(names[region] for region in paths.regions_of(number)) for number in range(len(paths.parents))]
    numbers = np.bincount(kept.paths, minlength=len(path_of))
    home = {path_of[number][-1]: path_of[number] for number in np.argsort(numbers, kind="stable").tolist()}
    nodes, in_parent_s, covered_s = _exact(kept, path_of)
    forgotten = {store.name for store in stores if store.device == CPU and store.copied["aggregated"]}
    if forgotten:
        nodes = _with_whole_run(nodes, forgotten, home, whole)
        for path in nodes:
            if not forgotten.isdisjoint(path[-2:]):
                in_parent_s.pop(path, None)
                covered_s.pop(path[:-1], None)
            if path[-1] in forgotten:
                covered_s.pop(path, None)
    on_device, is_estimate = _on_device(stores, kept, path_of, home, whole)
    return build_tree(
        [replace(node, gpu=on_device.get(path)) for path, node in nodes.items()],
        in_parent_s=in_parent_s,
        covered_s=covered_s,
        counters=counters,
        rank=rank,
        kept_only=bool(forgotten) or is_estimate,
    )


def _nest(stores: Sequence[Store], names: list[str], paths: Paths) -> _Kept:
    numbers = {name: number for number, name in enumerate(names)}
    threads: dict[int, int] = {}
    none = np.zeros(0, dtype=np.int64)
    parts: list[tuple[Any, ...]] = [(none.reshape(0, 2), none.astype(np.bool_), none, none, none)]
    for index, store in enumerate(stores):
        if store.device == CPU:
            pairs, counted = store.pairs, store.counted
            # A region that ended after `open_ns` was read is among the pairs.
            if store.open_ns is not None and not (len(pairs) and pairs[-1, 0] >= store.open_ns):
                pairs = np.concatenate((pairs, np.array([[store.open_ns, ENDLESS]], dtype=np.int64)))
                counted = np.append(counted, False)
            of_store = numbers[store.name], threads.setdefault(store.thread, len(threads)), index
            parts.append((pairs, counted, *(np.full(len(pairs), number, dtype=np.int64) for number in of_store)))
    pairs, counted, regions, of_thread, indices = (np.concatenate(of) for of in zip(*parts, strict=True))
    starts, ends = pairs[:, 0], np.maximum(pairs[:, 1], pairs[:, 0])
    rows = {"start_ns": starts, "dur_ns": ends - starts, "region": regions, "thread": of_thread}
    rows |= {"on_host": np.ones(len(starts), dtype=np.bool_), "host_start_ns": starts}
    nested = paths.nest(rows, dict.fromkeys(("start_ns", "region", "thread"), none))
    return _Kept(starts, ends, counted, nested.parents, nested.covered, nested.paths, indices)


def _exact(kept: _Kept, path_of: list[Path]) -> tuple[dict[Path, Node], dict[Path, float], dict[Path, float]]:
    # The nodes; for each the time inside counted parents; and the time that children cover.
    is_open = kept.ends == ENDLESS
    durations = np.where(is_open, 0, kept.ends - kept.starts)
    counts = kept.counted & ~is_open
    in_counted = kept.parents != ROOT
    in_counted[in_counted] = counts[kept.parents[in_counted]]
    order = np.argsort(kept.paths, kind="stable")
    ends = np.cumsum(np.bincount(kept.paths, minlength=len(path_of)))
    trends = _trends(kept, counts, durations, len(path_of))
    nodes: dict[Path, Node] = {}
    in_parent_s: dict[Path, float] = {}
    covered_ns: dict[Path, int] = defaultdict(int)
    for number, rows in enumerate(np.split(order, ends[:-1]) if path_of else ()):
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
        in_parent_s[path] = int(durations[shared].sum()) / 1e9
        covered_ns[path[:-1]] += int((durations[inside] - kept.covered[inside]).sum())
    return nodes, in_parent_s, {path: covered / 1e9 for path, covered in covered_ns.items()}


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
    nodes: dict[Path, Node], forgotten: set[str], home: dict[str, Path], whole: Mapping[tuple[str, str], Any]
) -> dict[Path, Node]:
    # Regions whose intervals are not all kept stand at their most frequent path only.
    found: dict[Path, Node] = {}
    for path, node in nodes.items():
        if node.name not in forgotten:
            found[path] = node
        elif path == home[node.name]:
            stats = whole.get((node.name, CPU))
            found[path] = node_of(path, stats, warm_up=stats.skipped if stats else 0)
    return {path: node for path, node in found.items() if all(path[:end] in found for end in range(1, len(path)))}


def _on_device(
    stores: Sequence[Store],
    kept: _Kept,
    path_of: list[Path],
    home: dict[str, Path],
    whole: Mapping[tuple[str, str], Any],
) -> tuple[dict[Path, OnDevice], bool]:
    # The n-th device time has the path of the n-th host interval if there are as many, else the most frequent path.
    durations: dict[Path, list[Int64Array]] = defaultdict(list)
    estimates: dict[Path, TimeStats] = {}
    on_host = {(store.name, store.thread): index for index, store in enumerate(stores) if store.device == CPU}
    for store in stores:
        if store.device == CPU or store.name not in home:
            continue
        if store.copied["aggregated"]:
            stats = whole.get((store.name, GPU))
            if stats is not None:
                estimates[home[store.name]] = stats
            continue
        own = (kept.stores == on_host[store.name, store.thread]) & (kept.ends != ENDLESS)
        host_paths = kept.paths[own][np.argsort(kept.ends[own], kind="stable")].tolist()
        paths = [path_of[number] for number in host_paths]
        if len(paths) != len(store.pairs):
            paths = [home[store.name]] * len(store.pairs)
        skip = store.copied["skip_first"]
        lengths = np.maximum(store.pairs[:, 1] - store.pairs[:, 0], 0)
        for path in set(paths[skip:]):
            durations[path].append(lengths[[place for place in range(skip, len(paths)) if paths[place] == path]])
    stats_at = {path: stats_of(np.concatenate(parts)) for path, parts in durations.items()} | estimates
    found = {
        path: OnDevice(stats.total, None, stats.count, stats.median, stats.p95) for path, stats in stats_at.items()
    }
    return found, bool(estimates)
