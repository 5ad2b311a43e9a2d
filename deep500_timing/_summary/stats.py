"""Statistics of times: the numbers that a report shows, and how they are computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from deep500_timing._base.arrays import Int64Array
from deep500_timing.exceptions import NoTimesError

OrderStatistics = Callable[[Sequence[int]], Sequence[float]]
"""Gives the rank-th smallest times in ns, ranks from 1."""


class Later:
    """A frozen data class with some fields computed when one of them is read."""

    __slots__ = ("_later",)

    _later: Callable[[], dict[str, Any]]

    @classmethod
    def later(cls, compute: Callable[[], dict[str, Any]], **known: Any) -> Self:
        """Make one of the fields that are known and a function that gives the others, which two threads may call."""
        made = object.__new__(cls)
        object.__setattr__(made, "_later", compute)
        for name, value in known.items():
            object.__setattr__(made, name, value)
        return made

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Only for a field that has no value yet, or a name that is no field.
            if name in type(self).__dataclass_fields__:
                for field_name, value in self._later().items():
                    object.__setattr__(self, field_name, value)
                object.__setattr__(self, "_later", dict)
            return object.__getattribute__(self, name)


@dataclass(frozen=True, slots=True)
class TimeStats(Later):
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
    ordered = np.sort(durations_ns)
    total_ns = int(ordered.sum())
    moments = n, total_ns, int(ordered[0]), int(ordered[-1]), squared_deviations(ordered, total_ns / n)
    return time_stats(*moments, lambda: (in_order(ordered), 0.0), skipped=skipped)


def in_order(ordered: Int64Array) -> OrderStatistics:
    """The order statistics of times that are all known and sorted."""
    return lambda ranks: ordered[np.subtract(ranks, 1)].tolist()


def time_stats(
    count: int,
    total_ns: int,
    min_ns: int,
    max_ns: int,
    m2_ns2: float,
    order_statistics: Callable[[], tuple[OrderStatistics, float]],
    *,
    skipped: int,
) -> TimeStats:
    """The statistics of times with these moments, which must not be empty.

    Args:
        count: How many there are.
        total_ns: Their sum.
        min_ns: The shortest.
        max_ns: The longest.
        m2_ns2: The sum of squared deviations from the mean.
        order_statistics: Called when a quantile is read first: gives the order statistics and their relative error.
        skipped: Warm-up times.
    """
    return TimeStats.later(
        lambda: _of_order(count, *order_statistics()),
        min=min_ns / 1e9,
        mean=total_ns / count / 1e9,
        max=max_ns / 1e9,
        stdev=math.sqrt(m2_ns2 / (count - 1)) / 1e9 if count > 1 else 0.0,
        count=count,
        total=total_ns / 1e9,
        skipped=skipped,
    )


def _of_order(count: int, order_statistics: OrderStatistics, error: float) -> dict[str, Any]:
    quantiles = zip(QUANTILES, quantiles_of(count, QUANTILES.values(), order_statistics), strict=True)
    interval, ranks = None, median_confidence_ranks(count)
    if ranks is not None:
        low_ns, high_ns = order_statistics(ranks)
        interval = low_ns / 1e9, high_ns / 1e9
    return {**{name: value / 1e9 for name, value in quantiles}, "median_ci": interval, "quantile_error": error}


def quantiles_of(count: int, shares: Iterable[float], order_statistics: OrderStatistics) -> list[float]:
    """The quantiles at these shares (0 to 1), linear between order statistics, rounded as numpy.percentile rounds."""
    positions = [share * (count - 1) for share in shares]
    lows = [int(position) for position in positions]
    around = order_statistics([rank for low in lows for rank in (low + 1, min(low + 2, count))])
    found = []
    for position, low, first, second in zip(positions, lows, around[::2], around[1::2], strict=True):
        part, step = position - low, second - first
        found.append(first + step * part if part < 0.5 else second - step * (1 - part))
    return found


def squared_deviations(values: Int64Array, mean: float) -> float:
    deviations = values - mean
    # Their product with themselves would wake the threads of BLAS, which the program may need.
    return float(np.square(deviations, out=deviations).sum())


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
