"""The times of a timer at one moment, as plain frozen data."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from operator import sub
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU, TimeType
from deep500_timing._summary.stats import Later, TimeStats

if TYPE_CHECKING:
    from deep500_timing._base.memory_usage import RegionMemory
    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.tree import Tree


def _counter(note: str, *, stored: bool = True) -> int:
    # A field of RegionTimes for intervals without a time: its note in a table, and whether the stores count it.
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
    """Ended regions with events that the device has not reached yet."""
    failed: int = _counter("ended by an exception, or not to be measured; not included")
    """Regions that an exception ended, or without a device time; not in the statistics."""
    discarded: int = _counter("forgotten while open; not included")
    captured: int = _counter("in a graph being captured, where nothing can be timed; not included")
    """Regions without a device time because a graph was being captured."""
    recomputed: int = _counter("run a second time, as by an activation checkpoint; not included")
    """Regions that an activation checkpoint ran again in the backward pass."""
    memory: RegionMemory | None = None
    """Memory of host and device at the region's ends; None unless requested, and on the GPU."""
    distribution: Distribution | None = None
    """The same times as a distribution, which merges and subtracts; None while no time is recorded, and in data of an
    earlier version."""

    def since(self, earlier: RegionTimes | None) -> RegionTimes | None:
        """The times after an earlier moment, see :meth:`Snapshot.since`; None if there are none."""
        if earlier is None:
            return self
        counters = tuple(map(sub, self._counted(), earlier._counted()))
        new, skipped = self.distribution, self._skipped() - earlier._skipped()
        if new is not None and earlier.distribution is not None:
            new = new.since(earlier.distribution)
        if skipped < 0 or min(counters) < 0:
            # Reset in between.
            new, skipped, counters = self.distribution, self._skipped(), self._counted()
        stats = self.stats if new is self.distribution or new is None else new.stats(skipped=skipped)
        if stats is None and not (self.running or self.pending or any(counters)):
            return None
        new = None if stats is None else new
        counted = dict(zip(STORED_COUNTERS, counters, strict=True))
        current = self.name, self.device, stats, self.running, self.pending
        return RegionTimes(*current, memory=self.memory, distribution=new, **counted)

    def _counted(self) -> tuple[int, ...]:
        return self.failed, self.discarded, self.captured, self.recomputed

    def _skipped(self) -> int:
        return self.stats.skipped if self.stats is not None else 0

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: the fields under their names, ``stats`` nested, None where it is unknown."""
        values = asdict(self)
        if self.distribution is not None:
            values["distribution"] = self.distribution.to_dict()
        return values


COUNTERS: dict[str, str] = {item.name: item.metadata["note"] for item in fields(RegionTimes) if "note" in item.metadata}
"""The counting fields of :class:`RegionTimes` with their notes in tables."""
STORED_COUNTERS = tuple(item.name for item in fields(RegionTimes) if item.metadata.get("stored"))
"""Counters of the stores. They only grow; the others show the current state."""


@dataclass(frozen=True, slots=True)
class Snapshot(Later):
    """The times of a timer at one moment. It can be pickled, compared and sent to another rank."""

    regions: tuple[RegionTimes, ...]
    """Every region that was used, in the order of ``TimeType`` and then of names; CPU before GPU."""
    unix_time_s: float
    """When the snapshot was taken, in seconds since 1970."""
    host: str
    pid: int
    rank: int | None = None
    """Rank of the process, from torch.distributed or the launcher; None if unknown."""
    world_size: int | None = None
    """Number of processes of the job; None if unknown."""
    anchor: ClockAnchor | None = None
    """The timer's host clock and Unix time at one moment; None in data of an earlier version."""
    since_unix_time_s: float | None = None
    """Time of the earlier snapshot if this is a difference (:meth:`since`), else None."""
    tree: Tree | None = None
    """The tree of regions; None unless :meth:`Timer.snapshot` was asked for it."""
    enabled: bool = True
    """Whether the timer recorded when the snapshot was taken."""

    def __iter__(self) -> Iterator[RegionTimes]:
        return iter(self.regions)

    def get(self, key: TimeType | str, device: str = CPU) -> RegionTimes | None:
        """The times of one region, or None if it was not used on that device."""
        name = key.name if isinstance(key, TimeType) else key
        for region in self.regions:
            if (region.name, region.device) == (name, device):
                return region
        return None

    def since(self, earlier: Snapshot | None) -> Snapshot:
        """The times after an earlier snapshot of the same timer, as a snapshot.

        Counts, totals, means, histograms and the counters that only grow (failed, discarded, captured, warm-up left
        out) are exact differences. Median and percentiles are from the histogram, within 1 % (``quantile_error``); the
        shortest and longest time are exact where they are new, else within 1 %. Running and pending regions and memory
        are those of this snapshot. A region without new times is left out unless it is running or pending; then its
        ``stats`` are None.

        A region that was reset in between keeps all its times. Another timer's snapshot is not detected.

        Args:
            earlier: The snapshot to subtract; None gives this one unchanged, for the first of a series.
        """
        if earlier is None:
            return self
        before = {(region.name, region.device): region for region in earlier}
        regions = (region.since(before.get((region.name, region.device))) for region in self)
        return replace(
            self,
            regions=tuple(region for region in regions if region is not None),
            since_unix_time_s=earlier.unix_time_s,
            tree=None,
        )

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, without ``tree`` and ``enabled``, which serve tables."""
        data = asdict(replace(self, regions=(), tree=None))
        del data["tree"], data["enabled"]
        return {**data, "regions": tuple(region.to_dict() for region in self.regions)}


def counters_of(snapshot: Snapshot) -> dict[tuple[str, str], dict[str, int]]:
    """For region and device the counters that are not zero."""
    return {
        (region.name, region.device): counts
        for region in snapshot
        if (counts := {name: getattr(region, name) for name in COUNTERS if getattr(region, name)})
    }


_TRIES = 32


@dataclass(frozen=True, slots=True)
class ClockAnchor:
    """One moment on two clocks. The Unix time of ``t`` on the host's clock is ``unix_ns + t - host_ns``."""

    host_ns: int
    """Time on the timer's host clock, in nanoseconds."""
    unix_ns: int
    """In nanoseconds since 1970."""
    width_ns: int
    """Time between the two readings of the host clock around the reading of Unix time."""


def take_anchor(now_ns: Callable[[], int]) -> ClockAnchor:
    """Read both clocks 32 times and keep the narrowest reading.

    Unix time may be stepped and slewed, so an anchor is exact only at its own time. Take new ones in a long run.
    """
    readings = ((now_ns(), time.time_ns(), now_ns()) for _ in range(_TRIES))
    before_ns, unix_ns, after_ns = min(readings, key=lambda reading: reading[2] - reading[0])
    width_ns = after_ns - before_ns
    return ClockAnchor(before_ns + width_ns // 2, unix_ns, width_ns)
