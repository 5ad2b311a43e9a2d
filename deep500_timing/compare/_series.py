"""Runs in a row: where a history changes its level, and what larger world sizes lose.

Neither decides whether B is slower than A. Both name the region in which the difference is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
from numpy.typing import NDArray

from deep500_timing._summary.text import format_time, lines_of, safe_name
from deep500_timing.compare._runs import OF_STEP, STEP, NotComparableError, RunTimes, common_paths, sessions_of
from deep500_timing.compare._text import began, percent

_LEAST = 3
_FEWEST = 8
"""Points of a history. Of seven, a permutation in 17 splits as well as the best one, which is above 5 %."""
_PERMUTATIONS = 999
_LEVEL = 0.05
_MOST = 400
"""The newest points that are looked at; the permutations of more take minutes."""


def change_points(values: Sequence[float]) -> list[tuple[int, float]]:
    """Divide a series where its distribution changes (E-divisive: Matteson and James 2014).

    A segment is split where the energy distance between its two parts is largest, if fewer than 5 % of its
    permutations have a split as good; then each part is looked at in the same way.

    Returns:
        The first point of each new level, and its p-value: (r + 1) / (R + 1), where r of R permutations split at least
        as well.
    """
    series = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    found: list[tuple[int, float]] = []
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
            if as_good + 1 > _LEVEL * (_PERMUTATIONS + 1):
                break  # not significant already
        p = (as_good + 1) / (_PERMUTATIONS + 1)
        if best > 0 and p <= _LEVEL:
            found.append((first + at, p))
            ahead += [(first, first + at), (first + at, end)]
    return sorted(found)


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
    points, unit = sessions_of(having), "session"
    if len(points) < 2:
        points, unit = [[run] for run in having], "run"
    points = points[-_MOST:]
    if len(points) < _FEWEST:
        raise NotComparableError(
            f"The history has {len(points)} {unit}{'s' if len(points) != 1 else ''}; a change shows from {_FEWEST} on."
        )
    logs = [math.fsum(math.log(run.times[path]) for run in point) / len(point) for point in points]
    changes = change_points(logs)
    starts = [0, *(index for index, _ in changes), len(points)]
    levels: list[Level] = []
    before: list[RunTimes] = []
    for number, (first, end) in enumerate(pairwise(starts)):
        stretch = list(chain.from_iterable(points[first:end]))
        seconds = math.exp(math.fsum(logs[first:end]) / (end - first))
        change = p = region = None
        if levels:
            change, p = seconds / levels[-1].seconds - 1, changes[number - 1][1]
            grown = _growth(before, stretch)
            region = (max if change > 0 else min)(grown, key=lambda path: grown[path], default=None)
        levels.append(Level(stretch[0], stretch[-1], end - first, seconds, change, p, region))
        before = stretch
    return levels, unit


def draw_history(levels: Sequence[Level], unit: str, left_out: int) -> str:
    """A sentence and a table for the terminal."""
    slower = [one for one in levels if (one.change or 0) > 0]
    text = "No run made it slower."
    if slower:
        text = f"{safe_name(slower[-1].first.name)} made it slower: {percent(slower[-1].change)}."
        text += f" Most of it is in {safe_name(slower[-1].region)}." if slower[-1].region else ""
    rows = [("from run", "began (UTC)", f"{unit}s", "step", "change", "p", "most in")]
    for one in levels:
        p = "" if one.p is None else f"{one.p:.3f}"
        row = (safe_name(one.first.name), began(one.first), str(one.points), format_time(one.seconds))
        rows.append((*row, percent(one.change), p, safe_name(one.region or "")))
    note = f"Method: E-divisive with a permutation test at 5 %; a point is a {unit}."
    note += f" Left out: {left_out} without enough steps." if left_out else ""
    return "\n".join([text, "", *lines_of(rows, left=2), "", note])


# --- world sizes ------------------------------------------------------------------------------------------------------

_SAMPLES = "attribute samples_per_step"
"""The attribute of a run that says how many samples a step of all ranks processes."""


@dataclass(frozen=True)
class WorldSize:
    """The runs of one world size, against those of the smallest."""

    ranks: int
    step_s: float
    rate: float
    """Samples a second where the runs say how many a step has; else rank-steps a second."""
    efficiency: float
    """Rate over the rate of the smallest world size, for each rank."""
    lost_s: float
    """Seconds a step beyond those at the efficiency 1."""
    region: str | None
    """The region that grew most, in seconds a step."""
    region_share: float | None
    """Its growth over ``lost_s``."""


def scaling(sides: Sequence[Sequence[RunTimes]]) -> list[WorldSize]:
    """Compare runs of different world sizes.

    A rank has the same work in each run (weak scaling), unless the attribute ``samples_per_step`` says otherwise.
    """
    by_size: dict[int, list[RunTimes]] = {}
    for run in (run for side in sides for run in side):
        if run.world_size is None:
            raise NotComparableError(f"{run.name}: a scaling experiment requires runs with a world size.")
        by_size.setdefault(run.world_size, []).append(run)
    if len(by_size) < 2:
        raise NotComparableError(
            f"All runs have the world size {next(iter(by_size))}. Name two sides; quote a pattern for several runs."
        )
    base_ranks = min(by_size)
    base = by_size[base_ranks]
    found = []
    for ranks, runs in sorted(by_size.items()):
        amount, base_amount = _samples(runs), _samples(base)
        if amount is None or base_amount is None:
            amount, base_amount = float(ranks), float(base_ranks)
        work = (amount / ranks) / (base_amount / base_ranks)
        step_s = _typical(runs)[STEP]
        efficiency = work * _typical(base)[STEP] / step_s
        lost_s = step_s * (1 - efficiency)
        grown = _growth(base, runs, work)
        region = max(grown, key=lambda path: grown[path], default=None)
        if region is not None and (lost_s <= 0 or grown[region] <= 0):
            region = None
        share = None if region is None else grown[region] / lost_s
        found.append(WorldSize(ranks, step_s, amount / step_s, efficiency, lost_s, region, share))
    return found


def _samples(runs: Sequence[RunTimes]) -> float | None:
    texts = {run.facts.get(_SAMPLES) for run in runs}
    try:
        return float(texts.pop() or "") if len(texts) == 1 else None
    except ValueError:
        return None


def draw_scaling(found: Sequence[WorldSize]) -> str:
    """A sentence and a table for the terminal."""
    base, last = found[0], found[-1]
    text = f"From {base.ranks} to {last.ranks} ranks the efficiency is {percent(last.efficiency, sign=False)}."
    if last.region is not None:
        text += f" {safe_name(last.region)} takes {percent(last.region_share, sign=False)} of the loss"
        text += f" ({format_time(last.lost_s)} a step)."
    rows = [("ranks", "step", "efficiency", "lost a step", "most in")]
    for one in found:
        lost = format_time(one.lost_s) if one is not base else ""
        row = (str(one.ranks), format_time(one.step_s), percent(one.efficiency, sign=False), lost)
        rows.append((*row, safe_name(one.region or "")))
    note = "A rank has the same work in each run, unless the attribute samples_per_step says otherwise."
    return "\n".join([text, "", *lines_of(rows, left=1), "", note])


# --- what grew --------------------------------------------------------------------------------------------------------


def _typical(runs: Sequence[RunTimes]) -> dict[str, float]:
    """Of each time that all runs have, the geometric mean."""
    return {
        path: math.exp(math.fsum(math.log(run.times[path]) for run in runs) / len(runs)) for path in common_paths(runs)
    }


def _growth(before: Sequence[RunTimes], after: Sequence[RunTimes], work: float = 1.0) -> dict[str, float]:
    """How much longer the innermost regions take, in seconds a step, beyond so many times the work."""
    old, new = _typical(before), _typical(after)
    regions = (old.keys() | new.keys()) - {*OF_STEP}
    leaves = [path for path in sorted(regions) if not any(other.startswith(path + "/") for other in regions)]
    return {path: new.get(path, 0.0) - work * old.get(path, 0.0) for path in leaves}
