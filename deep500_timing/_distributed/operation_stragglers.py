"""Which rank is late, if the evidence is there: a test against chance, and a lateness that stands out from the jitter.

In a synchronizing operation each rank waits for the last one to come. Some rank always waits least, so that alone names
somebody in any noise. A rank is named here only if

- **chance does not explain it.** Either it comes later than the others too often (the mean of its place in the order
  of arrival, against the 1/2 of ranks that are alike: a z-test with the variance that a place then has,
  (n + 1) / 12 (n - 1); of two ranks Wilcoxon's signed-rank test of the difference), or it comes last too often (a
  binomial test against 1/n); in all operations, or in the few that hold most of the waiting. These tests are corrected
  for their number and that of the ranks (Bonferroni), at :data:`LEVEL` together. Neighbours in time are dependent:
  their number is divided by the autocorrelation time of the places, or of how late each rank is where places hardly
  change (Sokal's estimate, Monte Carlo Methods in Statistical Mechanics, 1989, pooled over the ranks, and half a
  standard error more; and at least what the first autocorrelation, freed of its bias in short series, amounts to), and
  :data:`LEAST_OPERATIONS` must remain;
- **it matters.** How much later it typically comes than the median of the others is at least :data:`JITTER_SHARE` of
  what that varies by from operation to operation, and :data:`TRANSFER_SHARE` of the transfer. Or, for a rank that is
  late now and then, what it costs is :data:`COST_RATIO` times what any other costs on average, and that share of the
  transfer.

The figures are checked by simulation in ``benchmarks/stragglers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

LEVEL = 0.005
"""Probability of naming any rank where all are alike, for each comparison."""
LEAST_OPERATIONS = 16
"""Operations that count as independent which must be left for a verdict."""
JITTER_SHARE = 0.5
"""Lateness that stands out, as a share of its own spread (1.4826 times the median absolute deviation)."""
TRANSFER_SHARE = 0.25
"""Lateness or cost that matters, as a share of the transfer: of the shortest time of any rank, on average."""
COST_RATIO = 3.0
"""What a rank costs that is late now and then, against the mean of the others."""
COSTLY_SHARE = 0.8
"""Share of all waiting that makes operations the costly ones, which are looked at by themselves if they are few."""
_TESTS = 4
"""By place and by coming last, of all operations and of the costly ones."""
_CONSTANT_SHARE = 0.25
"""Variance of places that hardly change, as a share of that of ranks which are alike."""
_WINDOW = 5.0
"""Sokal's window: autocorrelations are summed up to so many times the autocorrelation time."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What operations that the same ranks took part in say about who is late. Times are in seconds."""

    operations: int
    """How many were compared."""
    judged: int
    """Of how many of them this speaks: all, or the few that hold most of the waiting."""
    independent_operations: float
    """As how many independent ones they count."""
    rank: int | None
    """Which of the ranks is late, as an index into those compared; None if none is, or nobody can tell."""
    last_share: float
    """Share of those in which it came last; 1 / n is chance. 0 if there is none."""
    lateness_s: float
    """How much later than the median of the others it typically came; 0 if there is none."""
    cost_s: float
    """How much later each operation began on average because of it alone; 0 if there is none."""
    chance: float
    """Probability that ranks which are all alike make one of them look as late as the latest does here."""
    waiting_s: float
    """How long a rank waited for the last one in an operation, the mean over ranks and operations."""

    @property
    def enough(self) -> bool:
        """Whether there were enough operations to tell."""
        return self.independent_operations >= LEAST_OPERATIONS


def find_late_rank(durations_ns: ArrayLike) -> Verdict:
    """Which rank is late in synchronizing operations.

    Args:
        durations_ns: Time of each operation on each rank in ns, of shape (operations, ranks), in the order of time.

    Returns:
        The verdict; of fewer than two ranks or no operations one that names nobody.
    """
    import numpy as np

    durations = np.asarray(durations_ns, dtype=np.float64)
    operations, ranks = durations.shape if durations.ndim == 2 else (0, 0)
    if ranks < 2 or operations < 1:
        return Verdict(operations, operations, 0.0, None, 0.0, 0.0, 0.0, 1.0, 0.0)
    found = _judge(durations)
    costly = _costly(durations)
    if found.rank is not None or costly is None:
        return found
    among = _judge(costly)
    if among.rank is None:
        return found
    share = among.operations / operations
    return replace(among, operations=operations, cost_s=among.cost_s * share, waiting_s=found.waiting_s)


def _costly(durations: Floats) -> Floats | None:
    # The operations that hold most of the waiting, if they are a minority: of many in a step, the one that begins it.
    # Which they are has nothing to do with who is waited for.
    import numpy as np

    waiting = durations.sum(axis=1) - durations.shape[1] * durations.min(axis=1)
    order = np.argsort(-waiting, kind="stable")
    count = int(np.searchsorted(np.cumsum(waiting[order]), COSTLY_SHARE * waiting.sum())) + 1
    return durations[np.sort(order[:count])] if 2 * count < len(durations) else None


def _judge(durations: Floats) -> Verdict:
    import numpy as np

    operations, ranks = durations.shape
    shortest = durations.min(axis=1)
    waits = durations - shortest[:, None]
    waiting_s = float(waits.mean()) / 1e9
    places = _places(waits)
    correlated = autocorrelation_time(places)
    # How late each rank is, compared with the other operations: its place among them.
    order = _order(np.median(waits, axis=1, keepdims=True) - waits)
    correlated = max(correlated, _memory(order))
    if float(places.var(axis=0).mean()) < _CONSTANT_SHARE * (ranks + 1) / (12 * (ranks - 1)):
        # Places that hardly change say nothing of whether that is so by nature or for a while: how late each is does.
        correlated = max(correlated, autocorrelation_time(order))
    independent = operations / correlated
    last = (waits == 0) / (waits == 0).sum(axis=1, keepdims=True)
    scores = _pair_scores(waits, independent) if ranks == 2 else _place_scores(places, independent)
    chances = _chances(scores, last.mean(axis=0), independent, ranks)
    chance = float(chances.min())
    nobody = Verdict(operations, operations, independent, None, 0.0, 0.0, 0.0, chance, waiting_s)
    if independent < LEAST_OPERATIONS or chance > LEVEL:
        return nobody
    # Only the last one's coming is waited for: without it an operation would have begun when the one before it came.
    costs = (last * np.partition(waits, 1, axis=1)[:, 1:2]).mean(axis=0)
    transfer = float(shortest.mean())
    best, best_cost = None, -1.0
    for rank in np.flatnonzero(chances <= LEVEL).tolist():
        lateness = _lateness(waits, rank)
        if costs[rank] > best_cost and _matters(lateness, costs, rank, transfer):
            best = (rank, float(np.median(lateness)))
            best_cost = float(costs[rank])
    if best is None:
        return nobody
    named, typical = best
    share = float(last[:, named].mean())
    return replace(nobody, rank=named, last_share=share, lateness_s=typical / 1e9, cost_s=best_cost / 1e9)


def autocorrelation_time(series: Any) -> float:
    """Over how many neighbours in time a value is correlated: the variance of the mean is so many times larger.

    Args:
        series: Of shape (time, series); their autocorrelations are pooled.

    Returns:
        Half a standard error above the estimate, at least 1; the length of the series if that is too short to tell.
    """
    import numpy as np

    length = len(series)
    centred = series - series.mean(axis=0)
    size = 1 << (2 * length - 1).bit_length()
    spectrum = np.abs(np.fft.rfft(centred, size, axis=0)) ** 2
    covariance = np.fft.irfft(spectrum.sum(axis=1), size)[:length]
    if covariance[0] <= 1e-12 * length:
        return 1.0  # each rank is always at the same place
    sums = 2 * np.cumsum(covariance / covariance[0]) - 1
    lags = np.arange(length)
    beyond = np.flatnonzero(lags >= _WINDOW * sums)
    lag = int(beyond[0]) if beyond.size else length - 1
    # The mean that was taken off takes a part of each autocorrelation with it.
    kept = 1 - (2 * lag + 1) / length
    if kept <= 0:
        return float(length)
    estimate = max(float(sums[lag]) / kept, 1.0)
    # Places of n ranks are n - 1 series, since they add up to a constant.
    error = math.sqrt(2 * (2 * lag + 1) / (length * max(series.shape[1] - 1, 1)))
    return min(estimate * (1 + error / 2), float(length))


def _order(series: Floats) -> Floats:
    import numpy as np

    return np.argsort(np.argsort(series, axis=0, kind="stable"), axis=0, kind="stable").astype(np.float64)


def _memory(order: Floats) -> float:
    # A short piece of a series looks less correlated than it is: what is slower than the piece is taken for its mean.
    # The first autocorrelation suffers least, and its bias is known (Kendall, Note on bias in the estimation of
    # autocorrelation, Biometrika 41, 1954): it tells over how many neighbours a series that forgets at a constant rate
    # is correlated. Of few ranks, which are few series, this alone is enough to be cautious.
    length = len(order)
    centred = order - (length - 1) / 2
    first = float((centred[1:] * centred[:-1]).sum() / max(float((centred * centred).sum()), 1.0))
    first += (1 + 3 * first) / length
    return min(max((1 + first) / max(1 - first, 1 / length), 1.0), float(length))


def _places(waits: Floats) -> Floats:
    # Place of each rank in the order of arrival, from 0, the first, to 1, the last; ties share the mean.
    import numpy as np

    ranks = waits.shape[1]
    order = np.argsort(-waits, axis=1, kind="stable")
    places = np.empty_like(waits)
    np.put_along_axis(places, order, np.arange(ranks, dtype=np.float64)[None, :], axis=1)
    ordered = np.take_along_axis(waits, order, axis=1)
    tied = np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))
    for row in tied:
        _, inverse, counts = np.unique(-waits[row], return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        places[row] = ((ends - counts) + (ends - 1))[inverse] / 2
    return np.asarray(places / (ranks - 1))


def _place_scores(places: Floats, independent: float) -> Floats:
    # By how many standard deviations the mean place of each rank is later than that of ranks which are all alike.
    import numpy as np

    ranks = places.shape[1]
    deviation = math.sqrt((ranks + 1) / (12 * (ranks - 1)) / independent)
    return np.asarray((places.mean(axis=0) - 0.5) / deviation)


def _pair_scores(waits: Floats, independent: float) -> Floats:
    # Of two ranks the difference is symmetric if they are alike, so that its size tells as well: Wilcoxon's test.
    import numpy as np

    later = waits[:, 1] - waits[:, 0]
    count = len(later)
    sizes = np.argsort(np.argsort(np.abs(later))) + 1.0
    total = float((np.sign(later) * sizes).sum())
    deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 6 * count / independent)
    return np.asarray([total / deviation, -total / deviation])


def _chances(scores: Floats, last: Floats, independent: float, ranks: int) -> Floats:
    # For each rank the corrected probability, if all are alike, that it came so late or last so often.
    import numpy as np

    normal = NormalDist()
    by_place = [1 - normal.cdf(score) for score in scores]
    count = max(int(independent), 1)
    by_last = [binomial_tail(count, share * count, 1 / ranks) for share in last]
    return np.asarray(np.minimum(1.0, _TESTS * ranks * np.minimum(by_place, by_last)))


def binomial_tail(trials: int, successes: float, probability: float) -> float:
    """Probability of so many successes or more (rounded down, which is on the side of caution)."""
    first = int(successes + 1e-9)
    if first <= 0:
        return 1.0
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(first + 1)
        - math.lgamma(trials - first + 1)
        + first * math.log(probability)
        + (trials - first) * math.log1p(-probability)
    )
    term = total = math.exp(log_term)
    odds = probability / (1 - probability)
    for k in range(first, trials):
        term *= (trials - k) / (k + 1) * odds
        total += term
        if term < 1e-17 * total:
            break
    return min(total, 1.0)


def _lateness(waits: Floats, rank: int) -> Floats:
    # By how much a rank came later than the median of the others, in each operation.
    import numpy as np

    others: Floats = np.median(np.delete(waits, rank, axis=1), axis=1)
    return others - waits[:, rank]


def _matters(lateness: Floats, costs: Floats, rank: int, transfer: float) -> bool:
    import numpy as np

    typical = float(np.median(lateness))
    spread = 1.4826 * float(np.median(np.abs(lateness - typical)))
    if typical > 0 and typical >= JITTER_SHARE * spread and typical >= TRANSFER_SHARE * transfer:
        return True
    others = float(np.delete(costs, rank).mean())
    return bool(costs[rank] >= COST_RATIO * others and costs[rank] >= TRANSFER_SHARE * transfer)
