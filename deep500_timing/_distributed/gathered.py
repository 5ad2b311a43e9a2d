"""The combined snapshots of ranks, as plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import CPU
from deep500_timing._base.time_type import TimeType

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from deep500_timing._summary.distribution import Distribution
    from deep500_timing._summary.stats import TimeStats

OF_EACH_RANK = ("mean", "median", "p95")
"""Values of each rank: its own mean, median and 95th percentile of a region, in seconds."""


@dataclass(frozen=True, slots=True)
class OverRanks:
    """How one number differs from rank to rank, in seconds. Of ranks with the same number the smallest is named."""

    ranks: int
    """How many have the number."""
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
    """How many have times of it."""
    stats: TimeStats
    """Of all times of all ranks. ``quantile_error`` is that of the coarsest bins that a rank has sent."""
    distribution: Distribution
    """The same times as moments and a histogram. Where a rank sent coarser bins, its times lie in their middles."""
    over_ranks: dict[str, OverRanks]
    """How :data:`OF_EACH_RANK` differ from rank to rank."""
    counters: dict[str, int]
    """Intervals outside the statistics (running, failed and so on), added over ranks; counts above 0."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """The report of all ranks. Times are in seconds."""

    world_size: int
    ranks: tuple[int, ...]
    """The ranks with a snapshot in it, ascending."""
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
        """Go through the regions."""
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
        name = key.name if isinstance(key, TimeType) else key
        for place, region in enumerate(self.regions):
            if (region.name, region.device) == (name, device):
                column = self.values[what][:, place]
                return {r: float(v) for r, v in zip(self.ranks, column, strict=True) if not np.isnan(v)}
        return {}

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
