"""Series of steps: slopes and changes of level that are more than noise, periods, and the cause of slow steps."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.arrays import Floats
from deep500_timing._base.names import BATCH
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._views.findings._finding import named
from deep500_timing._views.findings._remedies import GC
from deep500_timing.runs._why import Parts, parts_of

if TYPE_CHECKING:
    from deep500_timing._views.findings._evidence import Evidence, StepSeries

CHANCE = 1e-4
"""Probability of a slope without a trend below which it is a trend."""
_NEAR = 0.02
"""The standard deviation from a line, as a share of its growth, up to which neighbours count each for itself: a random
walk leaves a quarter of it, a cache that fills a tenth."""
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
    with the autocorrelation of the residuals), unless they lie on the line.
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
    widening = 1.0 if left.std() < _NEAR * (end - start) else _widening(left)
    variance = count * (count - 1) * (2 * count + 5) / 18 * widening
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
    # Where fewest values lie on the wrong side.
    wrong = np.where((values[around] > middle) == rises, 1, -1)
    return int(around[0] + np.argmin(np.concatenate(([0], np.cumsum(wrong)))))


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


# --- the cause of slow steps ------------------------------------------------------------------------------------------

_MOST = 0.9
"""Share of the steps that must have something in common for it to be said."""
_MOSTLY = 0.6
"""Share of the excess that a cause must explain to be named."""
_PERIODIC = 0.6
"""Share of the steps that must lie on a period, and of its places that must be among them."""
_LOOKED_AT = 40
_ROWS = 20_000
"""Steps times ranks that are read."""


class SlowRegion(NamedTuple):
    """What takes longer."""

    region: str
    """Its name as a sentence can hold it."""
    rank: int | None
    """The rank on which it does, if it is one of several."""
    usual_s: float
    """Its median in usual steps."""
    slow_s: float
    """Its median in slow steps."""
    path: tuple[str, ...]
    """Empty for the time between the steps."""

    @property
    def text(self) -> str:
        """As ``"IO on rank 3"``."""
        return self.region if self.rank is None else f"{self.region} on rank {self.rank}"


def cause_of(
    evidence: Evidence, steps: StepSeries, slow: NDArray[Any], usual: NDArray[Any], *, typical: bool = False
) -> SlowRegion | None:
    """The region that explains most of what steps at slow places take beyond those at usual places, if one does.

    Waiting for a rank explains nothing where that rank's own time does. With ``typical``, medians are compared: a few
    outliers among many slow steps explain nothing then.
    """
    if evidence.run is None or not len(slow) or not len(usual):
        return None
    session = int(steps.sessions[slow[0]])
    most = max(min(_LOOKED_AT, _ROWS // max(len(evidence.ranks), 1)), 5)
    chosen = (of[steps.sessions[of] == session] for of in (slow, usual))
    sampled = [of[np.unique(np.linspace(0, len(of) - 1, min(most, len(of))).astype(int))] for of in chosen]
    if not all(map(len, sampled)):
        return None
    of_slow, of_usual = (steps.numbers[of].tolist() for of in sampled)
    parts = parts_of(evidence.run, [*of_slow, *of_usual], session)
    ranks = sorted({rank for rank, _ in parts.lengths})
    if not ranks:
        return None
    lengths = {
        step: max((parts.lengths.get((rank, step), 0) for rank in ranks), default=0) for step in (*of_slow, *of_usual)
    }

    def over_usual(of: dict[int, int]) -> float:
        both = [[of.get(step, 0) for step in chosen] for chosen in (of_slow, of_usual)]
        return float((np.median(both[0]) if typical else np.mean(both[0])) - np.median(both[1]))

    excess_ns = over_usual(lengths)
    if excess_ns <= 0:
        return None
    # A region may take longer by many small amounts in the regions inside it.
    each = _collections_as_one(parts.own)
    for own in (each, _with_inner(parts)):
        over = {key: over_usual(at) for key, at in own.items()}
        best = _best(evidence, over, excess_ns)
        if best is not None:
            break
    else:
        return None
    rank, path = best
    usual_s, slow_s = (float(np.median([own[best].get(step, 0) for step in of])) / 1e9 for of in (of_usual, of_slow))
    same = [other for other in ranks if over.get((other, path), 0.0) >= 0.5 * over[best]]
    names = tuple(split_path(path)) if path else ()
    name = named(names[-1]) if names else "the time between the steps"
    if own is each and path in parts.parents:
        name = f"the rest of {name}"
    return SlowRegion(name, rank if len(ranks) > 1 and len(same) == 1 else None, usual_s, slow_s, names)


def _collections_as_one(own: dict[tuple[int, str], dict[int, int]]) -> dict[tuple[int, str], dict[int, int]]:
    # They begin wherever an object is made.
    found, first = defaultdict[tuple[int, str], Counter[int]](Counter), dict[int, str]()
    for (rank, path), at in own.items():
        found[rank, first.setdefault(rank, path) if path and split_path(path)[-1] == GC else path].update(at)
    return {**found}


def _with_inner(parts: Parts) -> dict[tuple[int, str], dict[int, int]]:
    # The regions directly in the step, with the regions inside them.
    whole = defaultdict[tuple[int, str], Counter[int]](Counter)
    least = min((len(split_path(path)) for path in parts.parents), default=0) + 1
    for (rank, path), at in parts.own.items():
        whole[rank, path_text(tuple(split_path(path)[:least]))].update(at)
    return {**whole}


def _best(evidence: Evidence, over: dict[tuple[int, str], float], excess_ns: float) -> tuple[int, str] | None:
    # Work comes before waiting, which is an effect.
    work = {key: ns for key, ns in over.items() if not key[1] or split_path(key[1])[-1] not in evidence.waits}
    for among in (work, over):
        best = max(among, key=lambda key: (among[key], -key[0], key[1]), default=None)
        if best is not None and among[best] >= _MOSTLY * excess_ns:
            return best
    return None


class Shared(NamedTuple):
    """What some steps have in common."""

    text: str = ""
    """A clause; empty if they share nothing."""
    begins_epoch: bool = False
    """Whether a region around the steps, or an epoch, begins with each of them."""


def shared_by(evidence: Evidence, steps: StepSeries, places: NDArray[Any]) -> Shared:
    """Common properties of the steps at some places: what precedes each, or their period."""
    before = _before_each(evidence, steps, places)
    # A region that ends before a step says more than a region that begins with it.
    for (begins, name), count in sorted(before.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
        if count >= _MOST * len(places):
            if begins:
                return Shared(f"each the first of {named(name)}", begins_epoch=True)
            return Shared(f"each after {named(name)}", begins_epoch=name.startswith("EPOCH"))
    return Shared(period_of(steps.numbers[places].tolist(), int(steps.numbers.max())))


def _before_each(evidence: Evidence, steps: StepSeries, places: NDArray[Any]) -> dict[tuple[bool, str], int]:
    # How many of the steps follow a region outside BATCH that ended after the start of the step before; with True one
    # around BATCH that began then. What precedes nearly every step is left out.
    node = evidence.step_node
    if node is None:
        return {}
    moments: dict[tuple[bool, str], list[float]] = defaultdict(list)
    for row in evidence.rows(
        f"select path, start_ns, dur_ns from intervals where {evidence.mine}"
        f"and depth < {len(node.path)} and region <> {literal(BATCH)}"
    ):
        path = tuple(split_path(row["path"]))
        begins = path == node.path[: len(path)]
        moments[begins, path[-1]].append((row["start_ns"] + (0 if begins else row["dur_ns"])) / 1e9)
    starts = np.concatenate(([-np.inf], steps.starts_s))
    found = {}
    for which, at in moments.items():
        if len(at) <= 0.5 * len(steps.starts_s):
            first, end = (np.searchsorted(np.sort(at), of) for of in (starts[places], starts[places + 1] + 1e-9))
            found[which] = int((end > first).sum())
    return found


def period_of(numbers: list[int], last: int) -> str:
    """A clause on the period of some steps, empty without one: most of them lie on it, and it has few gaps.

    The steps' numbers rise; ``last`` is the number of the last step of all.
    """
    if len(numbers) < 3:
        return ""
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return "one after the other"
    for period, _ in Counter(after - before for before, after in pairwise(numbers) if after > before).most_common(3):
        if period < 2:
            continue
        phase, hits = Counter(number % period for number in numbers).most_common(1)[0]
        first = next(number for number in numbers if number % period == phase)
        expected = (last - first) // period + 1
        if (
            hits >= (3 if hits == len(numbers) else 4)
            and hits >= _PERIODIC * len(numbers)
            and hits >= _PERIODIC * expected
        ):
            return f"every {period} steps" if hits == len(numbers) else f"{hits} of them every {period} steps"
    return ""
