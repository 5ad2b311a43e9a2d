"""Reads the regions of a timer, while its threads go on, into plain data."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.time_type import TimeType
from deep500_timing._distributed.identity import known_rank_and_world
from deep500_timing._recording.left_open import end_what_is_over
from deep500_timing._summary.anchor import take_anchor
from deep500_timing._summary.distribution import Distribution, RecordedTimes, merge
from deep500_timing._summary.snapshot import CPU, GPU, STORED_COUNTERS, RegionTimes, Snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region

_ORDER = {member.name: position for position, member in enumerate(TimeType)}


def take_snapshot(recorder: Recorder, pending: dict[int, int], *, places: bool = False) -> Snapshot:
    """Read every region of a timer, while its threads go on.

    Args:
        recorder: The timer.
        pending: For the ``id`` of a region's device intervals, how many are on their way.
        places: Find out where the regions lie, from every interval that is kept.
    """
    end_what_is_over(recorder)
    by_name: dict[str, list[Region]] = {}
    for region in recorder._regions():
        by_name.setdefault(region.name, []).append(region)
    regions = []
    for name in sorted(by_name, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        threads = by_name[name]
        running = sum(region.is_open for region in threads)
        samples = recorder._memory_at_ends.get(name)
        memory = None if samples is None else samples.total()
        found = _read(name, CPU, [region._intervals for region in threads], running=running, memory=memory)
        if found is not None:
            regions.append(found)
        on_device = [region._device_intervals for region in threads if region._device_intervals is not None]
        if on_device:
            waiting = sum(pending.get(id(intervals), 0) for intervals in on_device)
            found = _read(name, GPU, on_device, pending=waiting)
            if found is not None:
                regions.append(found)
    rank, world_size = known_rank_and_world()
    if places:
        from deep500_timing._summary.places import places_of
    return Snapshot(
        tuple(regions),
        time.time(),
        socket.gethostname(),
        os.getpid(),
        rank=rank,
        world_size=world_size,
        anchor=take_anchor(recorder.now_ns),
        places=places_of(recorder, regions) if places else None,
        enabled=recorder.enabled,
    )


def _read(
    name: str, device: str, stores: Iterable[Intervals], *, running: int = 0, pending: int = 0, memory: Any = None
) -> RegionTimes | None:
    times, counters = summarize(stores)
    stats = times.stats()
    if stats is None and not (running or pending or times.skipped or any(counters.values())):
        return None
    return RegionTimes(
        name,
        device,
        stats,
        running=running,
        pending=pending,
        memory=memory,
        distribution=None if stats is None else times.distribution(),
        **counters,
    )


def summarize(stores: Iterable[Intervals]) -> tuple[RecordedTimes, dict[str, int]]:
    """The times of several threads without warm-up, and the sums of their counters."""
    copies = [store.copy() for store in stores]
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
        return parts[0]
    merged = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    return merged[np.argsort(merged[:, 1], kind="stable")]
