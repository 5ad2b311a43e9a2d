"""Moments and histogram of times: what remains when single times are not kept. It merges and subtracts."""

from __future__ import annotations

import math
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.stats import (
    TimeStats,
    quantiles_of,
    squared_deviations,
    stats_of,
    time_stats,
    trim_mean,
)
from deep500_timing.exceptions import NoTimesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]


HISTOGRAM_ERROR = 0.01
"""Upper bound of the relative error of a quantile that is read from bins."""


def pack(bins: Sequence[int] | Int64Array, counts: Sequence[int] | Int64Array) -> str:
    """Encode the bins that are not empty as ASCII text, which JSON can hold.

    The gaps between bins as 16-bit numbers, then the counts as 64-bit numbers, little-endian, compressed by zlib, in
    base64: about 100 characters for 1 000 times with a spread of 5 %.
    """
    gaps = np.diff(bins, prepend=0).astype("<u2")
    return b64encode(zlib.compress(gaps.tobytes() + np.array(counts, dtype="<u8").tobytes())).decode("ascii")


def _pack_dense(counts: Int64Array) -> str:
    used = np.flatnonzero(counts)
    return pack(used, counts[used])


def unpack(text: str) -> tuple[Int64Array, Int64Array]:
    try:
        raw = zlib.decompress(b64decode(text, validate=True))
        number = len(raw) // 10
        bins = np.cumsum(np.frombuffer(raw, dtype="<u2", count=number), dtype=np.int64)
        counts = np.frombuffer(raw, dtype="<u8", offset=2 * number).astype(np.int64)
        if len(counts) != number or (number and bins[-1] >= BIN_COUNT):
            raise ValueError("it is cut off, or of another kind")
    except (ValueError, zlib.error) as error:
        raise ValueError(f"Reading a packed histogram from {text[:40]!r}: {error}.") from error
    return bins, counts


def bin_of(durations_ns: Int64Array) -> Int64Array:
    """The bin of each duration in ns: one for each of 0 to 127 ns, then 64 for each power of two."""
    values = np.maximum(durations_ns, 0)
    # frexp rounds integers above 2**53, possibly up to the next power of two.
    length = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    length -= (values >> np.maximum(length - 1, 0)) == 0
    shift = np.maximum(length - 7, 0)
    return np.asarray((shift << 6) + (values >> shift), dtype=np.int64)


def bin_bounds(index: int) -> tuple[int, int]:
    """The smallest duration of a bin and the bin's width, both in ns."""
    if index < 128:
        return index, 1
    shift = (index >> 6) - 1
    return (index - (shift << 6)) << shift, 1 << shift


def middle_of(index: int) -> float:
    low, width = bin_bounds(index)
    return low + (width - 1) / 2


@dataclass(frozen=True, slots=True)
class Distribution:
    """Count, sum, extremes, spread and histogram of times. Plain data: JSON can hold it, another rank can add it."""

    count: int
    total_ns: int
    """Their sum, exact."""
    min_ns: int
    """The shortest: exact, except after :meth:`since`."""
    max_ns: int
    """The longest: exact, except after :meth:`since`."""
    m2_ns2: float
    """Sum of squared deviations from the mean, in ns squared."""
    bins: str
    """The histogram, see :func:`deep500_timing._summary.distribution.pack`; exact."""

    @classmethod
    def of(cls, durations_ns: Int64Array) -> Distribution:
        """The distribution of durations in ns, shape ``(n,)``; negative ones are invalid."""
        if not len(durations_ns):
            return EMPTY
        total_ns = int(durations_ns.sum())
        m2 = squared_deviations(durations_ns, total_ns / len(durations_ns))
        bins, counts = np.unique(bin_of(durations_ns), return_counts=True)
        extremes = int(durations_ns.min()), int(durations_ns.max())
        return cls(len(durations_ns), total_ns, *extremes, m2, pack(bins, counts))

    @classmethod
    def of_aggregates(cls, copied: Mapping[str, Any]) -> Distribution:
        """The distribution of the times that a timer has aggregated, from ``Intervals.copy()``."""
        count = copied["aggregated"] - copied["skip_first"]
        if count <= 0:
            return EMPTY
        moments = copied["total_ns"], copied["min_ns"], copied["max_ns"], copied["m2"]
        return cls(count, *moments, _pack_dense(np.frombuffer(copied["bins"], dtype=np.int64)))

    def used_bins(self) -> tuple[Int64Array, Int64Array]:
        """The bins that are not empty, ascending, and the times in each; shapes ``(bins,)``."""
        return unpack(self.bins)

    def order_statistics(self, ranks: Sequence[int]) -> list[float]:
        """The ``rank``-th smallest times in ns (from 1), each within 0.8 %."""
        bins, counts = self.used_bins()
        found = np.searchsorted(np.cumsum(counts), ranks)
        # No order statistic lies outside the extremes.
        return [min(max(middle_of(int(bins[place])), self.min_ns), self.max_ns) for place in found]

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The quantiles in ns at these shares (0 to 1), linear between order statistics, within 1 %."""
        if not self.count:
            raise NoTimesError("A quantile of an empty distribution does not exist; record a time first.")
        return quantiles_of(self.count, shares, self.order_statistics)

    def trimmed_mean_ns(self, trim: float) -> float:
        """The mean in ns without ``round(n * trim)`` times at each end, within 1 %."""
        n = self.count
        if n == 0:
            raise NoTimesError("The mean of an empty distribution does not exist; record a time first.")
        bins, counts = self.used_bins()
        cut = round(n * trim)
        ends = np.cumsum(counts)
        left = np.maximum(np.minimum(ends, n - cut) - np.maximum(ends - counts, cut), 0)
        return float((left * [middle_of(int(index)) for index in bins]).sum() / (n - 2 * cut))

    def stats(self, *, skipped: int = 0) -> TimeStats | None:
        """The statistics in seconds, quantiles within 1 %; None without times."""
        if not self.count:
            return None
        moments = self.count, self.total_ns, self.min_ns, self.max_ns, self.m2_ns2
        return time_stats(*moments, self.order_statistics, skipped=skipped, quantile_error=HISTOGRAM_ERROR)

    def since(self, earlier: Distribution) -> Distribution:
        """The times that came after an earlier moment of the same region.

        Count, total and histogram are exact. An extreme is exact if it is new, and within 1 % if an earlier time was
        shorter or longer. If ``earlier`` cannot be part of this distribution, as after ``reset()``, all times count
        as later.
        """
        if earlier.count == 0 or earlier.count > self.count or earlier.total_ns > self.total_ns:
            return self
        counts = _dense([self]) - _dense([earlier])
        if (counts < 0).any():
            return self
        used = np.flatnonzero(counts)
        n = self.count - earlier.count
        if n == 0 or len(used) == 0:
            return EMPTY
        total_ns = self.total_ns - earlier.total_ns
        # Chan, Golub, LeVeque (1979), solved for the second part.
        delta = total_ns / n - earlier.total_ns / earlier.count
        m2 = self.m2_ns2 - earlier.m2_ns2 - delta * delta * earlier.count * n / self.count
        low = self._extreme(int(used[0]), self.min_ns, earlier.min_ns)
        high = self._extreme(int(used[-1]), self.max_ns, earlier.max_ns)
        return Distribution(n, total_ns, low, high, max(m2, 0.0), _pack_dense(counts))

    def _extreme(self, index: int, whole_ns: int, earlier_ns: int) -> int:
        if whole_ns != earlier_ns:
            return whole_ns
        low, width = bin_bounds(index)
        return min(max(low + (width - 1) // 2, self.min_ns), self.max_ns)


EMPTY = Distribution(0, 0, 0, 0, 0.0, pack((), ()))


def merge(parts: Iterable[Distribution]) -> Distribution:
    """The distribution of all times of several, such as those of one region on many ranks.

    Count, total, extremes and histogram are exact and do not depend on the order. The spread follows Chan, Golub,
    LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, for many parts.
    """
    found = [part for part in parts if part.count]
    if len(found) < 2:
        return found[0] if found else EMPTY
    count = sum(part.count for part in found)
    total_ns = sum(part.total_ns for part in found)
    mean_ns = total_ns / count
    between = math.fsum(part.count * (part.total_ns / part.count - mean_ns) ** 2 for part in found)
    return Distribution(
        count,
        total_ns,
        min(part.min_ns for part in found),
        max(part.max_ns for part in found),
        math.fsum(part.m2_ns2 for part in found) + between,
        _pack_dense(_dense(found)),
    )


def _dense(parts: Sequence[Distribution]) -> Int64Array:
    # The sum of the histograms, shape (BIN_COUNT,), by one scatter-add.
    unpacked = [part.used_bins() for part in parts]
    counts = np.zeros(BIN_COUNT, dtype=np.int64)
    np.add.at(counts, np.concatenate([bins for bins, _ in unpacked]), np.concatenate([some for _, some in unpacked]))
    return counts


@dataclass(frozen=True, slots=True)
class RecordedTimes:
    """The times of one region from several threads: single times where they are kept, a distribution of the others."""

    kept_ns: Int64Array = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Durations in ns, warm-up excluded, shape ``(n,)``."""
    aggregated: Distribution = EMPTY
    """The times that are not kept."""
    skipped: int = 0

    @property
    def count(self) -> int:
        return self.aggregated.count + len(self.kept_ns)

    def distribution(self) -> Distribution:
        return merge([self.aggregated, Distribution.of(self.kept_ns)])

    def stats(self) -> TimeStats | None:
        """The statistics; exact if all times are kept, None without times."""
        if self.aggregated.count:
            return self.distribution().stats(skipped=self.skipped)
        return stats_of(self.kept_ns, skipped=self.skipped) if len(self.kept_ns) else None

    def trimmed_mean(self, trim: float) -> float | None:
        """The mean in seconds without ``round(n * trim)`` of ``n`` times at each end; None without times.

        Exact if all times are kept, else within 1 %.
        """
        if self.aggregated.count:
            return self.distribution().trimmed_mean_ns(trim) / 1e9
        return trim_mean(self.kept_ns.astype(float), trim) / 1e9 if len(self.kept_ns) else None
