"""The tests behind a comparison: t tests on logarithms, sequential looks, several regions, the power of an experiment.

Every effect is a difference of natural logarithms; ``math.expm1`` makes a share of it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import require
from deep500_timing.compare._runs import STEP, NotComparableError, sessions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deep500_timing.compare._runs import RunTimes


_LEAST = 3
_FEWEST = 8
"""Points of a history. Of seven, a permutation in 17 splits as well as the best one, which is above 5 %."""
_PERMUTATIONS = 999
_MOST = 400
"""The newest points that are looked at; the permutations of more take minutes."""


@dataclass(frozen=True)
class Change:
    """A point from which on a series has another level."""

    index: int
    """The first point of the new level."""
    p: float
    """By permutation: (r + 1) / (R + 1), where r of R permutations split at least as well."""


def change_points(values: Sequence[float], *, level: float = 0.05, seed: int = 0) -> list[Change]:
    """Divide a series where its distribution changes (E-divisive: Matteson and James 2014).

    A segment is split where the energy distance between its two parts is largest, if fewer than ``level`` of its
    permutations have a split as good; then each part is looked at in the same way.
    """
    series = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(seed)
    found: list[Change] = []
    ahead = [(0, len(series))]
    while ahead:
        first, end = ahead.pop()
        if end - first < _FEWEST:
            continue
        distances = np.abs(np.subtract.outer(series[first:end], series[first:end]))
        best, at = _best_split(distances)
        as_good = 0
        for _ in range(_PERMUTATIONS):
            order = random.permutation(end - first)
            as_good += _best_split(distances[np.ix_(order, order)])[0] >= best * (1 - 1e-12)
            if as_good + 1 > level * (_PERMUTATIONS + 1):
                break  # not significant already
        p = (as_good + 1) / (_PERMUTATIONS + 1)
        if best > 0 and p <= level:
            found.append(Change(first + at, p))
            ahead += [(first, first + at), (first + at, end)]
    return sorted(found, key=lambda change: change.index)


def _best_split(distances: NDArray[np.float64]) -> tuple[float, int]:
    # The energy statistic of every split at once, from sums over the leading blocks of the matrix of distances.
    count = len(distances)
    at = np.arange(_LEAST, count - _LEAST + 1)
    rest = count - at
    rows = np.cumsum(distances.sum(axis=1))
    blocks = np.cumsum(np.cumsum(distances, axis=0), axis=1)
    left, upper, whole = blocks[at - 1, at - 1], rows[at - 1], rows[-1]
    between, right = upper - left, whole - 2 * upper + left
    energy = 2 * between / (at * rest) - left / (at * (at - 1)) - right / (rest * (rest - 1))
    statistic = at * rest / count * energy
    place = int(np.argmax(statistic))
    return float(statistic[place]), int(at[place])


@dataclass(frozen=True)
class Level:
    """A stretch of the history without a change."""

    first: RunTimes
    last: RunTimes
    points: int
    """How many; each is a run, or the runs of a session."""
    seconds: float
    change: float | None
    """Against the stretch before; None for the first."""
    p: float | None
    region: str | None
    """The region that changed most in seconds."""


def history(runs: Sequence[RunTimes], *, path: str = STEP) -> tuple[list[Level], str]:
    """The stretches of a history, and what its points are.

    The runs of a session share its bias, so a point is a session where there are several; of one session, a run.
    """
    having = sorted((run for run in runs if path in run.times), key=lambda run: run.start_unix_s or 0.0)
    sessions = sessions_of(having)
    unit = "session" if len(sessions) > 1 else "run"
    if len(sessions) > 1:
        points = sorted(sessions, key=lambda one: one[0].start_unix_s or 0.0)[-_MOST:]
    else:
        points = [[run] for run in having][-_MOST:]
    if len(points) < _FEWEST:
        raise NotComparableError(
            f"The history has {len(points)} {unit}{'s' if len(points) != 1 else ''}; a change takes {_FEWEST}."
        )
    logs = [math.fsum(math.log(run.times[path]) for run in point) / len(point) for point in points]
    changes = change_points(logs)
    starts = [0, *(change.index for change in changes), len(points)]
    levels: list[Level] = []
    for number, (first, end) in enumerate(pairwise(starts)):
        seconds = math.exp(math.fsum(logs[first:end]) / (end - first))
        change = p = region = None
        if number:
            change, p = seconds / levels[-1].seconds - 1, changes[number - 1].p
            region = _most_changed(points[starts[number - 1] : first], points[first:end], change)
        levels.append(Level(points[first][0], points[end - 1][-1], end - first, seconds, change, p, region))
    return levels, unit


def _most_changed(
    before: Sequence[Sequence[RunTimes]], after: Sequence[Sequence[RunTimes]], change: float
) -> str | None:
    sides = [[run for point in side for run in point] for side in (before, after)]
    common = set.intersection(*(set(run.regions) for side in sides for run in side))
    leaves = [path for path in sorted(common) if not any(other.startswith(path + "/") for other in common)]
    means = [{path: float(np.mean([run.regions[path] for run in side])) for path in leaves} for side in sides]
    sign = 1 if change > 0 else -1
    return max(leaves, key=lambda path: sign * (means[1][path] - means[0][path]), default=None)


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


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, after Holm (1979)."""
    adjusted, worst = [1.0] * len(p_values), 0.0
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    for rank, place in enumerate(order):
        worst = max(worst, min((len(order) - rank) * p_values[place], 1.0))
        adjusted[place] = worst
    return adjusted


def power_of(effect: float, spread: Spread, pairs: int, *, floor: Spread | None = None) -> float:
    """The probability that the last look of so many pairs finds a slowdown."""
    df = pairs - 1 + (floor.df if floor else 0)
    if spread.variance == 0:
        return float(effect > 0)
    limit = float(_special().stdtrit(df, 1 - level_of_look(pairs, pairs)))
    return 1 - float(_special().nctdtr(df, effect / math.sqrt(spread.variance / pairs), limit))


def pairs_needed(effect: float, spread: Spread, *, floor: Spread | None = None) -> int | None:
    """How many pairs find a slowdown in 95 % of the experiments; None if a thousand do not."""
    counts = range(FEWEST_PAIRS, _MOST_PAIRS + 1)
    place = bisect_left(counts, POWER, key=lambda pairs: power_of(effect, spread, pairs, floor=floor))
    return counts[place] if place < len(counts) else None


def smallest_effect(spread: Spread, pairs: int, *, floor: Spread | None = None) -> float:
    """The slowdown, as a logarithm, that so many pairs find in 95 % of the experiments."""
    df = pairs - 1 + (floor.df if floor else 0)
    limit = _special().stdtrit(df, 1 - level_of_look(pairs, pairs))
    return float(_special().nctdtrinc(df, 1 - POWER, limit)) * math.sqrt(spread.variance / pairs)
