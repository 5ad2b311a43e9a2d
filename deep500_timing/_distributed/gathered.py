"""The combined snapshots of ranks, as plain frozen data."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import CPU, TimeType
from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.distribution import EMPTY, HISTOGRAM_ERROR, Distribution, dense, merge
from deep500_timing._summary.snapshot import COUNTERS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from deep500_timing._summary.snapshot import RegionTimes, Snapshot
    from deep500_timing._summary.stats import TimeStats


VERSION = 2
LIMIT_BYTES = 8000
"""The size of a message of up to :data:`LIMIT_REGIONS` regions; one of more takes its share more."""
LIMIT_REGIONS = 30
COARSEST = 6
"""At this level a power of two is one bin."""


def bin_error(level: int) -> float:
    """The relative error of a quantile that is read from bins of a level.

    A coarse bin's times are taken to lie in the fine bin above its middle: half a coarse and half a fine bin from
    where they may be, and a power of two has 64 fine ones.
    """
    return ((1 << level) + 1) / 128 if level else HISTOGRAM_ERROR


def pack_snapshot(snapshot: Snapshot, *, limit_bytes: int | None = None) -> bytes:
    """What another rank merges with its own snapshot: no memory, and of the percentiles the 50th and 95th."""
    regions = [_fields(region) for region in snapshot]
    if limit_bytes is None:
        limit_bytes = LIMIT_BYTES * max(len(regions), LIMIT_REGIONS) // LIMIT_REGIONS
    message = b""
    for level in range(COARSEST + 1):
        found = [fields | _bins(region, level) for fields, region in zip(regions, snapshot, strict=True)]
        plain = {
            "version": VERSION, "host": snapshot.host, "unix": snapshot.unix_time_s, "level": level, "regions": found,
        }  # fmt: skip
        message = zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 6)
        if len(message) <= limit_bytes:
            break
    return message


def _fields(region: RegionTimes) -> dict[str, Any]:
    found: dict[str, Any] = {"name": region.name, "device": region.device}
    found["counters"] = {name: getattr(region, name) for name in COUNTERS if getattr(region, name)}
    own, stats = region.distribution, region.stats
    if own is not None and stats is not None and own.count:
        found["moments"] = [own.count, own.total_ns, own.min_ns, own.max_ns, own.m2_ns2]
        found["each"] = [stats.median, stats.p95, stats.skipped]
    return found


def _bins(region: RegionTimes, level: int) -> dict[str, Any]:
    if region.distribution is None:
        return {}
    bins, counts = region.distribution.used_bins()
    coarse, place = np.unique(bins >> level, return_inverse=True)
    together = np.bincount(place, weights=counts, minlength=len(coarse)).astype(np.int64)
    return {"gaps": np.diff(coarse, prepend=0).tolist(), "counts": together.tolist()}


def unpack_snapshot(message: bytes) -> dict[str, Any]:
    """The inverse of :func:`pack_snapshot`, with the bins of each region at the finest level."""
    try:
        plain: dict[str, Any] = json.loads(zlib.decompress(message))
        if plain["version"] != VERSION:
            raise ValueError(
                f"it is of version {plain['version']}, this reads {VERSION}; every rank must run the same "
                "deep500-timing"
            )
        level = int(plain["level"])
        for region in plain["regions"]:
            # The fine bin in the middle of each coarser one. Lists: of few bins, arrays would take ten times as long.
            half = (1 << level) >> 1
            bins = [(bin_ << level) + half for bin_ in accumulate(region.pop("gaps", ()))]
            region["bins"], counts = bins, region.setdefault("counts", [])
            if len(bins) != len(counts) or (bins and not 0 <= bins[0] <= bins[-1] < BIN_COUNT):
                raise ValueError("its bins are not where bins can be")
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"Reading a rank's snapshot: {error}.") from error
    return plain


OF_EACH_RANK = ("mean", "median", "p95")
"""Values of each rank: its own mean, median and 95th percentile of a region, in seconds."""


@dataclass(frozen=True, slots=True)
class OverRanks:
    """How one number differs from rank to rank, in seconds. Of ranks with the same number the smallest is named."""

    ranks: int
    min: float
    min_rank: int
    mean: float
    median: float
    p95: float
    max: float
    max_rank: int


@dataclass(frozen=True, slots=True)
class GatheredRegion:
    """One region on one kind of processor, on all ranks that reported."""

    name: str
    device: str
    """``"CPU"`` or ``"GPU"``."""
    ranks: int
    stats: TimeStats
    """Of all times of all ranks. ``quantile_error`` is that of the coarsest bins that a rank has sent."""
    distribution: Distribution
    """The same times as moments and a histogram. Where a rank sent coarser bins, its times lie in their middles."""
    over_ranks: dict[str, OverRanks]
    counters: dict[str, int]
    """Intervals outside the statistics (running, failed and so on), added over ranks; counts above 0."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The report of all ranks. Times are in seconds."""

    world_size: int
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    """Ranks that left no snapshot within the deadline: dead, stuck, or not asked for one. Empty if there is a fault,
    since then no rank could be asked."""
    fault: str | None
    """What went wrong with what connects the ranks, None if nothing did."""
    regions: tuple[GatheredRegion, ...]
    """In the order of ``TimeType`` and then of names; CPU before GPU. Each has times of some rank."""
    hosts: tuple[str, ...]
    """The machine of each of ``ranks``."""
    unix_time_s: float
    """When the latest of the snapshots was taken, in seconds since 1970."""
    spread_s: float
    """How much earlier the earliest was, by the ranks' own clocks."""
    unreadable: dict[int, str]
    """Ranks with an unreadable snapshot, and the reason; they are among the missing."""
    step: int | None = None
    """The step that the ranks were asked about, if it was said."""
    ahead: dict[int, int] = field(default_factory=dict)
    """Ranks that have called more often than most others since the report before, and how many times more; below 0 for
    ranks that have called less often."""
    values: dict[str, NDArray[np.float64]] | None = None
    """For each of :data:`OF_EACH_RANK` and for ``count``: shape ``(ranks, regions)``, NaN where a rank has no time."""

    def __iter__(self) -> Iterator[GatheredRegion]:
        return iter(self.regions)

    def get(self, key: TimeType | str, device: str = CPU) -> GatheredRegion | None:
        """One region, or None if no rank has times of it."""
        name = key.name if isinstance(key, TimeType) else key
        for region in self.regions:
            if (region.name, region.device) == (name, device):
                return region
        return None

    def of_ranks(self, key: TimeType | str, what: str = "median", device: str = CPU) -> dict[int, float]:
        """One number of a region on each rank that has it.

        Args:
            key: The region.
            what: ``"mean"``, ``"median"``, ``"p95"`` in seconds, or ``"count"``.
            device: ``"CPU"`` or ``"GPU"``.

        Raises:
            ValueError: There is no such number.
        """
        if self.values is None or what not in self.values:
            raise ValueError(f"Gathered.of_ranks({what!r}): each rank sends {', '.join(self.values or ())}.")
        region = self.get(key, device)
        if region is None:
            return {}
        column = self.values[what][:, self.regions.index(region)]
        return {r: float(v) for r, v in zip(self.ranks, column, strict=True) if not np.isnan(v)}

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, without the values of each rank."""
        from dataclasses import asdict, replace

        plain = asdict(replace(self, values=None))
        del plain["values"]
        return plain


def over_ranks(values: NDArray[np.float64], ranks: NDArray[np.int64]) -> OverRanks | None:
    """How a number differs over ranks; None if none has it.

    Args:
        values: Shape ``(ranks,)``, NaN where a rank has none.
        ranks: Their numbers, ascending.
    """
    there = ~np.isnan(values)
    found, whose = values[there], ranks[there]
    if not len(found):
        return None
    low, high = int(found.argmin()), int(found.argmax())
    median, p95 = np.percentile(found, (50, 95))
    return OverRanks(
        len(found), float(found[low]), int(whose[low]), float(found.mean()), float(median), float(p95),
        float(found[high]), int(whose[high]),
    )  # fmt: skip


_ORDER = {member.name: position for position, member in enumerate(TimeType)}
_EACH = ("count", *OF_EACH_RANK)

_TOGETHER = 100_000

Key = tuple[str, str]


class _Region:
    """What all ranks together have of one region."""

    def __init__(self) -> None:
        self.parts: list[Distribution] = []
        self._histogram: NDArray[np.int64] = np.zeros(BIN_COUNT, dtype=np.int64)
        self._bins: list[int] = []
        self._counts: list[int] = []
        self.level = 0
        self.skipped = 0
        self.counters: dict[str, int] = {}
        self.of_rank: dict[int, tuple[float, ...]] = {}

    def add(self, rank: int, level: int, plain: dict[str, Any]) -> None:
        for name, count in plain["counters"].items():
            self.counters[name] = self.counters.get(name, 0) + count
        if "moments" not in plain:
            return
        count, total_ns, min_ns, max_ns, m2_ns2 = plain["moments"]
        median, p95, skipped = plain["each"]
        self.skipped += skipped
        self.parts.append(Distribution(count, total_ns, min_ns, max_ns, m2_ns2, EMPTY.first_bin, EMPTY.counts))
        self._bins += plain["bins"]
        self._counts += plain["counts"]
        if len(self._bins) > _TOGETHER:
            self.histogram()
        self.level = max(self.level, level)
        self.of_rank[rank] = (count, total_ns / count / 1e9, median, p95)

    def histogram(self) -> NDArray[np.int64]:
        np.add.at(self._histogram, np.array(self._bins, dtype=np.int64), np.array(self._counts, dtype=np.int64))
        self._bins, self._counts = [], []
        return self._histogram


def merge_snapshots(
    messages: Mapping[int, bytes],
    asked: Sequence[int],
    *,
    fault: str | None = None,
    step: int | None = None,
    ahead: dict[int, int] | None = None,
) -> Gathered:
    """One report of the messages of ranks, by rank. A message that cannot be read is noted with its reason."""
    by_key: dict[Key, _Region] = {}
    heads: dict[int, tuple[str, float]] = {}
    unreadable: dict[int, str] = {}
    for rank, message in sorted(messages.items()):
        try:
            plain = unpack_snapshot(message)
        except ValueError as error:
            unreadable[rank] = str(error)
            continue
        heads[rank] = (plain["host"], plain["unix"])
        for one in plain["regions"]:
            by_key.setdefault((one["name"], one["device"]), _Region()).add(rank, plain["level"], one)
    ranks = np.array(list(heads), dtype=np.int64)
    keys = [key for key, region in by_key.items() if region.parts]
    keys.sort(key=lambda key: (_ORDER.get(key[0], len(_ORDER)), *key))
    table = np.full((len(_EACH), len(ranks), len(keys)), np.nan)
    for column, key in enumerate(keys):
        of_rank = by_key[key].of_rank
        table[:, np.searchsorted(ranks, list(of_rank)), column] = np.array(list(of_rank.values())).T
    values: dict[str, Any] = dict(zip(_EACH, table, strict=True))
    regions = []
    for column, key in enumerate(keys):
        over = {name: over_ranks(values[name][:, column], ranks) for name in OF_EACH_RANK}
        found = {name: one for name, one in over.items() if one is not None}
        regions.append(_gathered_region(key, by_key[key], found))
    times_s = [time_s for _, time_s in heads.values()]
    latest = max(times_s, default=0.0)
    return Gathered(
        world_size=len(asked),
        ranks=tuple(heads),
        missing=() if fault else tuple(rank for rank in asked if rank not in heads),
        fault=fault,
        regions=tuple(regions),
        hosts=tuple(host for host, _ in heads.values()),
        unix_time_s=latest,
        spread_s=latest - min(times_s, default=0.0),
        unreadable=unreadable,
        step=step,
        ahead=dict(ahead or {}),
        values=values,
    )


def _gathered_region(key: Key, own: _Region, over: dict[str, Any]) -> GatheredRegion:
    from dataclasses import replace

    counts = own.histogram()
    used = np.flatnonzero(counts)
    first_bin, dense_counts = dense(used, counts[used])
    distribution = replace(merge(own.parts), first_bin=first_bin, counts=dense_counts)
    stats = distribution.stats(skipped=own.skipped)
    assert stats is not None
    return GatheredRegion(
        name=key[0],
        device=key[1],
        ranks=over["mean"].ranks,
        stats=replace(stats, quantile_error=bin_error(own.level)),
        distribution=distribution,
        over_ranks=over,
        counters=dict(own.counters),
    )
