"""Slopes that are more than noise, in series whose neighbours depend on each other."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_BLOCKS = 40
_LEAST_BLOCKS = 8
_TWO_SIDED_95 = 1.959964


class Trend(NamedTuple):
    """A straight line through a series."""

    growth: float
    """From its first value to its last, as a share of the first."""
    start: float
    """The line's first value."""
    end: float
    """Its last."""
    chance: float
    """Probability of such an order of values, or one that rises more, in a series without a trend."""
    rise_ci: tuple[float, float]
    """Where ``end - start`` lies with 95 % confidence."""


def trend_of(values: Floats) -> Trend | None:
    """The trend of values that follow each other at equal distances; None of too few.

    Theil's slope (the median of the slopes between pairs, Theil 1950, Sen 1968) of the medians of up to 40 blocks, and
    Mann-Kendall's test of it, its variance widened by how much blocks depend on their neighbours (Hamed and Rao 1998,
    with the autocorrelation of what is left when the line is taken off). The slope's interval is Sen's: as many of the
    ordered slopes on either side of their median as that variance admits.
    """
    blocks = np.array_split(np.asarray(values, dtype=np.float64), min(_BLOCKS, len(values)))
    if len(blocks) < _LEAST_BLOCKS:
        return None
    medians = np.array([np.median(block) for block in blocks])
    count = len(medians)
    # Blocks differ in length by one: a steep line through their numbers would leave a bend, as if neighbours depended.
    sizes = np.array([len(block) for block in blocks])
    at = np.cumsum(sizes) - (sizes + 1) / 2
    last = len(values) - 1
    low, high = np.triu_indices(count, 1)
    differences = medians[high] - medians[low]
    slopes = np.sort(differences / (at[high] - at[low]))
    slope = float(np.median(slopes))
    middle = float(np.median(medians - slope * at))
    start, end = middle, middle + slope * last
    left = medians - (middle + slope * at)
    score = float(np.sign(differences).sum())
    variance = count * (count - 1) * (2 * count + 5) / 18 * _widening(left)
    z = (score - np.sign(score)) / math.sqrt(variance)
    beside = _TWO_SIDED_95 * math.sqrt(variance)
    least = slopes[max(math.floor((len(slopes) - beside) / 2), 0)]
    most = slopes[min(math.ceil((len(slopes) + beside) / 2), len(slopes) - 1)]
    return Trend(
        growth=(end - start) / start if start > 0 else 0.0,
        start=start,
        end=end,
        chance=0.5 * math.erfc(z / math.sqrt(2)),
        rise_ci=(float(least) * last, float(most) * last),
    )


def _widening(left: Floats) -> float:
    # As if so many neighbours were one. Summed up to the first autocorrelation that is not above 0.
    count = len(left)
    centred = left - left.mean()
    power = float((centred**2).sum())
    if power <= 0:
        return 1.0
    total = 1.0
    for lag in range(1, count // 2):
        correlation = float((centred[lag:] * centred[:-lag]).sum()) / power
        if correlation <= 0:
            break
        total += 2 * (1 - lag / count) * correlation
    return total
