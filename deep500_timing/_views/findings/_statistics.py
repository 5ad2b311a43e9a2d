"""Slopes and changes of level that are more than noise, in series with dependent neighbours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

CHANCE = 1e-4
"""Probability of a slope without a trend below which it is a trend."""
_BLOCKS = 40
_LEAST_BLOCKS = 8
_LEAST_OF_SHIFT = 60
_LEAST_STRETCH = 3
"""Least blocks of a stretch."""
_APART = 0.9
"""Share of the blocks that must lie on their side of the middle between two levels."""
_LEAST_Z = 8.0
"""Standard errors between two levels: the stretch is the best of some 800."""


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


def trend_of(values: Floats) -> Trend | None:
    """The trend of values that follow each other at equal distances; None of too few.

    Theil's slope (the median of the slopes between pairs, Theil 1950, Sen 1968) of the medians of up to 40 blocks, and
    Mann-Kendall's test of it, its variance widened by how much blocks depend on their neighbours (Hamed and Rao 1998,
    with the autocorrelation of the residuals).
    """
    blocks = np.array_split(np.asarray(values, dtype=np.float64), min(_BLOCKS, len(values)))
    if len(blocks) < _LEAST_BLOCKS:
        return None
    medians = np.array([np.median(block) for block in blocks])
    count = len(medians)
    # Blocks differ in length by one: a steep line through their numbers would leave a bend, as if neighbours depended.
    sizes = np.array([len(block) for block in blocks])
    at = np.cumsum(sizes) - (sizes + 1) / 2
    low, high = np.triu_indices(count, 1)
    differences = medians[high] - medians[low]
    slope = float(np.median(differences / (at[high] - at[low])))
    middle = float(np.median(medians - slope * at))
    start, end = middle, middle + slope * (len(values) - 1)
    left = medians - (middle + slope * at)
    score = float(np.sign(differences).sum())
    variance = count * (count - 1) * (2 * count + 5) / 18 * _widening(left)
    z = (score - np.sign(score)) / math.sqrt(variance)
    growth = (end - start) / start if start > 0 else 0.0
    return Trend(growth, start, end, chance=0.5 * math.erfc(z / math.sqrt(2)))


class Shift(NamedTuple):
    """A stretch of a series with a higher level."""

    first: int
    """The place of its first value."""
    end: int
    """The place after its last one."""
    usual: float
    """The median outside it."""
    level: float
    """The median inside it."""


def shift_of(values: Floats) -> Shift | None:
    """The stretch of values that are higher than the others, if the step explains them better than a slope does.

    The medians of up to 40 blocks are divided into a stretch and the others so that the sum of squares between the two
    is largest. The difference must be eight standard errors, widened by how neighbours depend on each other, and nine
    blocks of ten must lie on their side of the middle. A stretch from the first value on is a start, and no shift.
    """
    values = np.asarray(values, dtype=np.float64)
    if len(values) < _LEAST_OF_SHIFT:
        return None
    blocks = np.array_split(np.arange(len(values)), _BLOCKS)
    medians = np.array([np.median(values[block]) for block in blocks])
    sums, count = np.concatenate(([0.0], np.cumsum(medians))), len(medians)
    first, end = np.triu_indices(count + 1, _LEAST_STRETCH)
    kept = (first > 0) & (count - (end - first) >= _LEAST_STRETCH)
    first, end = first[kept], end[kept]
    inside = end - first
    means = (sums[end] - sums[first]) / inside
    others = (sums[-1] - sums[end] + sums[first]) / (count - inside)
    best = int(np.argmax(np.where(means > others, inside * (count - inside) * (means - others) ** 2, 0.0)))
    stretch = np.zeros(count, dtype=np.bool_)
    stretch[first[best] : end[best]] = True
    level, usual = float(np.median(medians[stretch])), float(np.median(medians[~stretch]))
    middle = (level + usual) / 2
    if level <= usual or min(np.mean(medians[stretch] > middle), np.mean(medians[~stretch] < middle)) < _APART:
        return None
    left = medians - np.where(stretch, means[best], others[best])
    error = float(left.std()) * math.sqrt(_widening(left) * count / (inside[best] * (count - inside[best])))
    line = np.polynomial.Polynomial.fit(np.arange(count), medians, 1)
    if level - usual < _LEAST_Z * error or (left**2).sum() > 0.5 * ((medians - line(np.arange(count))) ** 2).sum():
        return None
    edges = [
        _edge(values, blocks, int(place), middle, rises=rises)
        for place, rises in ((first[best], True), (end[best], False))
    ]
    return Shift(edges[0], edges[1], usual, level) if edges[0] else None


def _edge(values: Floats, blocks: list[NDArray[np.int64]], place: int, middle: float, *, rises: bool) -> int:
    # The place at which a level begins or ends, within the blocks on either side.
    if place == len(blocks):
        return len(values)
    around = np.concatenate((blocks[place - 1], blocks[place]))
    high = values[around] > middle
    wrong = np.concatenate(([0], np.cumsum(high == rises))) + np.concatenate(
        (np.cumsum((high != rises)[::-1])[::-1], [0])
    )
    return int(around[0] + int(np.argmin(wrong)))


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
