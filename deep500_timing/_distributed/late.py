"""Which rank is late, and why: one judgement, for steps with regions and for operations alone.

Ranks meet in synchronizing operations. The rank that waits least there is the one that the others waited for. So
**lateness** is taken from the waits, and the **own time** of a region is its time without the waits inside it.

Each rank's typical lateness, and its typical excess in each region, is a trimmed mean over steps. Two things make it
vary where nothing is wrong:

- noise from step to step. Its variance comes from the Winsorized series (Yuen, Biometrika 61, 1974), times the
  autocorrelation time; the number of independent steps sets the degrees of freedom;
- lasting differences between ranks. From :data:`MANY_RANKS` ranks on, the spread of the other ranks gives both sources
  at once. Of fewer ranks, the differences are pooled over regions, relative to each region's time. Operations alone
  have no regions to pool, so there a lateness must exceed the jitter as well.

A rank's deviation from the others is an externally studentized residual, which is compared with Student's t. Ranks are
removed one by one, latest first (generalized ESD, Rosner, Technometrics 25, 1983), so that two late ranks do not hide
each other. Hosts are compared before ranks, and ranks with the others of their host. All tests together name a rank
with probability :data:`LEVEL` if nothing is wrong. A named rank must also be late by :data:`LEAST_SHARE` of a step,
come last no less often than chance, and be late in most parts of the run.

The cause is the region with the largest excess, if that is significant and explains :data:`EXPLAINED` of the lateness.

Error rates in simulated worlds: ``benchmarks/STRAGGLERS.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import BACKWARD, COMM, FORWARD, IO
from deep500_timing._distributed.autocorrelation import correlated_steps
from deep500_timing._distributed.verdict import LEAST_OPERATIONS, SLOW_STEP, Stragglers, Verdict, WhatIf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    ByRegion = dict[str, dict[int, float]]

LEVEL = 0.006
"""Probability of naming any rank where nothing is wrong, all tests together."""
LEAST_SHARE = 0.01
"""Lateness that matters, as a share of a step."""
EXPLAINED = 0.5
"""Share of the lateness that the cause explains at least."""
LEAST_STEPS = LEAST_OPERATIONS
"""Steps or operations that a verdict needs."""
LEAST_WINDOWS = 0.6
"""Share of the parts of a run in which a rank must be late."""
WINDOWS = 8
"""Parts into which the steps are divided."""
MANY_RANKS = 16
"""From this many ranks on, the other ranks alone tell how much ranks differ."""
FEW_RANKS = 4
"""Below this many ranks, a rank is compared with the mean of the others, since a median would follow it."""
USUAL_SHARE, USUAL_WEIGHT = 0.01, 2.0
"""Ranks of like hardware differ by about this share of a region's time. It counts as this many degrees of freedom."""
JITTER_SHARE, JITTER_WEIGHT = 0.6, 4.0
"""In operations alone, ranks are taken to differ by this share of the spread from operation to operation, likewise."""
TRANSFER_SHARE = 0.25
"""Lateness that matters in operations alone, as a share of the transfer: of the shortest time, on average."""
COSTLY_SHARE = 0.5
"""Operations that wait longer than the others are judged by themselves if they hold this share of all waiting."""
_TRIM = 0.2
"""Share of the steps that a typical value leaves out at each end."""
_SMALL_REGION = 0.005
"""Regions below this share of a step do not tell how ranks differ."""
_FEW_STEPS = 4.0
"""Least number of independent steps that enters a variance."""
_APART = 4.0
"""Distance of the costly operations from the others, in units of their spread. Two parts of normal noise have 2.7."""
_LAST_SHARE = 0.9
"""Share of the costly operations in which a late rank comes last."""
_UNLIKE = 4.0
"""How many times the median rank's variance counts as noise; more is a rank that has become late."""
_RARE_LEVEL = 0.001
"""Probability of listing any rank as late now and then where all ranks are alike."""
_RARE_SHARE = 0.1
"""How late a rank is in a step that counts as late now and then, as a share of a step."""
CAUSES = {
    IO: "IO",
    FORWARD: "compute",
    BACKWARD: "compute",
    "OPTIMIZER": "compute",
    COMM: "communication",
}
"""The cause by the region's name in capitals; ``"host"`` for any other region and for time outside all regions."""
REST = "the rest"
"""The name of what lies outside all regions."""


@dataclass(frozen=True)
class Steps:
    """Times of the ranks, step by step, in seconds. A step may be a window of several, as their mean."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """The host of each rank; empty where it is unknown."""
    numbers: tuple[int, ...]
    """The number of each step."""
    regions: tuple[str, ...]
    """Empty for operations alone."""
    lateness: Floats
    """Shape ``(steps, ranks)``: how long after a common moment each rank came to the meeting."""
    own: Floats
    """Shape ``(steps, ranks, regions)``: the region's time without the waits inside it."""
    step_s: float
    """The typical length of a step; 0 for operations alone."""
    met_at: str = ""
    """Where the ranks meet, in words."""
    least: int = LEAST_STEPS
    """Steps that a verdict needs."""
    one_clock: bool = True
    """Whether waits and own times are of one clock. If not, no cause is named."""


def steps_of_operations(ranks: tuple[int, ...], durations_s: Floats, *, met_at: str) -> Steps:
    """Operations as steps without regions.

    Args:
        ranks: The participants of all operations.
        durations_s: Of shape (operations, ranks), in the order of time.
        met_at: Where the ranks meet, in words.
    """
    import numpy as np

    return Steps(
        ranks=ranks,
        hosts=("",) * len(ranks),
        numbers=tuple(range(len(durations_s))),
        regions=(),
        lateness=-np.asarray(durations_s, dtype=np.float64),
        own=np.zeros((len(durations_s), len(ranks), 0)),
        step_s=0.0,
        met_at=met_at,
    )


def judge(steps: Steps) -> Stragglers:
    """Name the late rank or host in these steps, and the cause."""
    if steps.regions:
        return _judge(steps)
    whole = _judge(steps)
    costly = _costly_operations(steps)
    if whole.ranks or costly is None:
        return whole
    among = _judge(costly)
    # Chosen operations are less evidence, so the late rank must be the last one nearly always.
    if among.last_share < _LAST_SHARE or among.operations is None or whole.operations is None:
        return whole
    share = among.steps / whole.steps
    operations = replace(
        whole.operations,
        judged=among.steps,
        cost_s=among.operations.cost_s * share,
        chance=among.operations.chance,
        independent_operations=among.operations.independent_operations,
    )
    what_if = WhatIf(operations.cost_s, operations.waiting_s)
    return replace(among, steps=whole.steps, operations=operations, what_if=what_if)


def _judge(steps: Steps) -> Stragglers:
    import numpy as np

    count, ranks = steps.lateness.shape if steps.lateness.ndim == 2 else (0, 0)
    common: dict[str, Any] = {"steps": count, "step_s": steps.step_s, "met_at": steps.met_at}
    if not steps.regions:
        common["operations"] = Verdict(count, count, 0.0, 1.0, 0.0, 0.0)
    if ranks < 2:
        return Stragglers("unknown", reason="there is one rank", **common)
    what = "steps" if steps.regions else "operations"
    late = steps.lateness - np.median(steps.lateness, axis=1, keepdims=True)
    own = steps.own - np.median(steps.own, axis=1, keepdims=True)
    if count:
        common["lateness"] = dict(zip(steps.ranks, np.median(late, axis=0).tolist(), strict=True))
    # Of two ranks the median is halfway to the late one; the other came as it did.
    spread = late.max(axis=1) - (late.min(axis=1) if ranks == 2 else 0.0)
    all_alike = float(spread.mean()) if count else 0.0
    waiting = float((steps.lateness.max(axis=1, keepdims=True) - steps.lateness).mean()) if count else 0.0
    if not steps.regions:
        all_alike = waiting
        common["operations"] = Verdict(count, count, float(count), 1.0, 0.0, waiting)
    if count < steps.least:
        reason = f"{count} {what} are too few, {steps.least} are the least"
        return Stragglers("unknown", reason=reason, what_if=WhatIf(0.0, all_alike), **common)
    if steps.regions:
        common["slow_steps"] = _slow_steps(steps, late)
        common["intermittent"] = _intermittent(steps, late)
        common["relative"], common["individual"], common["excess"] = _scores(steps, own)
    found = None
    # First the whole run, then its last third, for a rank that has become late.
    for first in (0, 2 * count // 3):
        if first and count - first < steps.least:
            continue
        found = _find(steps, first, LEVEL / 2)
        if found.ranks:
            break
    assert found is not None
    if not steps.regions:
        common["operations"] = Verdict(count, count, found.independent, found.chance, 0.0, waiting)
    if not found.ranks:
        what_if = WhatIf(0.0, all_alike)
        return Stragglers("nobody", reason=found.reason, bound_s=found.bound, what_if=what_if, **common)
    named = list(found.ranks)
    saved = _saved(late[found.first :], named)
    if not steps.regions:
        common["operations"] = replace(common["operations"], cost_s=saved)
    region, excess = found.cause if steps.one_clock else (None, 0.0)
    grows, since = _course(steps, late[:, named[0]], found.bound)
    kind = "node" if found.host is not None else "rank" if len(named) == 1 else "ranks"
    return Stragglers(
        kind,
        ranks=tuple(steps.ranks[rank] for rank in named),
        host=found.host,
        region=region,
        cause=None if region is None else CAUSES.get(region.upper(), "host"),
        lateness_s=found.lateness,
        last_share=float((late[found.first :].argmax(axis=1) == named[0]).mean()),
        excess_s=excess,
        bound_s=found.bound,
        since=since,
        grows=grows,
        what_if=WhatIf(saved, all_alike),
        **common,
    )


@dataclass(slots=True)
class _Found:
    ranks: list[int]
    """As indices, the latest first."""
    lateness: float = 0.0
    """Of the latest."""
    bound: float = 0.0
    chance: float = 1.0
    independent: float = 0.0
    """Independent steps."""
    host: str | None = None
    cause: tuple[str | None, float] = (None, 0.0)
    first: int = 0
    """The first step that was judged."""
    reason: str = "no rank stands out from the differences between ranks"


@dataclass(slots=True)
class _Field:
    """One quantity of each rank or host: its lateness, or its excess in one region."""

    typical: Floats
    """Shape ``(ranks,)``."""
    noise: Floats
    """Variance of the typical values by noise from step to step."""
    freedom: float
    """Degrees of freedom of that variance."""
    base: float
    """The time to which lasting differences are relative."""

    def take(self, chosen: Any) -> _Field:
        return _Field(self.typical[chosen], self.noise[chosen], self.freedom, self.base)


def _field(series: Floats, base: float, ranks: int, correlated: float | None = None) -> _Field:
    # A trimmed mean over steps, with the variance of the Winsorized series.
    import numpy as np

    count = len(series)
    cut = int(_TRIM * count)
    ordered = np.partition(series, (cut, count - 1 - cut), axis=0)
    typical = ordered[cut : count - cut].mean(axis=0)
    # A lateness that grows evenly is no noise. Medians of halves, since spikes would tilt a line of least squares.
    middle = count // 2
    rises = np.median(series[middle:], axis=0) - np.median(series[:middle], axis=0)
    moment = (np.arange(count) - (count - 1) / 2) / max(count / 2, 1)
    rest = series - moment.reshape(-1, *[1] * (series.ndim - 1)) * rises
    ordered = np.partition(rest, (cut, count - 1 - cut), axis=0)
    clipped = np.clip(rest, ordered[cut], ordered[count - 1 - cut])
    variance = clipped.var(axis=0)
    if correlated is None:
        # Without the ranks that vary most: one that has become late does not make all look correlated.
        quiet = np.sort(np.argsort(variance, kind="stable")[: ranks - (ranks // 8 + 1) * (ranks >= FEW_RANKS)])
        correlated = correlated_steps(clipped[:, quiet])
    independent = max(count / correlated, 1.0)
    kept = (count - 2 * cut) / count
    if ranks >= FEW_RANKS:
        variance = np.clip(variance, np.median(variance), _UNLIKE * np.median(variance))
    noise = variance * count / max(count - 1, 1) / (kept**2 * max(independent, _FEW_STEPS))
    # The ranks' noise is alike, so that all of them tell how large it is; half of that is trusted.
    freedom = max(kept * independent - 1, 1.0) * max((ranks - 1) / 2, 1.0)
    return _Field(typical, noise, freedom, base)


def _against_others(series: Floats) -> Floats:
    # Each rank against the others, step by step.
    import numpy as np

    ranks = series.shape[1]
    if ranks < FEW_RANKS:
        return np.asarray((series - series.mean(axis=1, keepdims=True)) * ranks / (ranks - 1))
    return np.asarray(series - np.median(series, axis=1, keepdims=True))


def _groups(steps: Steps) -> list[list[int]]:
    hosts: dict[str, list[int]] = {}
    for place, host in enumerate(steps.hosts):
        hosts.setdefault(host, []).append(place)
    return list(hosts.values())


def _find(steps: Steps, first: int, level: float) -> _Found:
    groups = _groups(steps)
    by_host = len(groups) > 1 and min(map(len, groups)) >= 2 and steps.step_s > 0
    if by_host:
        found = _late_host(steps, first, level / 2, groups)
        if found.ranks:
            return found
        level /= 2
    return _late_ranks(steps, first, level, groups if by_host and min(map(len, groups)) >= FEW_RANKS else None)


def _late_host(steps: Steps, first: int, level: float, groups: list[list[int]]) -> _Found:
    import numpy as np

    lateness = steps.lateness[first:]
    of_host = np.stack([np.median(lateness[:, group], axis=1) for group in groups], axis=1)
    hosts = _field(_against_others(of_host), 0.0, len(groups))
    # How much ranks of one host differ, of which a host has many.
    within = np.stack([lateness[:, r] - of_host[:, place] for place, group in enumerate(groups) for r in group], axis=1)
    residuals = _field(within, 0.0, len(steps.ranks), 1.0).typical
    freedom = len(steps.ranks) - len(groups)
    differ = float((residuals**2).sum()) / freedom
    size = np.array([len(group) for group in groups])
    lasting = np.asarray(differ * math.pi / 2 / size)
    scores = _scores_of(hosts.typical, hosts.noise + lasting, lasting, freedom, hosts.freedom)
    place = int(scores.argmax())
    bound = _critical(level, len(groups))
    late = float(hosts.typical[place] - np.delete(hosts.typical, place).mean() * (len(groups) >= FEW_RANKS))
    if scores[place] <= bound or late <= LEAST_SHARE * steps.step_s:
        return _Found([], first=first)
    # Most ranks of the host are late, so that it is the host and not one of its ranks.
    others = np.median(np.delete(of_host, place, axis=1), axis=1, keepdims=True)
    typical = _field(lateness[:, groups[place]] - others, 0.0, 1, 1.0).typical
    if (typical > late / 2).mean() < 0.75:
        return _Found([], first=first)
    named = [groups[place][index] for index in np.argsort(-typical, kind="stable")]
    if not _persists(lateness[:, named[0]] - others[:, 0], late / 4):
        return _Found([], first=first)
    excess = np.median(steps.own[first:, groups[place]], axis=1) - np.median(
        np.delete(steps.own[first:], groups[place], axis=1), axis=1
    )
    fields = _field(excess, 0.0, len(groups)) if excess.shape[1] else None
    cause: tuple[str | None, float] = (None, 0.0)
    if fields is not None:
        region = int(fields.typical.argmax())
        over = float(fields.typical[region])
        if over >= EXPLAINED * late and over > 3 * math.sqrt(float(fields.noise[region])):
            cause = (steps.regions[region], over)
    least = bound * math.sqrt(float(hosts.noise[place] + lasting[place]))
    least = max(least, LEAST_SHARE * steps.step_s)
    return _Found(named, late, least, host=steps.hosts[named[0]], cause=cause, first=first)


def _late_ranks(steps: Steps, first: int, level: float, groups: list[list[int]] | None) -> _Found:
    import numpy as np

    lateness, own = steps.lateness[first:], steps.own[first:]
    ranks = len(steps.ranks)
    base = np.median(np.median(own, axis=0), axis=0)
    late, over = _against_others(lateness), _against_others(own)
    if groups is not None:
        within = _within(lateness, groups)
        if _jitter(_field(within, 0.0, ranks, 1.0).typical) < 0.8 * _jitter(_field(late, 0.0, ranks, 1.0).typical):
            # Ranks of a host come alike. The medians of few ranks have heavier tails than those of all.
            late, over, level = within, _within(own, groups), level / 3
    # What lateness is relative to: the regions, or the jitter.
    size = math.sqrt(float((base**2).sum())) if len(base) else _jitter(late)
    fields = [_field(late, size, ranks)]
    regions = [place for place, size in enumerate(base.tolist()) if size >= _SMALL_REGION * steps.step_s > 0]
    fields += [_field(over[:, :, place], float(base[place]), ranks) for place in regions]
    independent = len(lateness) / correlated_steps(late)
    found = _Found([], first=first, independent=independent, bound=LEAST_SHARE * steps.step_s)
    remaining = list(range(ranks))
    candidates: list[int] = []
    kept = 0
    for _ in range(max(1, (ranks - 1) // 3)):
        chosen = [field.take(remaining) for field in fields]
        scores = np.stack([_score(chosen, which, steps) for which in range(len(chosen))])
        # A rank is late if it comes late; a region only tells which one.
        scores[:, chosen[0].typical <= 0] = -np.inf
        bound = _critical(level, len(remaining) * len(chosen))
        place = int(scores.max(axis=0).argmax())
        best = float(scores[:, place].max())
        if not candidates:
            found.chance = min(1.0, len(remaining) * len(chosen) * 0.5 * math.erfc(best / math.sqrt(2)))
        candidates.append(remaining.pop(place))
        if best > bound:
            kept = len(candidates)
        if len(remaining) < 2:
            break
    others = [rank for rank in range(ranks) if rank not in candidates[:kept]]
    middle = float(np.median(fields[0].typical[others])) if ranks >= FEW_RANKS else 0.0
    over_others = fields[0].typical - middle
    least = _least(steps, first)
    named: list[int] = []
    for rank in sorted(candidates[:kept], key=lambda rank: -over_others[rank]):
        # Compared without the ranks that are later.
        present = [other for other in range(ranks) if other not in named]
        if (
            over_others[rank] >= least
            and not _rarely_last(lateness[:, present], present.index(rank))
            and _persists(late[:, rank] - middle, 0.5 * over_others[rank])
        ):
            named.append(rank)
    # The bound by lateness alone; a region may tell it from less.
    top = int(fields[0].typical.argmax())
    score = float(_score(fields, 0, steps)[top])
    if score > 0:
        least_lateness = float(over_others[top]) * _critical(level, ranks * len(fields)) / score
        found.bound = max(least, least_lateness if not named else min(least_lateness, float(over_others[named[-1]])))
    if not named:
        if kept:
            found.reason = "the rank that stands out is late by too little, or for a short time"
        return found
    found.ranks, found.lateness = named, float(over_others[named[0]])
    found.cause = _cause(steps, [field.take([named[0], *others]) for field in fields], regions, found.lateness)
    return found


def _rarely_last(lateness: Floats, rank: int) -> bool:
    # Whether a rank comes last less often than chance: its lateness is nothing the others wait for.
    count, ranks = lateness.shape
    expected = count / ranks
    last = int((lateness.argmax(axis=1) == rank).sum())
    return bool(last < expected - 1.5 * math.sqrt(expected))


def _score(fields: list[_Field], which: int, steps: Steps) -> Floats:
    # By how many standard deviations of a normal distribution each rank stands out from the others.
    import numpy as np

    field = fields[which]
    ranks = len(field.typical)
    if ranks >= MANY_RANKS:
        total, squares = field.typical.sum(), (field.typical**2).sum()
        mean = (total - field.typical) / (ranks - 1)
        variance = (squares - field.typical**2 - (ranks - 1) * mean**2) / (ranks - 2)
        variance = np.maximum(variance, 1e-30)
        deviation = (field.typical - mean) / np.sqrt(variance * ranks / (ranks - 1))
        return _normal(deviation, ranks - 2)
    if len(fields) > 1:
        relative, freedom = _relative(fields, which)
        squared = relative * field.base**2
    else:
        squared, freedom = _among_others(field)
    # Of two and three ranks, the values are differences already.
    lasting = squared * {2: 1.0, 3: 2 / 3}.get(ranks, 1 + 1 / (ranks - 1))
    noise = field.noise * (1 + 1 / max(ranks - 1, 1) * (ranks >= FEW_RANKS))
    centre = _mean_of_others(field.typical) if ranks >= FEW_RANKS else np.zeros(ranks)
    return _scores_of(field.typical - centre, noise + lasting, lasting, freedom, field.freedom, centred=True)


def _mean_of_others(values: Floats) -> Floats:
    import numpy as np

    return np.asarray((values.sum() - values) / (len(values) - 1))


def _relative(fields: list[_Field], which: int) -> tuple[Floats, Floats]:
    # Variance of lasting differences relative to a region's time, without the rank in question, and its degrees of
    # freedom. Of two ranks, from the regions other than the one in question.
    import numpy as np

    ranks = len(fields[0].typical)
    values = np.stack([field.typical / field.base for field in fields[1:]])
    # A difference from the mean of so many others.
    usual = USUAL_SHARE**2 * {2: 2.0, 3: 1.5}.get(ranks, 1.0)
    if ranks == 2:
        squares = np.sort((np.delete(values[:, 0], which - 1) if which else values[:, 0]) ** 2)
        # Lateness has some region as its cause: the one that differs most is left out.
        kept = squares if which else squares[:-1]
        found, freedom = np.full(2, kept.sum()), float(len(kept))
    else:
        # The sum of squared deviations of the other ranks from their mean.
        rest = values.sum(axis=1, keepdims=True) - values
        squares = (values**2).sum(axis=1, keepdims=True) - values**2
        found = np.maximum(squares - rest**2 / (ranks - 1), 0.0).sum(axis=0)
        freedom = float(len(values) * (ranks - 2))
        usual *= {3: 1.5}.get(ranks, 1.0)  # of two differences from means, not of two ranks
    together = freedom + USUAL_WEIGHT
    return (found + USUAL_WEIGHT * usual) / together, np.full(ranks, together)


def _among_others(field: _Field) -> tuple[Floats, Floats]:
    # The same of operations alone: from the other ranks, and from the jitter.
    import numpy as np

    ranks = len(field.typical)
    usual = (JITTER_SHARE * field.base) ** 2 * {3: 1.5}.get(ranks, 1.0)
    rest = _mean_of_others(field.typical)
    squares = ((field.typical**2).sum() - field.typical**2) - (ranks - 1) * rest**2
    together = max(ranks - 2, 0) + JITTER_WEIGHT
    return (np.maximum(squares, 0.0) + JITTER_WEIGHT * usual) / together, np.full(ranks, together)


def _scores_of(
    values: Floats, variance: Floats, lasting: Floats, freedom: Any, noise_freedom: float, *, centred: bool = False
) -> Floats:
    import numpy as np

    if not centred and len(values) >= FEW_RANKS:
        values = values - _mean_of_others(values)
    variance = np.maximum(variance, 1e-30)
    noise = variance - lasting
    # Satterthwaite, Biometrics Bulletin 2, 1946.
    with np.errstate(invalid="ignore", over="ignore"):
        together = variance**2 / np.maximum(lasting**2 / freedom + noise**2 / noise_freedom, 1e-300)
        found = _normal(values / np.sqrt(variance), np.maximum(np.nan_to_num(together, nan=1.0), 1.0))
    return np.asarray(np.nan_to_num(found, nan=-np.inf))


def _normal(t: Any, freedom: Any) -> Floats:
    """The normal deviate with the same tail as a value of Student's t (Wallace, Ann. Math. Stat. 30, 1959)."""
    import numpy as np

    return np.asarray(np.sign(t) * (8 * freedom + 1) / (8 * freedom + 3) * np.sqrt(freedom * np.log1p(t * t / freedom)))


def _critical(level: float, tests: int) -> float:
    return NormalDist().inv_cdf(1 - level / tests)


def _least(steps: Steps, first: int) -> float:
    # From which lateness on a rank matters.
    if steps.step_s > 0:
        return LEAST_SHARE * steps.step_s
    transfer = float((-steps.lateness[first:]).min(axis=1).mean())
    return TRANSFER_SHARE * transfer


def _jitter(values: Floats) -> float:
    import numpy as np

    return 1.4826 * float(np.median(np.abs(values - np.median(values, axis=0))))


def _within(series: Floats, groups: list[list[int]]) -> Floats:
    # Each rank against the median of its host, step by step.
    import numpy as np

    found = series.copy()
    for group in groups:
        found[:, group] -= np.median(series[:, group], axis=1, keepdims=True)
    return found


def _cause(steps: Steps, fields: list[_Field], regions: list[int], lateness: float) -> tuple[str | None, float]:
    # The late rank is the first one.
    if len(fields) < 2:
        return None, 0.0
    over = [
        float(field.typical[0] - (field.typical[1:].mean() if len(field.typical) >= FEW_RANKS else 0.0))
        for field in fields[1:]
    ]
    place = max(range(len(over)), key=over.__getitem__)
    score = float(_score(fields, place + 1, steps)[0])
    if over[place] < EXPLAINED * lateness or score < 2:
        return None, 0.0
    return steps.regions[regions[place]], over[place]


def _saved(late: Floats, named: list[int]) -> float:
    # How much earlier all would meet, on average, if the named ranks came as the others typically do.
    import numpy as np

    others = np.setdiff1d(np.arange(late.shape[1]), named)
    typical = float(np.median(np.median(late[:, others], axis=0)))
    without = late.copy()
    for rank in named:
        without[:, rank] -= max(float(np.median(late[:, rank])) - typical, 0.0)
    return float((late.max(axis=1) - without.max(axis=1)).mean())


def _windows(series: Floats) -> Floats:
    import numpy as np

    parts = np.array_split(series, min(WINDOWS, max(len(series) // 4, 1)))
    return np.array([np.median(part, axis=0) for part in parts])


def _persists(series: Floats, above: float) -> bool:
    return float((_windows(series) > above).mean()) >= LEAST_WINDOWS


def _course(steps: Steps, series: Floats, bound: float) -> tuple[bool, int | None]:
    # Whether lateness grows all along, and from which step on there is any.
    import numpy as np

    windows = _windows(series)
    if len(windows) < 4:
        return False, None
    late = windows > bound / 2
    first = int(np.argmax(late))
    since = None
    if first and late[first:].all():
        since = steps.numbers[int(np.array_split(np.arange(len(series)), len(windows))[first][0])]
    rises = np.sign(windows[None, :] - windows[:, None])[np.triu_indices(len(windows), 1)]
    half = len(windows) // 2
    # Kendall's tau, and a difference that matters; a step up is no drift.
    steep = float(windows[half:].mean() - windows[:half].mean())
    largest = float(np.diff(windows).max())
    grows = float(rises.mean()) >= 0.7 and steep > bound and largest < 0.6 * float(windows[-1] - windows[0])
    return grows, None if grows else since


def _slow_steps(steps: Steps, late: Floats) -> dict[int, int | None]:
    import numpy as np

    # The length of a step: the median rank's own time, and the wait for the last.
    length = np.median(steps.own.sum(axis=2), axis=1) + late.max(axis=1)
    typical = float(np.median(length))
    slow: dict[int, int | None] = {}
    for place in np.flatnonzero(length >= SLOW_STEP * typical).tolist():
        rank = int(late[place].argmax())
        by_one = float(late[place, rank] - np.median(late.max(axis=1))) >= 0.5 * (length[place] - typical)
        slow[steps.numbers[place]] = steps.ranks[rank] if by_one else None
    return slow


def _intermittent(steps: Steps, late: Floats) -> dict[int, int]:
    # Ranks that are late in some steps, more often than the other ranks.
    import numpy as np

    count, ranks = late.shape
    over = late - np.median(late, axis=0)
    spread = 1.4826 * float(np.median(np.abs(over)))
    rare = over > max(_RARE_SHARE * steps.step_s, 6 * spread)
    # Neighbouring steps are one event.
    rare[1:] &= ~rare[:-1]
    events = rare.sum(axis=0)
    found = {}
    for rank in np.flatnonzero(events >= 3).tolist():
        others = np.delete(events, rank)
        # As many as any other rank might have: the others' largest rate, by a Poisson distribution.
        expected = max(float(others.max()), 0.5)
        if _poisson_tail(int(events[rank]), expected) < _RARE_LEVEL / ranks and events[rank] < count / 2:
            found[steps.ranks[rank]] = int(events[rank])
    return found


def _poisson_tail(events: int, expected: float) -> float:
    term = total = math.exp(-expected + events * math.log(expected) - math.lgamma(events + 1))
    for number in range(events + 1, events + 200):
        term *= expected / number
        total += term
    return total


def _scores(steps: Steps, over: Floats) -> tuple[ByRegion, ByRegion, ByRegion]:
    # For each region and rank: the relative score, the individual score, the excess over the median of ranks. A region
    # that some rank does not have gets no scores.
    import numpy as np

    medians, typical = np.median(steps.own, axis=0), np.median(over, axis=0)
    relative: ByRegion = {}
    individual: ByRegion = {}
    excess: ByRegion = {}
    parts = np.array_split(steps.own, min(WINDOWS, len(steps.own)))
    windows = np.array([np.median(part, axis=0) for part in parts])
    for place, region in enumerate(steps.regions):
        excess[region] = dict(zip(steps.ranks, typical[:, place].tolist(), strict=True))
        column = medians[:, place]
        if (column <= 0).any():
            continue
        best = float(column.min())
        relative[region] = {r: best / float(v) for r, v in zip(steps.ranks, column, strict=True)}
        last, least = windows[-1, :, place], windows[:, :, place].min(axis=0)
        individual[region] = {
            r: float(low / now) if now > 0 else 1.0 for r, low, now in zip(steps.ranks, least, last, strict=True)
        }
    return relative, individual, excess


def _costly_operations(steps: Steps) -> Steps | None:
    # The operations with the most waiting, if they are a class apart: of many in a step, the one that begins it. A part
    # of a single class would look less spread out than it is, and so make any rank look late.
    # The choice does not depend on which rank is late.
    import numpy as np

    count = len(steps.lateness)
    if count < 2 * LEAST_STEPS or steps.lateness.shape[1] < 2:
        return None
    waiting = (steps.lateness.max(axis=1, keepdims=True) - steps.lateness).sum(axis=1)
    ordered = np.sort(waiting)
    sizes = np.arange(1, count)
    sums = np.cumsum(ordered)
    low, high = sums[:-1] / sizes, (sums[-1] - sums[:-1]) / (count - sizes)
    # Largest variance between two classes (Otsu, IEEE Transactions on Systems, Man, and Cybernetics 9, 1979).
    split = int((sizes * (count - sizes) * (high - low) ** 2).argmax())
    upper = ordered[split + 1 :]
    if upper.sum() < COSTLY_SHARE * sums[-1] or high[split] - low[split] < _APART * _jitter(upper):
        return None
    chosen = np.flatnonzero(waiting >= upper[0])
    # All through the run: not those of the warm-up alone.
    if len(np.unique(chosen * WINDOWS // count)) < LEAST_WINDOWS * WINDOWS:
        return None
    return replace(steps, numbers=tuple(chosen.tolist()), lateness=steps.lateness[chosen], own=steps.own[chosen])
