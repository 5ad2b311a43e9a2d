"""The times of one region, gathered from its threads or from ranks, until statistics are made of them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._summary.distribution import EMPTY, Distribution
from deep500_timing._summary.histogram import Histogram, bin_of_one, pack, pack_one
from deep500_timing._summary.stats import TimeStats, squared_deviations, stats_of, stats_of_few, trim_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]


@dataclass(slots=True)
class Summary:
    """Intervals of one region, gathered from threads or ranks: kept ones as they are, the rest as aggregates."""

    durations_ns: list[Int64Array] = field(default_factory=list)
    """Durations that are kept one by one, warm-up excluded."""
    aggregated_count: int = 0
    """Times that live on in the aggregates below only."""
    total_ns: int = 0
    min_ns: int = 0
    max_ns: int = 0
    mean_ns: float = 0.0
    m2: float = 0.0
    """Sum of squared deviations from the mean, in ns squared."""
    histogram: Histogram | None = None
    skipped: int = 0

    def add_durations(self, durations_ns: Int64Array) -> None:
        """Take in durations in ns, shape ``(n,)``."""
        if len(durations_ns):
            self.durations_ns.append(durations_ns)

    def add_aggregates(
        self, count: int, total_ns: int, min_ns: int, max_ns: int, mean_ns: float, m2: float, histogram: Histogram
    ) -> None:
        """Take in the aggregates of ``count`` other times.

        Pairwise update of mean and squared deviations: Chan, Golub, LeVeque, "Updating formulae and a pairwise
        algorithm for computing sample variances", 1979.
        """
        if count == 0:
            return
        if self.aggregated_count == 0:
            self.min_ns, self.max_ns = min_ns, max_ns
        n = self.aggregated_count + count
        delta = mean_ns - self.mean_ns
        self.mean_ns += delta * count / n
        self.m2 += m2 + delta * delta * self.aggregated_count * count / n
        self.aggregated_count = n
        self.total_ns += total_ns
        self.min_ns = min(self.min_ns, min_ns)
        self.max_ns = max(self.max_ns, max_ns)
        if self.histogram is None:
            self.histogram = Histogram()
        self.histogram.merge(histogram)

    @property
    def count(self) -> int:
        """Times in all."""
        return self.aggregated_count + sum(map(len, self.durations_ns))

    def whole_histogram(self) -> Histogram:
        """The histogram of every time, kept or not."""
        histogram = Histogram.of(_joined(self.durations_ns))
        if self.histogram is not None:
            histogram.merge(self.histogram)
        return histogram

    def distribution(self) -> Distribution:
        """What is known of all times once they are forgotten one by one."""
        whole = self.aggregated()
        return Distribution(
            whole.aggregated_count, whole.total_ns, whole.min_ns, whole.max_ns, whole.m2, whole.whole_histogram().pack()
        )

    def aggregated(self) -> Summary:
        """The same with nothing kept one by one."""
        if not self.durations_ns:
            return self
        whole = Summary(skipped=self.skipped)
        histogram = self.histogram or Histogram()
        whole.add_aggregates(
            self.aggregated_count, self.total_ns, self.min_ns, self.max_ns, self.mean_ns, self.m2, histogram
        )
        kept = _joined(self.durations_ns)
        mean = float(kept.mean())
        m2 = squared_deviations(kept, mean)
        total_ns, least, most = int(kept.sum()), int(kept.min()), int(kept.max())
        whole.add_aggregates(len(kept), total_ns, least, most, mean, m2, Histogram.of(kept))
        return whole

    def stats(self) -> TimeStats | None:
        """The statistics, or None if there is no time: of the times themselves where all are kept."""
        if self.aggregated_count == 0:
            # The distribution of a million times takes longer than their statistics.
            return stats_of(_joined(self.durations_ns), skipped=self.skipped) if self.durations_ns else None
        return self.distribution().stats(skipped=self.skipped)

    def stats_and_distribution(self) -> tuple[TimeStats | None, Distribution]:
        """Both, at little more than the cost of one."""
        distribution = self.distribution()
        if self.aggregated_count == 0:
            return self.stats(), distribution
        return distribution.stats(skipped=self.skipped), distribution

    def trimmed_mean(self, trim: float) -> float | None:
        """The mean in seconds without ``round(n * trim)`` of ``n`` times at either end; None if there is no time.

        Of the times themselves where all are kept, else of the histogram, within 1 %.
        """
        if self.count == 0:
            return None
        if self.aggregated_count == 0:
            return trim_mean(_joined(self.durations_ns).astype(float), trim) / 1e9
        return self.whole_histogram().trimmed_mean_ns(trim) / 1e9


def _joined(parts: list[Int64Array]) -> Int64Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def durations_of(pairs: Sequence[Any]) -> Int64Array:
    """The durations in ns, shape ``(n,)``, of arrays that hold start and end in turn."""
    parts = [np.frombuffer(part, dtype=np.int64) for part in pairs if len(part)]
    return _joined([part[1::2] - part[0::2] for part in parts])


def of_few(durations_ns: list[int], *, skipped: int = 0) -> tuple[TimeStats | None, Distribution]:
    """Statistics and distribution of some tens of times, without numpy.

    Args:
        durations_ns: In nanoseconds, none negative.
        skipped: Warm-up times left out, to be passed on.
    """
    if not durations_ns:
        return None, EMPTY
    if len(durations_ns) == 1:
        only = durations_ns[0]
        return stats_of_few(durations_ns, skipped=skipped), Distribution(1, only, only, only, 0.0, pack_one(only))
    n, total_ns = len(durations_ns), sum(durations_ns)
    mean_ns = total_ns / n
    counts = Counter(map(bin_of_one, durations_ns))
    bins = sorted(counts)
    distribution = Distribution(
        n,
        total_ns,
        min(durations_ns),
        max(durations_ns),
        math.fsum((value - mean_ns) ** 2 for value in durations_ns),
        pack(bins, [counts[index] for index in bins]),
    )
    return stats_of_few(durations_ns, skipped=skipped), distribution
