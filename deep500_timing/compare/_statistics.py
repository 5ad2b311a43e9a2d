"""The tests behind a comparison: t tests on logarithms, sequential looks, several regions, the power of an experiment.

Every effect is a difference of natural logarithms; ``math.expm1`` makes a share of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deep500_timing._base.require import require

ALPHA = 0.05
"""The false alarms that "slower" is allowed, over all looks. "Faster" is allowed the same."""
FEWEST_PAIRS = 3
"""Before the first look. Fewer pairs give no answer."""
_FIRST, _BETWEEN = 0.007, 0.004
_NOISIER = 0.05
"""Level of the F test that tells that an experiment is noisier than the noise floor."""
POWER = 0.95
_MOST_PAIRS = 1000


@dataclass(frozen=True)
class Spread:
    """An estimate of a variance."""

    variance: float
    df: int


@dataclass(frozen=True)
class Estimate:
    """A difference of logarithms with its uncertainty."""

    log_ratio: float
    error: float
    df: float

    @property
    def slower_p(self) -> float:
        return self._p(self.log_ratio)

    @property
    def faster_p(self) -> float:
        return self._p(-self.log_ratio)

    def _p(self, effect: float) -> float:
        if self.error == 0:
            return 0.5 if effect == 0 else float(effect < 0)
        return float(_special().stdtr(self.df, -effect / self.error))

    def interval(self, level: float = ALPHA) -> tuple[float, float]:
        """The logarithms between which the effect lies; each side is wrong with the probability ``level``."""
        width = float(_special().stdtrit(self.df, 1 - level)) * self.error
        return self.log_ratio - width, self.log_ratio + width


def _special() -> Any:
    return require("scipy.special", extra="compare", caller="Comparing runs")


def mean_and_spread(values: Sequence[float]) -> tuple[float, Spread]:
    """The mean, and the variance of the values around it."""
    mean = math.fsum(values) / len(values)
    df = len(values) - 1
    return mean, Spread(math.fsum((value - mean) ** 2 for value in values) / df if df else math.nan, df)


def pool(own: Spread, floor: Spread | None) -> Spread:
    """The variance of an experiment together with that of the machine's noise floor.

    The two are weighted by their degrees of freedom. An F test at 5 % guards against a floor that is too quiet: where
    the experiment is noisier, its own variance counts alone.
    """
    if floor is None:
        return own
    if own.variance > 0 and floor.variance > 0:
        p = float(_special().fdtrc(own.df, floor.df, own.variance / floor.variance))
        if p < _NOISIER:
            return own
    elif own.variance > 0:
        return own
    df = own.df + floor.df
    return Spread((own.variance * own.df + floor.variance * floor.df) / df, df)


def paired(differences: Sequence[float], floor: Spread | None = None) -> Estimate:
    """Student's paired t: the mean of the logarithms of B / A over the pairs."""
    mean, own = mean_and_spread(differences)
    spread = pool(own, floor)
    return Estimate(mean, math.sqrt(spread.variance / len(differences)), spread.df)


def welch(a: Sequence[float], b: Sequence[float]) -> Estimate:
    """Welch's t on the logarithms of runs of one session; at least two a side."""
    (mean_a, of_a), (mean_b, of_b) = mean_and_spread(a), mean_and_spread(b)
    part_a, part_b = of_a.variance / len(a), of_b.variance / len(b)
    error = part_a + part_b
    df = of_a.df + of_b.df if error == 0 else error**2 / (part_a**2 / of_a.df + part_b**2 / of_b.df)
    return Estimate(mean_b - mean_a, math.sqrt(error), df)


def across_sessions(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> Estimate:
    """Student's t with the session as the unit.

    A session's mean varies with the session and with its runs. The variance of the means of sessions covers both, for
    sessions of as many runs as the average one; sessions of B with fewer runs get the difference added.
    """
    means_a, means_b = [math.fsum(s) / len(s) for s in a], [math.fsum(s) / len(s) for s in b]
    squares = df = 0.0
    for means in (means_a, means_b):
        if len(means) > 1:
            _, spread = mean_and_spread(means)
            squares, df = squares + spread.variance * spread.df, df + spread.df
    variance = squares / df
    within = [mean_and_spread(session)[1] for session in (*a, *b) if len(session) > 1]
    runs_df = sum(spread.df for spread in within)
    of_runs = sum(spread.variance * spread.df for spread in within) / runs_df if runs_df else 0.0
    per_run_a, per_run_b = (sum(1 / len(s) for s in side) / len(side) for side in (a, b))
    fewer = max(per_run_b - per_run_a, 0.0) * of_runs
    error = variance / len(a) + (variance + fewer) / len(b)
    return Estimate(math.fsum(means_b) / len(b) - math.fsum(means_a) / len(a), math.sqrt(error), df)


def level_of_look(pairs: int, most: int) -> float:
    """The level of the look after so many pairs. The levels of all looks of an experiment add up to :data:`ALPHA`.

    0.007 goes to the first look, 0.004 in equal parts to those between, the rest to the last one. A sum of levels
    bounds the false alarms, however the looks depend on each other (Bonferroni).
    """
    if pairs < FEWEST_PAIRS:
        return 0.0
    if pairs >= most:
        spent = (_FIRST if most > FEWEST_PAIRS else 0) + (_BETWEEN if most > FEWEST_PAIRS + 1 else 0)
        return ALPHA - spent
    return _FIRST if pairs == FEWEST_PAIRS else _BETWEEN / (most - FEWEST_PAIRS - 1)


def settled(logs: Sequence[float], most: int, part: float = 1.0) -> Estimate | None:
    """The test of the pairs so far, if it shows a difference in either direction; None before the first look as well.

    Args:
        logs: The logarithm of B / A of each pair.
        most: The most pairs.
        part: The part of :data:`ALPHA` that this question has of all that are asked together.
    """
    if len(logs) < FEWEST_PAIRS:
        return None
    found = paired(logs)
    return found if min(found.slower_p, found.faster_p) < level_of_look(len(logs), most) * part else None


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, after Holm (1979)."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(order):
        worst = max(worst, min((len(order) - rank) * p_values[place], 1.0))
        adjusted[place] = worst
    return adjusted


def smallest_effect(spread: Spread, pairs: int, extra_df: int = 0) -> float:
    """The slowdown, as a logarithm, that the last look of so many pairs finds in 95 % of the experiments.

    A noise floor adds its degrees of freedom, ``extra_df``, to those of the pairs.
    """
    df = pairs - 1 + extra_df
    limit = _special().stdtrit(df, 1 - level_of_look(pairs, pairs))
    return float(_special().nctdtrinc(df, 1 - POWER, limit)) * math.sqrt(spread.variance / pairs)


def pairs_needed(effect: float, spread: Spread, extra_df: int = 0) -> int | None:
    """How many pairs find a slowdown in 95 % of the experiments; None if a thousand do not."""
    counts = range(FEWEST_PAIRS, _MOST_PAIRS + 1)
    place = bisect_left(counts, True, key=lambda pairs: smallest_effect(spread, pairs, extra_df) <= effect)
    return counts[place] if place < len(counts) else None
