"""Moments and histogram of times: what remains when single times are not kept. It merges and subtracts."""

from __future__ import annotations

import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import add
from typing import Any

import numpy as np

from deep500_timing._base.arrays import Int64Array
from deep500_timing._recording.intervals import BIN_COUNT, Intervals, new_counts
from deep500_timing._summary.stats import (
    OrderStatistics,
    TimeStats,
    in_order,
    quantiles_of,
    squared_deviations,
    time_stats,
    trim_mean,
)
from deep500_timing.exceptions import NoTimesError

HISTOGRAM_ERROR = 0.01
"""Upper bound of the relative error of a quantile that is read from bins."""


def pack(bins: Sequence[int] | Int64Array, counts: Sequence[int] | Int64Array) -> str:
    """Encode the bins that are not empty as ASCII text, which JSON can hold.

    The gaps between bins as 16-bit numbers, then the counts as 64-bit numbers, little-endian, compressed by zlib, in
    base64: about 100 characters for 1 000 times with a spread of 5 %.
    """
    gaps = np.diff(bins, prepend=0).astype("<u2")
    return b64encode(zlib.compress(gaps.tobytes() + np.array(counts, dtype="<u8").tobytes())).decode("ascii")


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
    if len(values) and int(values.max()) >> 53:
        values = np.where(values >> 53, values & -1024, values)  # As a float it would be rounded, possibly up.
    # A float's exponent and the first six bits of its fraction, next to each other.
    bins = (values.astype(np.float64).view(np.int64) >> 46) - (1028 << 6)
    return np.where(values < 128, values, bins)


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
    """Count, sum, extremes, spread and histogram of times. Plain data: another rank can add it."""

    count: int
    total_ns: int
    """Their sum, exact."""
    min_ns: int
    """The shortest: exact, except after :meth:`since`."""
    max_ns: int
    """The longest: exact, except after :meth:`since`."""
    m2_ns2: float
    """Sum of squared deviations from the mean, in ns squared."""
    first_bin: int
    """The first bin that is not empty; 0 without times. See :func:`bin_bounds`."""
    counts: bytes
    """The times in each bin, from the first to the last that is not empty, as native int64; exact."""

    @classmethod
    def of(cls, durations_ns: Int64Array) -> Distribution:
        """The distribution of durations in ns, shape ``(n,)``; negative ones are invalid."""
        if not len(durations_ns):
            return EMPTY
        total_ns = int(durations_ns.sum())
        m2 = squared_deviations(durations_ns, total_ns / len(durations_ns))
        bins = bin_of(durations_ns)
        extremes, first = (int(durations_ns.min()), int(durations_ns.max())), int(bins.min())
        return cls(len(durations_ns), total_ns, *extremes, m2, first, np.bincount(bins - first).tobytes())

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON: the fields, with the histogram as text (:func:`pack`) under ``bins``."""
        values = asdict(self)
        del values["first_bin"], values["counts"]
        return {**values, "bins": pack(*self.used_bins())}

    def used_bins(self) -> tuple[Int64Array, Int64Array]:
        """The bins that are not empty, ascending, and the times in each; shapes ``(bins,)``."""
        counts = np.frombuffer(self.counts, dtype=np.int64)
        used = np.flatnonzero(counts)
        return used + self.first_bin, counts[used]

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
        return time_stats(*moments, self._order_statistics, skipped=skipped)

    def _order_statistics(self) -> tuple[OrderStatistics, float]:
        return self.order_statistics, HISTOGRAM_ERROR

    def since(self, earlier: Distribution) -> Distribution:
        """The times that came after an earlier moment of the same region.

        Count, total and histogram are exact. An extreme is exact if it is new, and within 1 % if an earlier time was
        shorter or longer. If ``earlier`` cannot be part of this distribution, as after ``reset()``, all times count
        as later.
        """
        if earlier.count == 0 or earlier.count > self.count or earlier.total_ns > self.total_ns:
            return self
        n = self.count - earlier.count
        found = new_counts(self.counts, earlier.counts, earlier.first_bin - self.first_bin)
        if found is None:
            return self
        first, counts = found
        if not counts:
            return EMPTY
        total_ns = self.total_ns - earlier.total_ns
        # Chan, Golub, LeVeque (1979), solved for the second part.
        delta = total_ns / n - earlier.total_ns / earlier.count
        m2 = self.m2_ns2 - earlier.m2_ns2 - delta * delta * earlier.count * n / self.count
        first += self.first_bin
        low = self._extreme(first, self.min_ns, earlier.min_ns)
        high = self._extreme(first + len(counts) // 8 - 1, self.max_ns, earlier.max_ns)
        return Distribution(n, total_ns, low, high, max(m2, 0.0), first, counts)

    def _extreme(self, index: int, whole_ns: int, earlier_ns: int) -> int:
        if whole_ns != earlier_ns:
            return whole_ns
        low, width = bin_bounds(index)
        return min(max(low + (width - 1) // 2, self.min_ns), self.max_ns)


EMPTY = Distribution(0, 0, 0, 0, 0.0, 0, b"")


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
        *_added(found),
    )


def _added(parts: Sequence[Distribution]) -> tuple[int, bytes]:
    # The sum of histograms that are not empty.
    first = min(part.first_bin for part in parts)
    counts = np.zeros(max(part.first_bin - first + len(part.counts) // 8 for part in parts), dtype=np.int64)
    for part in parts:
        at = part.first_bin - first
        counts[at : at + len(part.counts) // 8] += np.frombuffer(part.counts, dtype=np.int64)
    return first, counts.tobytes()


def dense(bins: Int64Array, counts: Int64Array) -> tuple[int, bytes]:
    """A histogram as :class:`Distribution` has it, from its used bins, ascending, and the times in each."""
    if not len(bins):
        return 0, b""
    found = np.zeros(int(bins[-1] - bins[0]) + 1, dtype=np.int64)
    found[bins - bins[0]] = counts
    return int(bins[0]), found.tobytes()


class RecordedTimes:
    """The times of one region on several threads, as of one moment."""

    __slots__ = ("_stores", "counters", "distribution", "skipped")

    def __init__(self, stores: Iterable[tuple[Intervals, tuple[Any, ...]]]) -> None:
        """Note what the stores hold, from each of them and its ``digest()``. The times themselves are read later."""
        self._stores: list[tuple[Intervals, int]] = []
        self.skipped = 0
        """Warm-up."""
        self.counters = [0, 0, 0, 0]
        """Failed, discarded, captured and recomputed ones."""
        parts = []
        for store, (recorded, *moments) in stores:
            self.counters = list(map(add, self.counters, moments[6:]))
            warm_up = min(store.skip_first, recorded)
            self.skipped += warm_up
            self._stores.append((store, recorded))
            if recorded > warm_up:
                parts.append(Distribution(recorded - warm_up, *moments[:6]))
        self.distribution = merge(parts)

    @property
    def count(self) -> int:
        return self.distribution.count

    def kept_ns(self) -> Int64Array:
        """The durations in ns of those that are kept, warm-up excluded, shape ``(n,)``."""
        found = [np.zeros(0, dtype=np.int64)]
        for store, recorded in self._stores:
            rows, dropped = kept_of(store, recorded)
            rows = rows[max(store.skip_first - dropped, 0) :]
            found.append(np.maximum(rows[:, 1] - rows[:, 0], 0))
        return np.concatenate(found)

    def stats(self) -> TimeStats | None:
        """The statistics; exact if all times are kept when a quantile is read, None without times."""
        own = self.distribution
        if not own.count:
            return None
        moments = own.count, own.total_ns, own.min_ns, own.max_ns, own.m2_ns2
        return time_stats(*moments, self._order_statistics, skipped=self.skipped)

    def _order_statistics(self) -> tuple[OrderStatistics, float]:
        kept_ns = self.kept_ns()
        if len(kept_ns) < self.count:
            return self.distribution.order_statistics, HISTOGRAM_ERROR
        return in_order(np.sort(kept_ns)), 0.0

    def trimmed_mean(self, trim: float) -> float | None:
        """The mean in seconds without ``round(n * trim)`` of ``n`` times at each end; None without times.

        Exact if all times are kept, else within 1 %.
        """
        if not self.count:
            return None
        kept_ns = self.kept_ns()
        if len(kept_ns) < self.count:
            return self.distribution.trimmed_mean_ns(trim) / 1e9
        return trim_mean(kept_ns.astype(float), trim) / 1e9


def kept_of(store: Intervals, recorded: int) -> tuple[Int64Array, int]:
    """Of the first ``recorded`` intervals those that are kept, and the number of the others before.

    Returns:
        Shape ``(n, width)``, start and end in ns first, and the number.
    """
    parts, dropped = store.kept()
    found = [np.frombuffer(part, dtype=np.int64) for part in parts if len(part)]
    joined = found[0] if len(found) == 1 else np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    return joined.reshape(-1, store.width)[: max(recorded - dropped, 0)], dropped
