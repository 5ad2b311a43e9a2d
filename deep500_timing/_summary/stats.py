"""Statistics of times: summaries that merge, a histogram, and the numbers that a report shows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing.exceptions import NoTimesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

HISTOGRAM_ERROR = 0.01
"""Relative error that a quantile from the histogram stays below (its bins are 1/64 of a power of two wide)."""


@dataclass(frozen=True, slots=True)
class TimeStats:
    """What the times of one region look like. Times are in seconds."""

    min: float
    """Shortest time, exact."""
    mean: float
    """Arithmetic mean, exact."""
    median: float = field(metadata={"quantile": 0.5, "shown": True})
    """Middle time; ``quantile_error`` says how exact this and the percentiles are."""
    max: float
    """Longest time, exact."""
    stdev: float
    """Sample standard deviation (divisor ``count - 1``), 0 for a single time."""
    count: int
    """Times that these statistics stand on."""
    total: float
    """Their sum, exact."""
    p90: float = field(metadata={"quantile": 0.90})
    """90th percentile, linear between order statistics as numpy's default."""
    p95: float = field(metadata={"quantile": 0.95, "shown": True})
    """95th percentile."""
    p99: float = field(metadata={"quantile": 0.99})
    """99th percentile."""
    median_ci: tuple[float, float] | None
    """95 % confidence interval of the median, see :func:`median_confidence_ranks`; None below 6 times."""
    skipped: int = 0
    """Warm-up times that ``skip_first`` left out."""
    quantile_error: float = 0.0
    """Largest relative error of median, percentiles and interval: 0.0 from the times themselves, 0.01 from the
    histogram of a timer with ``keep_last`` that has recorded more than it keeps."""


QUANTILES: dict[str, float] = {
    item.name: item.metadata["quantile"] for item in fields(TimeStats) if "quantile" in item.metadata
}
"""The fields of :class:`TimeStats` that hold a quantile, with its share of the times. What computes, writes or shows
quantiles goes by this list, so that a further percentile is one more field."""
SHOWN_QUANTILES = tuple(item.name for item in fields(TimeStats) if item.metadata.get("shown"))
"""Those of them that have a column in a table."""


@dataclass(slots=True)
class Histogram:
    """Counts of times in bins 1/64 of a power of two wide, in the manner of HdrHistogram (G. Tene, hdrhistogram.org).

    Merging adds counts, so it is exact, and no order of merging matters.
    """

    counts: Int64Array = field(default_factory=lambda: np.zeros(BIN_COUNT, dtype=np.int64))
    """Shape ``(BIN_COUNT,)``: how many times fell into each bin."""

    @classmethod
    def of(cls, durations_ns: Int64Array) -> Histogram:
        """The histogram of durations in ns, shape ``(n,)``; what is negative counts as 0."""
        counts = np.bincount(bin_of(durations_ns), minlength=BIN_COUNT).astype(np.int64)
        return cls(counts)

    def merge(self, other: Histogram) -> None:
        """Add the counts of ``other``."""
        self.counts = self.counts + other.counts

    def order_statistic(self, rank: int) -> float:
        """The ``rank``-th smallest duration in ns (from 1), within 0.8 %: the middle of its bin."""
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        low, width = bin_bounds(index)
        return low + (width - 1) / 2

    def quantile(self, q: float) -> float:
        """The ``q``-quantile in ns (0 to 1), linear between order statistics.

        Raises:
            NoTimesError: The histogram is empty.
        """
        n = int(self.counts.sum())
        if n == 0:
            raise NoTimesError("A quantile of an empty histogram does not exist; record a time first.")
        position = q * (n - 1)
        low = int(position)
        first = self.order_statistic(low + 1)
        if position == low:
            return first
        return first + (position - low) * (self.order_statistic(low + 2) - first)

    def to_sparse(self) -> dict[int, int]:
        """The bins that are not empty, as plain data."""
        used = np.flatnonzero(self.counts)
        return {int(index): int(self.counts[index]) for index in used}

    @classmethod
    def from_sparse(cls, sparse: dict[int, int]) -> Histogram:
        """The inverse of :meth:`to_sparse`."""
        histogram = cls()
        for index, count in sparse.items():
            histogram.counts[int(index)] = count
        return histogram


def bin_of(durations_ns: Int64Array) -> Int64Array:
    """The bin of each duration in ns: itself below 128, then 64 bins for each power of two."""
    values = np.maximum(durations_ns, 0)
    # frexp rounds integers beyond 2**53, possibly up to the next power of two.
    length = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    length -= (values >> np.maximum(length - 1, 0)) == 0
    shift = np.maximum(length - 7, 0)
    return np.asarray((shift << 6) + (values >> shift), dtype=np.int64)


def bin_bounds(index: int) -> tuple[int, int]:
    """The smallest duration in ns of a bin, and how many nanoseconds it spans."""
    if index < 128:
        return index, 1
    shift = (index >> 6) - 1
    return (index - (shift << 6)) << shift, 1 << shift


@dataclass(slots=True)
class Summary:
    """Intervals of one region, gathered from threads or ranks: kept ones as they are, the rest as aggregates."""

    durations_ns: list[Int64Array] = field(default_factory=list)
    """Durations that are kept one by one, warm-up excluded."""
    folded: int = 0
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
        if self.folded == 0:
            self.min_ns, self.max_ns = min_ns, max_ns
        n = self.folded + count
        delta = mean_ns - self.mean_ns
        self.mean_ns += delta * count / n
        self.m2 += m2 + delta * delta * self.folded * count / n
        self.folded = n
        self.total_ns += total_ns
        self.min_ns = min(self.min_ns, min_ns)
        self.max_ns = max(self.max_ns, max_ns)
        if self.histogram is None:
            self.histogram = Histogram()
        self.histogram.merge(histogram)

    @property
    def count(self) -> int:
        """Times in all."""
        return self.folded + sum(map(len, self.durations_ns))

    def whole_histogram(self) -> Histogram:
        """The histogram of every time, kept or not."""
        histogram = Histogram.of(_joined(self.durations_ns))
        if self.histogram is not None:
            histogram.merge(self.histogram)
        return histogram

    def stats(self) -> TimeStats | None:
        """The statistics, or None if there is no time."""
        if self.count == 0:
            return None
        if self.folded == 0:
            return stats_of(_joined(self.durations_ns), skipped=self.skipped)
        whole = Summary(skipped=self.skipped)
        whole.add_aggregates(
            self.folded, self.total_ns, self.min_ns, self.max_ns, self.mean_ns, self.m2, self.histogram or Histogram()
        )
        kept = _joined(self.durations_ns)
        if len(kept):
            mean = float(kept.mean())
            m2 = float(((kept - mean) ** 2).sum())
            whole.add_aggregates(
                len(kept), int(kept.sum()), int(kept.min()), int(kept.max()), mean, m2, Histogram.of(kept)
            )
        return whole._stats_of_aggregates()

    def _stats_of_aggregates(self) -> TimeStats:
        n, histogram = self.folded, self.histogram or Histogram()

        def seconds(nanoseconds: float) -> float:
            # The extremes are exact; no quantile lies beyond them.
            return min(max(nanoseconds, self.min_ns), self.max_ns) / 1e9

        ranks = median_confidence_ranks(n)
        interval = None
        if ranks is not None:
            interval = (seconds(histogram.order_statistic(ranks[0])), seconds(histogram.order_statistic(ranks[1])))
        quantiles = {name: seconds(histogram.quantile(q)) for name, q in QUANTILES.items()}
        return TimeStats(
            min=self.min_ns / 1e9,
            mean=self.total_ns / n / 1e9,
            max=self.max_ns / 1e9,
            stdev=math.sqrt(self.m2 / (n - 1)) / 1e9 if n > 1 else 0.0,
            count=n,
            total=self.total_ns / 1e9,
            median_ci=interval,
            skipped=self.skipped,
            **quantiles,
            quantile_error=HISTOGRAM_ERROR,
        )


def _joined(parts: list[Int64Array]) -> Int64Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)


def stats_of(durations_ns: Int64Array, *, skipped: int = 0) -> TimeStats:
    """The statistics of durations.

    Args:
        durations_ns: Shape ``(n,)``, in nanoseconds.
        skipped: Warm-up times left out, to be passed on.

    Raises:
        NoTimesError: There is no duration.
    """
    n = len(durations_ns)
    if n == 0:
        raise NoTimesError("Statistics of no times do not exist; record a time first.")
    positions = {name: q * (n - 1) for name, q in QUANTILES.items()}
    ranks = median_confidence_ranks(n)
    # Only the order statistics that are asked for are put into place, which takes a quarter of the time of sorting.
    places = {0, n - 1, *map(math.floor, positions.values()), *map(math.ceil, positions.values())}
    if ranks is not None:
        places.update(rank - 1 for rank in ranks)
    ordered = np.partition(durations_ns, sorted(places))
    total_ns = int(ordered.sum())
    return TimeStats(
        min=int(ordered[0]) / 1e9,
        mean=total_ns / n / 1e9,
        max=int(ordered[n - 1]) / 1e9,
        stdev=float(ordered.std(ddof=1)) / 1e9 if n > 1 else 0.0,
        count=n,
        total=total_ns / 1e9,
        median_ci=None if ranks is None else (int(ordered[ranks[0] - 1]) / 1e9, int(ordered[ranks[1] - 1]) / 1e9),
        skipped=skipped,
        quantile_error=0.0,
        **{name: _between(ordered, position) / 1e9 for name, position in positions.items()},
    )


def _between(ordered: Int64Array, position: float) -> float:
    # Linear between the two order statistics around a position, rounded as numpy.percentile rounds.
    low, high = int(ordered[math.floor(position)]), int(ordered[math.ceil(position)])
    share = position - math.floor(position)
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def median_confidence_ranks(count: int) -> tuple[int, int] | None:
    """The ranks (from 1) of the order statistics that enclose the median with at least 95 % confidence.

    How many of ``count`` independent times lie below the median is binomial with p = 1/2, whatever their
    distribution: W. J. Conover, Practical Nonparametric Statistics, 3rd ed., 1999, section 3.2. Above 70 times the
    normal approximation of J.-Y. Le Boudec, Performance Evaluation of Computer and Communication Systems, 2010,
    section 2.2, serves. Times of successive steps depend on each other, which makes the true confidence lower.

    Returns:
        Two ranks, or None below 6 times, where no such interval exists.
    """
    if count < 6:
        return None
    if count > 70:
        half_width = 0.98 * math.sqrt(count)
        return math.floor(count / 2 - half_width), math.ceil(count / 2 + 1 + half_width)
    below = 0
    for rank in range(count):
        below += math.comb(count, rank)
        if below > 0.025 * 2**count:
            return rank, count + 1 - rank
    raise AssertionError("unreachable: the whole binomial sums to more than 2.5 %")


def trim_mean(data: Iterable[float], trim_percent: float) -> float:
    """The mean of what is left when a share of the values is cut off at either end.

    As DeepSpeed's function of this name: at each end ``round(n * trim_percent)`` of ``n`` values are cut, a half
    rounded to the even number (``scipy.stats.trim_mean`` rounds down).

    Args:
        data: Values in any unit and order; left as they are.
        trim_percent: Share to cut at each end, 0 to below 0.5; 0.1 is 10 %.

    Returns:
        The trimmed mean, in the unit of the data; 0.0 for no data.

    Raises:
        ValueError: ``trim_percent`` is negative or leaves nothing.
    """
    if not 0.0 <= trim_percent < 0.5:
        raise ValueError(
            f"trim_percent={trim_percent!r} must be at least 0 and below 0.5: it is the share cut off at each end, "
            "0.1 for 10 %."
        )
    values = np.sort(np.fromiter(data, dtype=np.float64))
    n = len(values)
    if n == 0:
        return 0.0
    cut = round(n * trim_percent)
    if 2 * cut >= n:
        raise ValueError(f"trim_percent={trim_percent!r} cuts {cut} of {n} values off at each end and leaves none.")
    return float(values[cut : n - cut].mean())


def durations_of(pairs: Sequence[Any]) -> Int64Array:
    """The durations in ns, shape ``(n,)``, of arrays that hold start and end in turn."""
    parts = [np.frombuffer(part, dtype=np.int64) for part in pairs if len(part)]
    return _joined([part[1::2] - part[0::2] for part in parts])
