"""Statistics of times: the numbers that a report shows, and how they are computed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing.exceptions import NoTimesError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

_PART = 1 << 16
"""Number of deviations in memory at a time, half a MiB."""


@dataclass(frozen=True, slots=True)
class TimeStats:
    """Statistics of the times of one region, in seconds."""

    min: float
    """Shortest time, exact."""
    mean: float
    """Arithmetic mean, exact."""
    median: float = field(metadata={"quantile": 0.5})
    """Median. ``quantile_error`` bounds its relative error and that of the percentiles."""
    max: float
    """Longest time, exact."""
    stdev: float
    """Sample standard deviation (divisor ``count - 1``), 0 for a single time."""
    count: int
    total: float
    """Their sum, exact."""
    p90: float = field(metadata={"quantile": 0.90})
    """90th percentile, linear between order statistics as numpy's default."""
    p95: float = field(metadata={"quantile": 0.95})
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
"""The quantile fields of :class:`TimeStats` with their shares. All code that handles quantiles uses this list."""


def stats_of(durations_ns: Int64Array, *, skipped: int = 0) -> TimeStats:
    n = len(durations_ns)
    if n == 0:
        raise NoTimesError("Statistics of no times do not exist; record a time first.")
    positions = [q * (n - 1) for q in QUANTILES.values()]
    ranks = median_confidence_ranks(n)
    # Only the order statistics that are used are put in order, which takes a quarter of the time of sorting.
    needed = {*map(math.floor, positions), *map(math.ceil, positions)}
    if ranks is not None:
        needed.update(rank - 1 for rank in ranks)
    ordered = np.partition(durations_ns, sorted(needed))
    total_ns = int(durations_ns.sum())
    stdev_ns = math.sqrt(squared_deviations(durations_ns, total_ns / n) / (n - 1)) if n > 1 else 0.0
    return TimeStats(
        min=int(durations_ns.min()) / 1e9,
        mean=total_ns / n / 1e9,
        max=int(durations_ns.max()) / 1e9,
        stdev=stdev_ns / 1e9,
        count=n,
        total=total_ns / 1e9,
        median_ci=None if ranks is None else (int(ordered[ranks[0] - 1]) / 1e9, int(ordered[ranks[1] - 1]) / 1e9),
        skipped=skipped,
        quantile_error=0.0,
        **{name: _between(ordered, position) / 1e9 for name, position in zip(QUANTILES, positions, strict=True)},
    )


def squared_deviations(values: Int64Array, mean: float) -> float:
    # In parts: a second array of this size costs more than the arithmetic.
    parts = []
    for first in range(0, len(values), _PART):
        deviations = values[first : first + _PART] - mean
        parts.append(float(np.square(deviations, out=deviations).sum()))
    return math.fsum(parts)


def _between(ordered: Int64Array, position: float) -> float:
    # Linear between the two order statistics around a position, rounded as numpy.percentile rounds.
    index = int(position)
    share = position - index
    if not share:
        return float(ordered[index])
    low, high = int(ordered[index]), int(ordered[index + 1])
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def median_confidence_ranks(count: int) -> tuple[int, int] | None:
    """The ranks (from 1) of the order statistics that enclose the median with at least 95 % confidence.

    The number of independent times below the median is binomial with p = 1/2 for any
    distribution: W. J. Conover, Practical Nonparametric Statistics, 3rd ed., 1999, section 3.2. Above 70 times the
    normal approximation of J.-Y. Le Boudec, Performance Evaluation of Computer and Communication Systems, 2010,
    section 2.2, serves. Times of successive steps depend on each other, which makes the true confidence lower.
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


TRIM = 0.1
"""Share of the times that a trimmed mean of a report leaves out at each end."""


def trim_mean(data: Iterable[float], trim_percent: float) -> float:
    """The mean without a share of the values at each end.

    As DeepSpeed's function of this name: at each end ``round(n * trim_percent)`` of ``n`` values are cut, a half
    rounded to the even number (``scipy.stats.trim_mean`` rounds down).

    Args:
        data: Values in any unit and order.
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
