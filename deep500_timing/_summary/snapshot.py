"""The only thing that leaves a timer: its times at one moment, as plain frozen data."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._ground.time_type import TimeType
from deep500_timing._ranks.place import known_rank_and_world
from deep500_timing._summary.anchor import ClockAnchor, take_anchor
from deep500_timing._summary.stats import Summary, TimeStats, durations_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from deep500_timing._ground.memory_usage import RegionMemory
    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region

CPU = "CPU"
GPU = "GPU"
_ORDER = {member.name: position for position, member in enumerate(TimeType)}


def _counter(note: str, *, stored: bool = True) -> int:
    # A field of RegionTimes that counts what is not in the statistics: what a table's note says of it, and whether
    # the intervals count it themselves.
    counter: int = field(default=0, metadata={"note": note, "stored": stored})
    return counter


@dataclass(frozen=True, slots=True)
class RegionTimes:
    """One region on one kind of processor, all threads together."""

    name: str
    """The key's name: ``"BATCH"``, or the user's own string."""
    device: str
    """``"CPU"`` for times on the host clock, ``"GPU"`` for times between events on a device."""
    stats: TimeStats | None
    """Statistics in seconds, or None while no time is recorded."""
    running: int = _counter("open now; not included", stored=False)
    """Threads that have the region open now; their time so far is not in the statistics."""
    pending: int = _counter("ended, but not reached by the device yet; not included", stored=False)
    """Ended regions whose events the device has not reached yet."""
    failed: int = _counter("ended by an exception, or not to be measured; not included")
    """Regions ended by an exception, or whose device time could not be had; not in the statistics."""
    discarded: int = _counter("forgotten while open; not included")
    """Regions that were forgotten while open."""
    captured: int = _counter("in a graph being captured, where nothing can be timed; not included")
    """Device times not taken because the stream was being captured into a graph."""
    memory: RegionMemory | None = None
    """Memory of host and device at the region's ends, in its CPU times; None unless it was asked for."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: the fields under their names, ``stats`` nested, None where it is unknown."""
        return asdict(self)


COUNTERS: dict[str, str] = {item.name: item.metadata["note"] for item in fields(RegionTimes) if "note" in item.metadata}
"""The fields of :class:`RegionTimes` that count, with what a table says of each. Columns and notes are made from it."""
_STORED = tuple(item.name for item in fields(RegionTimes) if item.metadata.get("stored"))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The times of a timer at one moment. Plain data: it can be pickled, compared and sent to another rank."""

    regions: tuple[RegionTimes, ...]
    """Every region that was used, in the order of ``TimeType`` and then of names; CPU before GPU."""
    unix_time_s: float
    """When the snapshot was taken, in seconds since 1970."""
    host: str
    """Name of the machine."""
    pid: int
    """The process."""
    rank: int | None = None
    """Which process of its job this is, as torch.distributed or the launcher tells; None if neither does."""
    world_size: int | None = None
    """How many processes the job has; None if nothing tells."""
    anchor: ClockAnchor | None = None
    """The timer's host clock and Unix time at one moment, by which intervals can be placed in time; None in what was
    written by an earlier version."""

    def __iter__(self) -> Iterator[RegionTimes]:
        """Go through the regions."""
        return iter(self.regions)

    def get(self, key: TimeType | str, device: str = CPU) -> RegionTimes | None:
        """The times of one region, or None if it was not used on that device."""
        name = key.name if isinstance(key, TimeType) else key
        for region in self.regions:
            if (region.name, region.device) == (name, device):
                return region
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


def take_snapshot(recorder: Recorder, pending: dict[int, int]) -> Snapshot:
    """Read every region of a timer, while its threads go on.

    Args:
        recorder: The timer.
        pending: For the ``id`` of a region's device intervals, how many are on their way.
    """
    by_name: dict[str, list[Region]] = {}
    for region in recorder._regions():
        by_name.setdefault(region.name, []).append(region)
    regions = []
    for name in sorted(by_name, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
        threads = by_name[name]
        running = sum(region.is_open for region in threads)
        found = _read(name, CPU, [region.intervals for region in threads], running=running, pending=0)
        if found is not None:
            regions.append(replace(found, memory=recorder._memory_at_ends.get(name)))
        on_device = [region.gpu_intervals for region in threads if region.gpu_intervals is not None]
        waiting = sum(pending.get(id(intervals), 0) for intervals in on_device)
        found = _read(name, GPU, on_device, running=0, pending=waiting)
        if found is not None:
            regions.append(found)
    rank, world_size = known_rank_and_world()
    return Snapshot(
        tuple(regions),
        time.time(),
        socket.gethostname(),
        os.getpid(),
        rank=rank,
        world_size=world_size,
        anchor=take_anchor(recorder.now_ns),
    )


def _read(name: str, device: str, stores: Iterable[Intervals], *, running: int, pending: int) -> RegionTimes | None:
    summary, counters = summarize(stores)
    times = RegionTimes(
        name,
        device,
        summary.stats(),
        running=running,
        pending=pending,
        memory=None,
        **counters,
    )
    used = times.stats is not None or running or pending or summary.skipped or any(counters.values())
    return times if used else None


def summarize(stores: Iterable[Intervals]) -> tuple[Summary, dict[str, int]]:
    """Gather the intervals of several threads, warm-up left out, and add up their counters."""
    from deep500_timing._summary.stats import Histogram

    summary = Summary()
    counters = dict.fromkeys(_STORED, 0)
    for store in stores:
        copied = store.copy()
        for counter in counters:
            counters[counter] += copied[counter]
        folded, skip = copied["folded"], copied["skip_first"]
        durations = np.maximum(durations_of(copied["pairs"]), 0)
        still_to_skip = max(skip - folded, 0)
        summary.skipped += min(skip, folded + len(durations))
        summary.add_durations(durations[still_to_skip:])
        if folded > skip:
            summary.add_aggregates(
                folded - skip,
                copied["total_ns"],
                copied["min_ns"],
                copied["max_ns"],
                copied["mean_ns"],
                copied["m2"],
                Histogram(np.frombuffer(copied["bins"], dtype=np.int64)),
            )
    return summary, counters


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
