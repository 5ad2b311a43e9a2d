"""Reads the regions of a timer, while its threads go on, into plain data."""

from __future__ import annotations

import os
import socket
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import CPU, GPU, TimeType
from deep500_timing._distributed.launchers import known_rank_and_world
from deep500_timing._summary.distribution import Distribution, RecordedTimes, merge
from deep500_timing._summary.kept_tree import Store, tree_of_kept
from deep500_timing._summary.snapshot import STORED_COUNTERS, RegionTimes, Snapshot, counters_of, take_anchor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region


_ORDER = {member.name: position for position, member in enumerate(TimeType)}


def take_snapshot(recorder: Recorder, pending: dict[int, int], *, places: bool = False) -> Snapshot:
    """Read every region of a timer once, while its threads go on."""
    stores, running, waiting = [], Counter[str](), Counter[str]()
    for region in recorder._regions():
        # Read before the intervals: a region that ends in between is then among them.
        open_ns = int(region._start_ns) if region.is_open else None
        running[region.name] += open_ns is not None
        stores.append(_store(region, CPU, region._intervals, open_ns))
        if region._device_intervals is not None:
            waiting[region.name] += pending.get(id(region._device_intervals), 0)
            stores.append(_store(region, GPU, region._device_intervals))
    by_region: dict[tuple[str, str], list[Store]] = {}
    for store in stores:
        by_region.setdefault((store.name, store.device), []).append(store)
    found = []
    for name, device in sorted(by_region, key=lambda key: (_ORDER.get(key[0], len(_ORDER)), key)):
        samples = recorder._memory_at_ends.get(name) if device == CPU else None
        times = _region_times(
            name,
            device,
            by_region[name, device],
            running=running[name] if device == CPU else 0,
            pending=waiting[name] if device == GPU else 0,
            memory=None if samples is None else samples.total(),
        )
        if times is not None:
            found.append(times)
    rank, world_size = known_rank_and_world()
    snapshot = Snapshot(
        tuple(found),
        time.time(),
        socket.gethostname(),
        os.getpid(),
        rank=rank,
        world_size=world_size,
        anchor=take_anchor(recorder.now_ns),
        enabled=recorder.enabled,
    )
    if not places:
        return snapshot
    whole = {(times.name, times.device): times.stats for times in found}
    return replace(snapshot, tree=tree_of_kept(stores, whole, counters_of(snapshot), rank))


def _store(region: Region, device: str, intervals: Intervals, open_ns: int | None = None) -> Store:
    copied = intervals.copy()
    return Store(region.name, device, id(region._thread), copied, pairs_of(copied["pairs"]), open_ns)


def _region_times(name: str, device: str, stores: list[Store], **more: Any) -> RegionTimes | None:
    counters: dict[str, Any]
    times, counters = _together([store.copied for store in stores])
    stats = times.stats()
    if stats is None and not (more["running"] or more["pending"] or times.skipped or any(counters.values())):
        return None
    distribution = None if stats is None else times.distribution()
    return RegionTimes(name, device, stats, distribution=distribution, **(counters | more))


def summarize(stores: Iterable[Intervals]) -> tuple[RecordedTimes, dict[str, int]]:
    """The times of several threads without warm-up, and the sums of their counters."""
    return _together([store.copy() for store in stores])


def _together(copies: Sequence[dict[str, Any]]) -> tuple[RecordedTimes, dict[str, int]]:
    counters = {counter: sum(copied[counter] for copied in copies) for counter in STORED_COUNTERS}
    durations, skipped = [], 0
    for copied in copies:
        aggregated, skip = copied["aggregated"], copied["skip_first"]
        kept = durations_of(copied["pairs"])
        skipped += min(skip, aggregated + len(kept))
        durations.append(kept[max(skip - aggregated, 0) :])
    together = np.concatenate(durations) if durations else durations_of(())
    return RecordedTimes(together, merge(map(Distribution.of_aggregates, copies)), skipped), counters


def durations_of(parts: Iterable[Any]) -> NDArray[np.int64]:
    """The durations in ns, shape ``(n,)``, from arrays in which start and end alternate. Negative ones become 0."""
    pairs = pairs_of(parts)
    durations: NDArray[np.int64] = np.maximum(pairs[:, 1] - pairs[:, 0], 0)
    return durations


def pairs_of(parts: Iterable[Any]) -> NDArray[np.int64]:
    """Start and end in ns, shape ``(n, 2)``, from arrays in which they alternate."""
    found = [np.frombuffer(part, dtype=np.int64) for part in parts if len(part)]
    joined = found[0] if len(found) == 1 else np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    return joined.reshape(-1, 2)


def kept_intervals(stores: Iterable[Intervals]) -> NDArray[np.int64]:
    """The intervals that are kept, in the order in which they ended.

    Returns:
        Shape ``(n, 2)``: start and end in nanoseconds of the timer's host clock.
    """
    parts = []
    for store in stores:
        copied = store.copy()
        joined = pairs_of(copied["pairs"])
        if copied["keep_last"] >= 0:
            joined = joined[max(len(joined) - copied["keep_last"], 0) :]
        parts.append(joined)
    if len(parts) == 1:
        return parts[0] if parts[0].flags.writeable else parts[0].copy()
    merged = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    return merged[np.argsort(merged[:, 1], kind="stable")]


@dataclass(frozen=True)
class DeviceUse:
    """The result of ``Timer.gpu_busy``; None for unknown values.

    Attributes:
        share: Share of the wall time in which at least one timed region ran on a device, 0 to 1.
        busy_s: The same in seconds; overlapping regions count once.
        wall_s: From the start of the first region on the device to the end of the last, in seconds.
        mean_lead_s: Mean time from the start of a region on the host to its start on the device, in seconds. Near 0 the
            device waits for the host.
        max_lead_s: The largest, in seconds.
        uncertainty_s: Uncertainty (±) of device times on the host clock, in seconds.
        regions: Number of kept intervals used.
    """

    share: float | None
    busy_s: float
    wall_s: float
    mean_lead_s: float | None
    max_lead_s: float | None
    uncertainty_s: float
    regions: int


def device_use(stores: Sequence[Intervals], leads: Sequence[tuple[int, int, int]], uncertainty_ns: int) -> DeviceUse:
    """Compute it from the kept device intervals."""
    pairs = kept_intervals(stores)
    starts, ends = pairs[np.argsort(pairs[:, 0], kind="stable")].T
    reached = np.maximum.accumulate(ends)
    covered = np.maximum(ends - np.maximum(starts, np.concatenate([starts[:1], reached[:-1]])), 0)
    busy_ns, wall_ns = int(covered.sum()), int(reached[-1] - starts[0]) if len(pairs) else 0
    count = sum(count for count, _, _ in leads)
    return DeviceUse(
        share=busy_ns / wall_ns if wall_ns else None,
        busy_s=busy_ns / 1e9,
        wall_s=wall_ns / 1e9,
        mean_lead_s=sum(total for _, total, _ in leads) / count / 1e9 if count else None,
        max_lead_s=max(most for _, _, most in leads) / 1e9 if count else None,
        uncertainty_s=uncertainty_ns / 1e9,
        regions=len(pairs),
    )
