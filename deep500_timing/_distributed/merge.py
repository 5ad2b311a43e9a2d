"""Merges the messages of thousands of ranks into one report."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.time_type import TimeType
from deep500_timing._distributed.gathered import OF_EACH_RANK, Gathered, GatheredRegion, over_ranks
from deep500_timing._distributed.message import bin_error, unpack_snapshot
from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.distribution import EMPTY, Distribution, merge
from deep500_timing._summary.histogram import pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

_ORDER = {member.name: position for position, member in enumerate(TimeType)}
_EACH = ("count", *OF_EACH_RANK)

_TOGETHER = 100_000
"""Bins that are added at a time."""

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
        """By rank, the values of :data:`_EACH`."""

    def add(self, rank: int, level: int, plain: dict[str, Any]) -> None:
        for name, count in plain["counters"].items():
            self.counters[name] = self.counters.get(name, 0) + count
        if "moments" not in plain:
            return
        count, total_ns, min_ns, max_ns, m2_ns2 = plain["moments"]
        median, p95, skipped = plain["each"]
        self.skipped += skipped
        self.parts.append(Distribution(count, total_ns, min_ns, max_ns, m2_ns2, EMPTY.bins))
        self._bins += plain["bins"]
        self._counts += plain["counts"]
        if len(self._bins) > _TOGETHER:
            self.histogram()
        self.level = max(self.level, level)
        self.of_rank[rank] = (count, total_ns / count / 1e9, median, p95)

    def histogram(self) -> NDArray[np.int64]:
        """How many times of all ranks fell into each bin."""
        np.add.at(self._histogram, np.array(self._bins, dtype=np.int64), np.array(self._counts, dtype=np.int64))
        self._bins, self._counts = [], []
        return self._histogram


class Merger:
    """Takes in the messages of ranks, in any order, and makes one report of them."""

    def __init__(self) -> None:
        """Empty."""
        self._regions: dict[Key, _Region] = {}
        self._heads: dict[int, tuple[str, float]] = {}
        self.unreadable: dict[int, str] = {}

    def add(self, messages: Mapping[int, bytes]) -> None:
        """Take in the messages of ranks, by rank. One that cannot be read is noted with its reason."""
        for rank, message in messages.items():
            try:
                plain = unpack_snapshot(message)
            except ValueError as error:
                self.unreadable[rank] = str(error)
                continue
            self._heads[rank] = (plain["host"], plain["unix"])
            for one in plain["regions"]:
                self._regions.setdefault((one["name"], one["device"]), _Region()).add(rank, plain["level"], one)

    def gathered(
        self,
        asked: Sequence[int],
        *,
        fault: str | None = None,
        step: int | None = None,
        ahead: dict[int, int] | None = None,
    ) -> Gathered:
        """The report."""
        ranks = np.array(sorted(self._heads), dtype=np.int64)
        keys = [key for key, region in self._regions.items() if region.parts]
        keys.sort(key=lambda key: (_ORDER.get(key[0], len(_ORDER)), *key))
        table = np.full((len(_EACH), len(ranks), len(keys)), np.nan)
        for column, key in enumerate(keys):
            of_rank = self._regions[key].of_rank
            table[:, np.searchsorted(ranks, list(of_rank)), column] = np.array(list(of_rank.values())).T
        values: dict[str, Any] = dict(zip(_EACH, table, strict=True))
        regions = []
        for column, key in enumerate(keys):
            over = {name: over_ranks(values[name][:, column], ranks) for name in OF_EACH_RANK}
            regions.append(self._region(key, {name: one for name, one in over.items() if one is not None}))
        times_s = [time_s for _, time_s in self._heads.values()]
        latest = max(times_s, default=0.0)
        return Gathered(
            world_size=len(asked),
            ranks=tuple(ranks.tolist()),
            missing=() if fault else tuple(rank for rank in asked if rank not in self._heads),
            fault=fault,
            regions=tuple(regions),
            hosts=tuple(self._heads[rank][0] for rank in ranks.tolist()),
            unix_time_s=latest,
            spread_s=latest - min(times_s, default=0.0),
            unreadable=dict(sorted(self.unreadable.items())),
            step=step,
            ahead=dict(ahead or {}),
            values=values,
        )

    def _region(self, key: Key, over: dict[str, Any]) -> GatheredRegion:
        from dataclasses import replace

        own = self._regions[key]
        counts = own.histogram()
        used = np.flatnonzero(counts)
        distribution = replace(merge(own.parts), bins=pack(used.tolist(), counts[used].tolist()))
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
