"""Which of the last runs made it slower: change points of a series, by E-divisive."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing.compare._runs import STEP, NotComparableError, sessions_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deep500_timing.compare._runs import RunTimes

_LEAST = 3
"""Values in a segment."""
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
        if end - first < 2 * _LEAST:
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
class Point:
    """One point of the history: a run, or the runs of a session."""

    runs: tuple[RunTimes, ...]
    log_s: float
    """The mean of the logarithms of the runs' medians."""


@dataclass(frozen=True)
class Level:
    """A stretch of the history without a change."""

    first: Point
    last: Point
    points: int
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
    groups = (
        sorted(sessions, key=lambda one: one[0].start_unix_s or 0.0) if len(sessions) > 1 else [[r] for r in having]
    )
    points = [Point(tuple(g), math.fsum(math.log(r.times[path]) for r in g) / len(g)) for g in groups][-_MOST:]
    if len(points) < 2 * _LEAST:
        raise NotComparableError(
            f"The history has {len(points)} {unit}{'s' if len(points) != 1 else ''}; it takes {2 * _LEAST} to see a "
            "change."
        )
    changes = change_points([point.log_s for point in points])
    starts = [0, *(change.index for change in changes), len(points)]
    levels: list[Level] = []
    for number, (first, end) in enumerate(pairwise(starts)):
        here = points[first:end]
        mean = math.fsum(point.log_s for point in here) / len(here)
        if number == 0:
            levels.append(Level(here[0], here[-1], len(here), math.exp(mean), None, None, None))
            continue
        before = points[starts[number - 1] : first]
        change = math.exp(mean) / levels[-1].seconds - 1
        region = _most_changed(before, here, change)
        levels.append(Level(here[0], here[-1], len(here), math.exp(mean), change, changes[number - 1].p, region))
    return levels, unit


def _most_changed(before: Sequence[Point], after: Sequence[Point], change: float) -> str | None:
    sides = [[run for point in side for run in point.runs] for side in (before, after)]
    common = set.intersection(*(set(run.regions) for side in sides for run in side))
    leaves = [path for path in sorted(common) if not any(other.startswith(path + "/") for other in common)]
    means = [{path: float(np.mean([run.regions[path] for run in side])) for path in leaves} for side in sides]
    sign = 1 if change > 0 else -1
    return max(leaves, key=lambda path: sign * (means[1][path] - means[0][path]), default=None)
