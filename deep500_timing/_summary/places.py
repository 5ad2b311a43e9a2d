"""Where the regions of one process lie: what is inside what, from the intervals that a timer keeps.

Read when a table is drawn; recording costs what it did. What a timer with ``keep_last`` has forgotten is put where the
newest intervals of its region lie.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._summary.nesting import ENDLESS, ROOT, Paths, covered_by_siblings, order_for_nesting, parents_of
from deep500_timing._summary.place import Place
from deep500_timing._summary.snapshot import CPU, GPU
from deep500_timing._summary.stats import stats_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deep500_timing._recording.recorder import Recorder, Region
    from deep500_timing._summary.snapshot import RegionTimes
    from deep500_timing._summary.stats import TimeStats

    Int64Array = NDArray[np.int64]
    BoolArray = NDArray[np.bool_]

STRETCHES = 15
"""Into how many stretches of equal length a run is divided for :attr:`Place.trend`."""


@dataclass
class _Kept:
    """What is kept of a timer on the host; each array has an entry for each interval."""

    starts: Int64Array
    ends: Int64Array
    regions: Int64Array
    counted: BoolArray
    parents: Int64Array
    covered: Int64Array
    """How much of each lies within its siblings before it."""
    paths: Int64Array
    stores: Int64Array
    """Which region of which thread it is of."""


def places_of(recorder: Recorder, times: Sequence[RegionTimes]) -> tuple[Place, ...]:
    """Find out where each region lies, while the timer's threads go on.

    Args:
        recorder: The timer.
        times: The statistics of its regions, which places of forgotten intervals are given.
    """
    regions = recorder._regions()
    names = list(dict.fromkeys(region.name for region in regions))
    paths = Paths()
    kept, forgotten = _read(regions, names, paths)
    whole = {(region.name, region.device): region.stats for region in times}

    def names_of(path: int) -> tuple[str, ...]:
        found: list[str] = []
        while path != ROOT:
            found.append(names[paths.regions[path]])
            path = paths.parents[path]
        return tuple(reversed(found))

    exact = _on_host(kept, paths, names_of)
    mostly = _mostly(kept, paths)
    places = _with_whole_runs(exact, {names[number] for number in forgotten}, names, mostly, names_of, whole)
    return (*places, *_on_device(regions, names, kept, mostly, names_of, whole))


def _read(regions: list[Region], names: list[str], paths: Paths) -> tuple[_Kept, set[int]]:
    by_thread: dict[int, list[tuple[int, Int64Array, BoolArray, int]]] = defaultdict(list)
    forgotten: set[int] = set()
    numbers = {name: number for number, name in enumerate(names)}
    for store, region in enumerate(regions):
        # Whether it is open is asked first: what ends meanwhile is then among the intervals as well.
        open_ns = int(region._start_ns) if region.is_open else None
        copied = region._intervals.copy()
        number = numbers[region.name]
        if copied["aggregated"]:
            forgotten.add(number)
        parts = [np.frombuffer(part, dtype=np.int64).reshape(-1, 2) for part in copied["pairs"] if len(part)]
        pairs = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
        counted = np.arange(len(pairs)) >= copied["skip_first"] - copied["aggregated"]
        if open_ns is not None and not (len(pairs) and pairs[-1, 0] >= open_ns):
            pairs = np.concatenate((pairs, np.array([[open_ns, ENDLESS]], dtype=np.int64)))
            counted = np.append(counted, False)
        by_thread[id(region._thread)].append((number, pairs, counted, store))
    columns: dict[str, list[Any]] = defaultdict(list)
    first = 0
    for of_thread in by_thread.values():
        pairs = np.concatenate([pairs for _, pairs, _, _ in of_thread])
        numbers_of = np.concatenate([np.full(len(pairs), number) for number, pairs, _, _ in of_thread])
        counted = np.concatenate([counted for _, _, counted, _ in of_thread])
        stores = np.concatenate([np.full(len(pairs), store) for _, pairs, _, store in of_thread])
        starts, ends = pairs[:, 0], np.maximum(pairs[:, 1], pairs[:, 0])
        order = order_for_nesting(starts, ends, numbers_of)
        starts, ends, numbers_of = starts[order], ends[order], numbers_of[order]
        parents, overlaps = parents_of(starts, ends)
        columns["paths"].append(paths.of_thread(parents, numbers_of))
        columns["parents"].append(np.where(parents == ROOT, ROOT, parents + first))
        covered = covered_by_siblings(starts, ends, parents, overlaps)
        for name, column in (("starts", starts), ("ends", ends), ("regions", numbers_of), ("covered", covered)):
            columns[name].append(column)
        columns["counted"].append(counted[order])
        columns["stores"].append(stores[order])
        first += len(order)
    nothing = np.zeros(0, dtype=np.int64)
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    kept = _Kept(
        **{
            name: joined.get(name, nothing.astype(np.bool_) if name == "counted" else nothing)
            for name in _Kept.__dataclass_fields__
        }
    )
    return kept, forgotten


def _on_host(kept: _Kept, paths: Paths, names_of: Any) -> list[Place]:
    count = len(paths.parents)
    is_open = kept.ends == ENDLESS
    durations = np.where(is_open, 0, kept.ends - kept.starts)
    counts = kept.counted & ~is_open

    def total(weights: Any, where: BoolArray, by: Int64Array = kept.paths) -> Int64Array:
        # Whole nanoseconds, in halves that a sum of floats holds exactly.
        high, low = np.divmod(np.asarray(weights)[where], 1 << 26)
        sums = (np.bincount(by[where], part, count) for part in (high, low))
        high_sum, low_sum = (np.rint(part).astype(np.int64) for part in sums)
        return (high_sum << 26) + low_sum

    has_parent = kept.parents != ROOT
    in_counted = has_parent.copy()
    in_counted[has_parent] = counts[kept.parents[has_parent]]
    paths_of_parents = np.full(len(kept.paths), ROOT, dtype=np.int64)
    paths_of_parents[has_parent] = kept.paths[kept.parents[has_parent]]
    totals = total(durations, counts)
    shared = total(durations, counts & in_counted)
    overlapping = total(kept.covered, counts & in_counted)
    inside = total(durations - kept.covered, in_counted & ~is_open, paths_of_parents)
    has_children = {parent for parent in paths.parents if parent != ROOT}
    trends = _trends(kept, counts, durations, count)
    rows_of = _rows_by(kept.paths, count)
    places = []
    for path in range(count):
        rows = rows_of[path]
        own = rows[counts[rows]]
        warm_up = rows[~counts[rows] & ~is_open[rows]]
        ended = rows[~is_open[rows]]
        parent = paths.parents[path]
        whole = 0 if parent == ROOT else int(totals[parent])
        # What a region that is open now holds is not to be compared with those that have ended.
        places.append(
            Place(
                names_of(path),
                CPU,
                stats_of(durations[own]) if len(own) else None,
                share=int(shared[path]) / whole if whole and len(own) else None,
                rest_s=int(totals[path] - inside[path]) / 1e9 if path in has_children and len(own) else None,
                overlap_s=int(overlapping[path]) / 1e9,
                first_s=int(durations[ended[0]]) / 1e9 if len(ended) else None,
                warm_up=len(warm_up),
                warm_up_s=int(durations[warm_up].sum()) / 1e9 if len(warm_up) else None,
                trend=trends[path],
            )
        )
    return places


def _rows_by(paths: Int64Array, count: int) -> list[Int64Array]:
    # The rows of each path, in the order of time.
    order = np.argsort(paths, kind="stable")
    ends = np.cumsum(np.bincount(paths, minlength=count)) if len(paths) else np.zeros(count, dtype=np.int64)
    return [np.sort(part) for part in np.split(order, ends[:-1])] if count else []


def _trends(kept: _Kept, counts: BoolArray, durations: Int64Array, paths: int) -> list[tuple[float | None, ...]]:
    if not counts.any():
        return [()] * paths
    first = int(kept.starts[counts].min())
    width = max(-(-(int(kept.ends[counts].max()) - first + 1) // STRETCHES), 1)
    keys = kept.paths[counts] * STRETCHES + (kept.starts[counts] - first) // width
    sums = np.bincount(keys, durations[counts], paths * STRETCHES)
    numbers = np.bincount(keys, minlength=paths * STRETCHES)
    means = np.divide(sums, numbers, out=np.full(len(sums), np.nan), where=numbers > 0) / 1e9
    rows = means.reshape(paths, STRETCHES).tolist()
    return [tuple(None if mean != mean else mean for mean in row) for row in rows]


def _mostly(kept: _Kept, paths: Paths) -> dict[int, int]:
    # The path where each region mostly lies, by its number.
    numbers = np.bincount(kept.paths, minlength=len(paths.parents))
    mostly: dict[int, int] = {}
    for path in np.argsort(numbers, kind="stable").tolist():
        mostly[paths.regions[path]] = path
    return mostly


def _with_whole_runs(
    exact: list[Place],
    forgotten: set[str],
    names: list[str],
    mostly: dict[int, int],
    names_of: Any,
    whole: dict[tuple[str, str], TimeStats | None],
) -> list[Place]:
    # Regions of which not every interval is kept stand where they mostly are, with the times of the whole run.
    if not forgotten:
        return exact
    home = {names[number]: names_of(path) for number, path in mostly.items()}
    found: dict[tuple[str, ...], Place] = {}
    for place in exact:
        name = place.path[-1]
        if name not in forgotten:
            found[place.path] = place
        elif place.path == home[name]:
            stats = whole.get((name, CPU))
            found[place.path] = Place(place.path, CPU, stats, warm_up=stats.skipped if stats else 0, is_estimate=True)
    # A place whose parent stood elsewhere for the most part follows it no further than to where something stands.
    found = {path: place for path, place in found.items() if all(path[:end] in found for end in range(1, len(path)))}
    inside: dict[tuple[str, ...], float] = defaultdict(float)
    for path, place in found.items():
        if place.stats is not None:
            inside[path[:-1]] += place.stats.total - place.overlap_s
    places = []
    for path, place in found.items():
        above = found.get(path[:-1])
        total = place.stats.total if place.stats is not None else None
        share, rest_s = place.share, place.rest_s
        if above is not None and (above.is_estimate or place.is_estimate):
            share = None
            if above.stats is not None and total is not None and total <= above.stats.total:
                share = total / above.stats.total
        children = [child for child in found.values() if child.path[:-1] == path]
        if children and total is not None and (place.is_estimate or any(child.is_estimate for child in children)):
            left = total - inside[path]
            rest_s = left if left >= 0 else None
        places.append(
            Place(
                path,
                CPU,
                place.stats,
                share=share,
                rest_s=rest_s,
                overlap_s=place.overlap_s,
                first_s=place.first_s,
                warm_up=place.warm_up,
                warm_up_s=place.warm_up_s,
                trend=place.trend,
                is_estimate=place.is_estimate,
            )
        )
    return places


def _on_device(
    regions: list[Region],
    names: list[str],
    kept: _Kept,
    mostly: dict[int, int],
    names_of: Any,
    whole: dict[tuple[str, str], TimeStats | None],
) -> list[Place]:
    # A device's time has the place of its region on the host: by its number, where each of them has one, and else the
    # place where the region mostly is.
    numbers = {name: number for number, name in enumerate(names)}
    durations: dict[tuple[str, ...], list[Int64Array]] = defaultdict(list)
    estimates: dict[tuple[str, ...], TimeStats | None] = {}
    for store, region in enumerate(regions):
        if region._device_intervals is None:
            continue
        copied = region._device_intervals.copy()
        home = mostly.get(numbers[region.name])
        if home is None:
            continue
        if copied["aggregated"]:
            estimates[names_of(home)] = whole.get((region.name, GPU))
            continue
        parts = [np.frombuffer(part, dtype=np.int64).reshape(-1, 2) for part in copied["pairs"] if len(part)]
        if not parts:
            continue
        pairs = np.concatenate(parts)
        own = kept.stores == store
        on_host = kept.paths[own][np.argsort(kept.ends[own], kind="stable")]
        paths = on_host if len(on_host) == len(pairs) else np.full(len(pairs), home)
        lengths = np.maximum(pairs[:, 1] - pairs[:, 0], 0)[copied["skip_first"] :]
        for path in set(paths.tolist()):
            durations[names_of(path)].append(lengths[paths[copied["skip_first"] :] == path])
    stats = {path: stats_of(joined) for path, parts in durations.items() if len(joined := np.concatenate(parts))}
    stats |= {path: found for path, found in estimates.items() if found is not None}
    return [
        Place(
            path,
            GPU,
            of_path,
            share=of_path.total / stats[path[:-1]].total if path[:-1] in stats and stats[path[:-1]].total else None,
            is_estimate=path in estimates,
        )
        for path, of_path in stats.items()
    ]
