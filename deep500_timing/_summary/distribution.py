"""What is known of the times of a region once they are forgotten one by one: it merges and subtracts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._summary import histogram as _histogram
from deep500_timing._summary.histogram import HISTOGRAM_ERROR, Histogram
from deep500_timing._summary.stats import QUANTILES, TimeStats, median_confidence_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Distribution:
    """Moments and histogram of times, as plain data that JSON can hold and another rank can add to its own."""

    count: int
    """Times."""
    total_ns: int
    """Their sum, exact."""
    min_ns: int
    """The shortest, exact; of a difference (:meth:`since`) as exact as :meth:`since` says."""
    max_ns: int
    """The longest, likewise."""
    m2_ns2: float
    """Sum of squared deviations from the mean, in ns squared."""
    bins: str
    """The histogram, packed, see :func:`deep500_timing._summary.histogram.pack`; exact."""

    def histogram(self) -> Histogram:
        """How many times fell into each bin."""
        return Histogram.unpack(self.bins)

    def used_bins(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bins that are not empty, ascending, and how many times fell into each; shapes ``(bins,)``."""
        return _histogram.unpack(self.bins)

    def stats(self, *, skipped: int = 0) -> TimeStats | None:
        """The statistics in seconds, quantiles within 1 %; None if there is no time.

        Args:
            skipped: Warm-up times left out, to be passed on.
        """
        if self.count == 0:
            return None
        histogram, n = self.histogram(), self.count

        def seconds(nanoseconds: float) -> float:
            # No quantile lies beyond the extremes.
            return min(max(nanoseconds, self.min_ns), self.max_ns) / 1e9

        ranks = median_confidence_ranks(n)
        interval = None
        if ranks is not None:
            low_ns, high_ns = histogram.order_statistics(ranks)
            interval = (seconds(low_ns), seconds(high_ns))
        quantiles_ns = histogram.quantiles(QUANTILES.values())
        return TimeStats(
            min=self.min_ns / 1e9,
            mean=self.total_ns / n / 1e9,
            max=self.max_ns / 1e9,
            stdev=math.sqrt(self.m2_ns2 / (n - 1)) / 1e9 if n > 1 else 0.0,
            count=n,
            total=self.total_ns / 1e9,
            median_ci=interval,
            skipped=skipped,
            quantile_error=HISTOGRAM_ERROR,
            **{name: seconds(value) for name, value in zip(QUANTILES, quantiles_ns, strict=True)},
        )

    def since(self, earlier: Distribution) -> Distribution:
        """What came after an earlier moment of the same region.

        Count, total and histogram are exact. The shortest and longest time are exact where they are new, and within
        1 % where an earlier time was shorter or longer. If ``earlier`` is not of the same times, as after a
        ``reset()``, everything counts as later.
        """
        if earlier.count == 0 or earlier.count > self.count or earlier.total_ns > self.total_ns:
            return self
        counts = self.histogram().counts - earlier.histogram().counts
        if (counts < 0).any():
            return self
        used = np.flatnonzero(counts)
        n = self.count - earlier.count
        if n == 0 or len(used) == 0:
            return EMPTY
        total_ns = self.total_ns - earlier.total_ns
        # Chan, Golub, LeVeque (1979), the update solved for the second part.
        delta = total_ns / n - earlier.total_ns / earlier.count
        m2 = self.m2_ns2 - earlier.m2_ns2 - delta * delta * earlier.count * n / self.count
        return Distribution(
            n,
            total_ns,
            self._extreme(int(used[0]), self.min_ns, earlier.min_ns),
            self._extreme(int(used[-1]), self.max_ns, earlier.max_ns),
            max(m2, 0.0),
            _histogram.pack(used.tolist(), counts[used].tolist()),
        )

    def _extreme(self, index: int, whole_ns: int, earlier_ns: int) -> int:
        if whole_ns != earlier_ns:
            return whole_ns
        low, width = _histogram.bin_bounds(index)
        return min(max(low + (width - 1) // 2, self.min_ns), self.max_ns)


EMPTY = Distribution(0, 0, 0, 0, 0.0, _histogram.pack((), ()))
"""Of no times."""


def merge(parts: Iterable[Distribution]) -> Distribution:
    """The distribution of all the times of several, such as those of one region on many ranks.

    Count, total, extremes and histogram are exact and depend on no order; moments by the pairwise update of Chan,
    Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979, in its form for
    many parts: squared deviations of the parts, and of their means from the common one.
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
        _histogram.merged(part.bins for part in found).pack(),
    )
