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
from deep500_timing._summary.histogram import Histogram
from deep500_timing._summary.snapshot import CPU, GPU, STORED_COUNTERS, RegionTimes, Snapshot
from deep500_timing._summary.summary import Summary, durations_of, of_few

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region
    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.stats import TimeStats

_ORDER = {member.name: position for position, member in enumerate(TimeType)}
_FEW = 40
"""Times up to which the arrays of numpy cost more than they save."""


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
    copies = [store.copy() for store in stores]
    counters = _counters_of(copies)
    stats, distribution, skipped = _statistics_of(copies)
    if stats is None and not (running or pending or skipped or any(counters.values())):
        return None
    return RegionTimes(
        name,
        device,
        stats,
        running=running,
        pending=pending,
        memory=memory,
        distribution=None if stats is None else distribution,
        **counters,
    )


def read_stats(stores: Iterable[Intervals]) -> tuple[TimeStats | None, int]:
    """The statistics of several threads' intervals, those that a snapshot gives; and how many were left out as warm-up.

    The statistics are None where there is no other time.
    """
    copies = [store.copy() for store in stores]
    few = _few_durations(copies)
    if few is not None:
        durations, skipped = few
        return of_few(durations, skipped=skipped)[0], skipped
    summary = _summary_of(copies)
    return summary.stats(), summary.skipped


def _statistics_of(copies: list[dict[str, Any]]) -> tuple[TimeStats | None, Distribution, int]:
    few = _few_durations(copies)
    if few is not None:
        durations, skipped = few
        return *of_few(durations, skipped=skipped), skipped
    summary = _summary_of(copies)
    return *summary.stats_and_distribution(), summary.skipped


def summarize(stores: Iterable[Intervals]) -> tuple[Summary, dict[str, int]]:
    """Gather the intervals of several threads, warm-up left out, and add up their counters."""
    copies = [store.copy() for store in stores]
    return _summary_of(copies), _counters_of(copies)


def _counters_of(copies: list[dict[str, Any]]) -> dict[str, int]:
    if len(copies) == 1:
        return {counter: copies[0][counter] for counter in STORED_COUNTERS}
    return {counter: sum(copied[counter] for copied in copies) for counter in STORED_COUNTERS}


def _few_durations(copies: list[dict[str, Any]]) -> tuple[list[int], int] | None:
    # The durations in ns without warm-up, and how many are warm-up, if they are few and all of them are kept.
    durations: list[int] = []
    skipped = number = 0
    for copied in copies:
        number += sum(map(len, copied["pairs"])) // 2
        if copied["aggregated"] or number > _FEW:
            return None
        own = [
            max(end - start, 0) for part in copied["pairs"] for start, end in zip(part[::2], part[1::2], strict=True)
        ]
        skipped += min(copied["skip_first"], len(own))
        durations += own[copied["skip_first"] :]
    return durations, skipped


def _summary_of(copies: list[dict[str, Any]]) -> Summary:
    summary = Summary()
    for copied in copies:
        aggregated, skip = copied["aggregated"], copied["skip_first"]
        durations = np.maximum(durations_of(copied["pairs"]), 0)
        summary.skipped += min(skip, aggregated + len(durations))
        summary.add_durations(durations[max(skip - aggregated, 0) :])
        if aggregated > skip:
            summary.add_aggregates(
                aggregated - skip,
                copied["total_ns"],
                copied["min_ns"],
                copied["max_ns"],
                copied["mean_ns"],
                copied["m2"],
                Histogram(np.frombuffer(copied["bins"], dtype=np.int64)),
            )
    return summary


def kept_intervals(stores: Iterable[Intervals]) -> NDArray[np.int64]:
    """The intervals that are kept, in the order in which they ended.

    Returns:
        Shape ``(n, 2)``: start and end in nanoseconds of the timer's host clock.
    """
    parts = []
    for store in stores:
        copied = store.copy()
        pairs = [np.frombuffer(part, dtype=np.int64).reshape(-1, 2) for part in copied["pairs"] if len(part)]
        joined = np.concatenate(pairs) if pairs else np.zeros((0, 2), dtype=np.int64)
        if copied["keep_last"] >= 0:
            joined = joined[max(len(joined) - copied["keep_last"], 0) :]
        parts.append(joined)
    if len(parts) == 1:
        return parts[0]
    merged = np.concatenate(parts) if parts else np.zeros((0, 2), dtype=np.int64)
    return merged[np.argsort(merged[:, 1], kind="stable")]
