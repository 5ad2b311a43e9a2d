"""Which rank is late, and why: one judgement, for steps with regions and for operations alone.

Ranks meet in synchronizing operations. The rank that waits least there is the one that the others waited for. So
**lateness** is taken from the waits, and the **own time** of a region is its time without the waits inside it.

A rank's typical excess in a region is a trimmed mean over steps. It varies where nothing is wrong, by noise from step
to step and by lasting differences between ranks. The variance of the noise comes from the Winsorized series (Yuen,
Biometrika 61, 1974), times the autocorrelation time. How much ranks differ, relative to a region's time, is unknown:
:data:`SPREADS` are weighed by how well they explain all ranks.

The test is a likelihood ratio: how much better a delay of one rank, in one region or in none, explains the typical
values than no delay does, averaged over delays and spreads (a Bayes factor; Kass and Raftery, JASA 90, 1995). A rank
is named if that exceeds a threshold. Ranks are removed one by one, latest first, so that two late ranks do not
hide each other. Hosts are compared before ranks, and ranks with the others of their host. A named rank must also be
late by :data:`LEAST_SHARE` of a step, come last no less often than chance, and be late in most parts of the run.

The cause is the region with the largest excess, if it explains :data:`EXPLAINED` of the lateness.

Error rates in simulated worlds: ``benchmarks/STRAGGLERS.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deep500_timing._base.arrays import Floats
from deep500_timing._base.names import BACKWARD, COMM, FORWARD, IO
from deep500_timing._distributed.autocorrelation import correlated_steps
from deep500_timing._distributed.verdict import LEAST_OPERATIONS, SLOW_STEP, Stragglers, Verdict, WhatIf

THRESHOLD = 4.3
"""Logarithm of the likelihood ratio from which on a rank is named. About 1 % of simulated worlds with
ranks 3 % apart, none of them late, exceed it; of other worlds fewer."""
LATER_MARGIN = 1.0
"""How much more the last third of a run must show."""
SPREADS, SPREAD_WEIGHTS = (0.005, 0.01, 0.02, 0.03, 0.05), (0.15, 0.45, 0.15, 0.2, 0.05)
"""Lasting differences between ranks, as shares of a region's time, and how likely they are."""
DELAYS = (0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.4, 1.0)
"""Delays of a late rank, as shares of a step."""
DELAYS_OF_FEW, THRESHOLD_OF_FEW = (0.045, 0.07, 0.1, 0.2, 0.4, 1.0), 3.9
"""The same below :data:`FEW_RANKS` ranks. They show little of how much ranks differ, and a small delay looks the same.
A test that considers one as well finds fewer of the ranks that are late by 5 %."""
OPERATION_SPREADS, OPERATION_WEIGHTS = (0.1, 0.2, 0.4, 0.8, 1.6), (0.2, 0.2, 0.25, 0.25, 0.1)
"""Lasting differences in operations alone, in units of the jitter from operation to operation."""
OPERATION_DELAYS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Delays in operations alone, likewise."""
LEAST_SHARE = 0.01
"""Lateness that matters, as a share of a step."""
EXPLAINED = 0.5
"""Share of the lateness that the cause explains at least."""
LEAST_STEPS = LEAST_OPERATIONS
LEAST_WINDOWS = 0.6
"""Share of the parts of a run in which a rank must be late."""
WINDOWS = 8
MANY_RANKS = 16
"""From this many ranks on, each region alone tells how much ranks differ in it; of fewer, all regions together do."""
FEW_RANKS = 4
"""Below this many ranks, a rank is compared with the mean of the others, since a median would follow it."""
TRANSFER_SHARE = 0.25
"""Lateness that matters in operations alone, as a share of the transfer: of the shortest time, on average."""
COSTLY_SHARE = 0.5
"""Operations that wait longer than the others are judged by themselves if they hold this share of all waiting."""
_TRIM = 0.2
"""Share of the steps that a typical value leaves out at each end."""
_SMALL_REGION = 0.005
"""Lasting differences are relative to at least this share of a step."""
_FEW_STEPS = 4.0
"""Least number of independent steps that enters a variance."""
_APART = 4.0
"""Distance of the costly operations from the others, in units of their spread. Two parts of normal noise have 2.7."""
_LAST_SHARE = 0.9
"""Share of the costly operations in which a late rank comes last."""
_UNLIKE = 4.0
"""How many times the median rank's variance counts as noise; more is a rank that has become late."""
_OF_EACH = 0.5
"""How much the threshold grows with the logarithm of the number of ranks."""
_CAUSE = 1.0
"""Logarithm of the likelihood ratio from which on a region is named as the cause."""
_RARE_LEVEL = 0.001
"""Probability of listing any rank as late now and then where all ranks are alike."""
_RARE_SHARE = 0.1
"""How late a rank is in a step that counts as late now and then, as a share of a step."""
CAUSES = {IO: "IO", FORWARD: "compute", BACKWARD: "compute", "OPTIMIZER": "compute", COMM: "communication"}
"""The cause by the region's name in capitals; ``"host"`` for any other region and for time outside all regions."""
REST = "the rest"


@dataclass(frozen=True)
class RankSteps:
    """Times of the ranks, step by step, in seconds."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """The host of each rank; empty where it is unknown."""
    numbers: tuple[int, ...]
    regions: tuple[str, ...]
    """Empty for operations alone."""
    lateness: Floats
    """Shape ``(steps, ranks)``: how long after a common moment each rank came to the meeting."""
    own: Floats
    """Shape ``(steps, ranks, regions)``: the region's time without the waits inside it."""
    step_s: float
    """The typical length of a step; 0 for operations alone."""
    met_at: str = ""
    one_clock: bool = True
    """Whether waits and own times are of one clock. If not, no cause is named."""


def steps_of_operations(ranks: tuple[int, ...], durations_s: Floats, *, met_at: str) -> RankSteps:
    """Operations as steps without regions.

    Args:
        ranks: The participants of all operations.
        durations_s: Of shape (operations, ranks), in the order of time.
        met_at: Where the ranks meet, in words.
    """
    return RankSteps(
        ranks=ranks,
        hosts=("",) * len(ranks),
        numbers=tuple(range(len(durations_s))),
        regions=(),
        lateness=-np.asarray(durations_s, dtype=np.float64),
        own=np.zeros((len(durations_s), len(ranks), 0)),
        step_s=0.0,
        met_at=met_at,
    )


def judge(steps: RankSteps) -> Stragglers:
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


def _judge(steps: RankSteps) -> Stragglers:
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
    if count < LEAST_STEPS:
        reason = f"{count} {what} are too few, {LEAST_STEPS} are the least"
        return Stragglers("unknown", reason=reason, what_if=WhatIf(0.0, all_alike), **common)
    if steps.regions:
        common["slow_steps"] = _slow_steps(steps, late)
        common["intermittent"] = _intermittent(steps, late)
        typical = np.median(own, axis=0)
        common["excess"] = {
            region: dict(zip(steps.ranks, typical[:, place].tolist(), strict=True))
            for place, region in enumerate(steps.regions)
        }
    found = None
    # First the whole run, then its last third, for a rank that has become late.
    for first in (0, 2 * count // 3):
        if first and count - first < LEAST_STEPS:
            continue
        found = _find(steps, first)
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
    grows, since = _drift_and_onset(steps, late[:, named[0]], found.bound)
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
    bound: float = 0.0
    chance: float = 1.0
    independent: float = 0.0
    host: str | None = None
    cause: tuple[str | None, float] = (None, 0.0)
    first: int = 0
    reason: str = "no rank stands out from the differences between ranks"


def _find(steps: RankSteps, first: int) -> _Found:
    margin = THRESHOLD + (LATER_MARGIN if first else 0.0)
    lateness, own = steps.lateness[first:], steps.own[first:]
    hosts: dict[str, list[int]] = {}
    for place, host in enumerate(steps.hosts):
        hosts.setdefault(host, []).append(place)
    groups = list(hosts.values())
    series = _against_others(lateness, own)
    smallest = min(map(len, groups), default=0)
    if len(groups) > 1 and smallest >= 2 and steps.regions:
        within = series.copy()
        for group in groups:
            within[:, group] -= np.median(series[:, group], axis=1, keepdims=True)
        found = _late_host(steps, first, margin, groups, within)
        if found.ranks:
            return found
        if smallest >= FEW_RANKS and _jitter(within[:, :, 0]) < 0.8 * _jitter(series[:, :, 0]):
            series = within  # Ranks of a host come alike.
    return _late_ranks(steps, first, margin, series)


def _against_others(lateness: Floats, own: Floats) -> Floats:
    # Shape (steps, units, 2 + regions): the lateness, what of it no region shows, and each region, as differences from
    # the other ranks or hosts in the same step.
    both = np.concatenate((lateness[:, :, None], own), axis=2)
    both = both - (np.mean if both.shape[1] < FEW_RANKS else np.median)(both, axis=1, keepdims=True)
    hidden = both[:, :, :1] - both[:, :, 1:].sum(axis=2, keepdims=True)
    return np.concatenate((both[:, :, :1], hidden, both[:, :, 1:]), axis=2)


def _typical(series: Floats) -> tuple[Floats, Floats]:
    # Of each unit and field a trimmed mean over steps, and its variance from the Winsorized series.
    count, units, fields = series.shape
    cut = int(_TRIM * count)
    typical, noise = np.empty((units, fields)), np.empty((units, fields))
    # A lateness that grows evenly is no noise. Medians of halves, since spikes would tilt a line of least squares.
    moment = (np.arange(count) - (count - 1) / 2) / max(count / 2, 1)
    kept = (count - 2 * cut) / count
    for field in range(fields):
        values = series[:, :, field]
        typical[:, field] = np.partition(values, (cut, count - 1 - cut), axis=0)[cut : count - cut].mean(axis=0)
        rises = np.median(values[count // 2 :], axis=0) - np.median(values[: count // 2], axis=0)
        rest = values - moment[:, None] * rises
        ordered = np.partition(rest, (cut, count - 1 - cut), axis=0)
        clipped = np.clip(rest, ordered[cut], ordered[count - 1 - cut])
        variance = clipped.var(axis=0)
        # Without the ranks that vary most: one that has become late does not make all look correlated.
        quiet = np.sort(np.argsort(variance, kind="stable")[: units - (units // 8 + 1) * (units >= FEW_RANKS)])
        independent = max(count / correlated_steps(clipped[:, quiet]), _FEW_STEPS)
        if units >= FEW_RANKS:
            variance = np.clip(variance, np.median(variance), _UNLIKE * np.median(variance))
        # The variance is itself uncertain, which Student's t has as a larger variance.
        freedom = max(kept * independent - 1, 1.0) * max((units - 1) / 2, 1.0)
        noise[:, field] = variance * count / max(count - 1, 1) / (kept**2 * independent) * (1 + 4 / freedom)
    if units < FEW_RANKS:
        noise *= units / (units - 1)  # Each mean has the unit itself in it.
    return typical, np.maximum(noise, 1e-30)


def _evidence(typical: Floats, noise: Floats, base: Floats, delays: Any, spreads: Any, known: Any) -> Floats:
    """For each unit and field, the logarithm of the likelihood ratio of a delay there to no delay anywhere.

    Args:
        typical: Shape ``(units, fields)``.
        noise: Its variance by noise, of the same shape.
        base: Shape ``(fields,)``: the time to which lasting differences are relative.
        delays: The delays that are considered.
        spreads: The lasting differences that are considered, relative to ``base``.
        known: For each of ``spreads`` the logarithm of its weight.
    """
    weight = 1 / (noise + (np.asarray(spreads)[:, None, None] * base) ** 2)
    total = weight.sum(axis=1, keepdims=True)
    off = typical - (weight * typical).sum(axis=1, keepdims=True) / total
    # For each spread and field, with the unknown centre integrated out.
    alike = -0.5 * (weight * off**2 - np.log(weight)).sum(axis=1) - 0.5 * np.log(total[:, 0])
    late = np.full(weight.shape, -np.inf)
    for delay in delays:
        late = np.logaddexp(late, delay * weight * off - delay**2 / 2 * weight * (1 - weight / total))
    if len(typical) < MANY_RANKS:
        alike = np.repeat(alike.sum(axis=1, keepdims=True), alike.shape[1], axis=1)
    alike += np.asarray(known)[:, None]
    found = np.logaddexp.reduce(alike[:, None] + late, axis=0) - np.logaddexp.reduce(alike, axis=0)
    return np.asarray(found - math.log(len(delays)))


def _late_host(steps: RankSteps, first: int, margin: float, groups: list[list[int]], within: Floats) -> _Found:
    lateness, own = steps.lateness[first:], steps.own[first:]
    of_host = np.stack([np.median(lateness[:, group], axis=1) for group in groups], axis=1)
    own_of_host = np.stack([np.median(own[:, group], axis=1) for group in groups], axis=1)
    series = _against_others(of_host, own_of_host)
    typical, noise = _typical(series)
    base = _base(steps, own)
    # How much the ranks of a host differ tells how much the medians of hosts do.
    inside, inside_noise = _typical(within)
    variance = inside_noise[:, 1:] + (np.array(SPREADS)[:, None, None] * base) ** 2
    known = np.log(SPREAD_WEIGHTS) - 0.5 * (inside[:, 1:] ** 2 / variance + np.log(variance)).sum(axis=(1, 2))
    shrink = math.sqrt(math.pi / 2 / float(np.mean([len(group) for group in groups])))
    delays = steps.step_s * np.array(DELAYS)
    evidence = _evidence(typical[:, 1:], noise[:, 1:], base, delays, shrink * np.array(SPREADS), known - known.max())
    by_host = np.where(typical[:, 0] > 0, np.logaddexp.reduce(evidence, axis=1), -np.inf)
    place = int(by_host.argmax())
    over = typical[place] - _centre(np.delete(typical, place, axis=0), len(groups))
    late = float(over[0])
    if by_host[place] <= margin + _OF_EACH * math.log(len(groups)) or late <= LEAST_SHARE * steps.step_s:
        return _Found([], first=first)
    # Most ranks of the host are late, so that it is the host and not one of its ranks.
    others = np.median(np.delete(of_host, place, axis=1), axis=1, keepdims=True)
    of_rank = np.median(lateness[:, groups[place]] - others, axis=0)
    named = [groups[place][index] for index in np.argsort(-of_rank, kind="stable")]
    if (of_rank > late / 2).mean() < 0.75 or not _persists(lateness[:, named[0]] - others[:, 0], late / 4):
        return _Found([], first=first)
    found = _Found(named, late, LEAST_SHARE * steps.step_s, host=steps.hosts[named[0]], first=first)
    found.cause = _cause(steps, over[2:], evidence[place, 1:], late)
    return found


def _late_ranks(steps: RankSteps, first: int, margin: float, series: Floats) -> _Found:
    ranks = len(steps.ranks)
    typical, noise = _typical(series)
    found = _Found([], first=first, independent=len(series) / correlated_steps(series[:, :, 0]))
    found.bound = least = _least(steps, first)
    few = ranks < FEW_RANKS and bool(steps.regions)
    if steps.regions:
        fields, base = slice(1, None), _base(steps, steps.own[first:])
        delays = steps.step_s * np.array(DELAYS_OF_FEW if few else DELAYS)
        spreads, known = SPREADS, np.log(SPREAD_WEIGHTS)
    else:
        jitter = max(_jitter(series[:, :, 0]), 1e-12)
        fields, base = slice(0, 1), np.array([jitter])
        delays, spreads, known = jitter * np.array(OPERATION_DELAYS), OPERATION_SPREADS, np.log(OPERATION_WEIGHTS)
    margin += THRESHOLD_OF_FEW - THRESHOLD if few else _OF_EACH * math.log(ranks)
    remaining = list(range(ranks))
    removed: list[int] = []
    cells: list[Floats] = []
    kept = 0
    while len(remaining) > 1 and len(removed) < max(1, (ranks - 1) // 3) and len(removed) <= kept + 1:
        chosen = typical[remaining], noise[remaining]
        evidence = _evidence(chosen[0][:, fields], chosen[1][:, fields], base, delays, spreads, known)
        off = chosen[0][:, 0] - _centre(chosen[0], ranks)[0]
        by_rank = np.where(off > 0, np.logaddexp.reduce(evidence, axis=1), -np.inf)
        place = int(by_rank.argmax())
        if not removed:
            found.chance = math.exp(min(math.log(evidence.size) - float(by_rank[place]), 0.0))
        removed.append(remaining.pop(place))
        cells.append(evidence[place])
        if by_rank[place] > margin:
            kept = len(removed)
    others = [rank for rank in range(ranks) if rank not in removed[:kept]]
    over = typical - _centre(typical[others], ranks)
    if ranks < FEW_RANKS and not kept:
        over = typical * ranks / (ranks - 1)
    for rank in sorted(removed[:kept], key=lambda rank: -over[rank, 0]):
        # Compared without the ranks that are later.
        present = [other for other in range(ranks) if other not in found.ranks]
        late = float(over[rank, 0])
        if (
            late >= least
            and not _rarely_last(steps.lateness[first:, present], present.index(rank))
            and _persists(series[:, rank, 0] + late - typical[rank, 0], 0.5 * late)
        ):
            found.ranks.append(rank)
    top = removed[0]
    # By lateness alone and the usual spread; a region may tell it from less.
    usual = float(np.exp(known) @ np.asarray(spreads)) * float(base[0])
    found.bound = max(least, math.sqrt(2 * margin * (float(noise[top, 0]) + usual**2)))
    if not found.ranks:
        if kept:
            found.reason = "the rank that stands out is late by too little, or for a short time"
        return found
    latest = found.ranks[0]
    found.lateness = float(over[latest, 0])
    found.bound = min(found.bound, float(over[found.ranks[-1], 0]))
    found.cause = _cause(steps, over[latest, 2:], cells[removed.index(latest)][1:], found.lateness)
    return found


def _base(steps: RankSteps, own: Floats) -> Floats:
    # What lasting differences are relative to: all regions together for lateness that none shows, and each region.
    base = np.median(np.median(own, axis=0), axis=0)
    return np.concatenate(([math.sqrt(float((base**2).sum()))], np.maximum(base, _SMALL_REGION * steps.step_s)))


def _centre(typical: Floats, ranks: int) -> Floats:
    return np.asarray((np.median if ranks >= FEW_RANKS else np.mean)(typical, axis=0))


def _cause(steps: RankSteps, excess: Floats, evidence: Floats, lateness: float) -> tuple[str | None, float]:
    if not len(excess):
        return None, 0.0
    region = int(excess.argmax())
    if excess[region] < EXPLAINED * lateness or evidence[region] <= _CAUSE:
        return None, 0.0
    return steps.regions[region], float(excess[region])


def _rarely_last(lateness: Floats, rank: int) -> bool:
    # Whether a rank comes last less often than chance: its lateness is nothing the others wait for.
    count, ranks = lateness.shape
    expected = count / ranks
    last = int((lateness.argmax(axis=1) == rank).sum())
    return bool(last < expected - 1.5 * math.sqrt(expected))


def _least(steps: RankSteps, first: int) -> float:
    # From which lateness on a rank matters.
    if steps.step_s > 0:
        return LEAST_SHARE * steps.step_s
    transfer = float((-steps.lateness[first:]).min(axis=1).mean())
    return TRANSFER_SHARE * transfer


def _jitter(values: Floats) -> float:
    return 1.4826 * float(np.median(np.abs(values - np.median(values, axis=0))))


def _saved(late: Floats, named: list[int]) -> float:
    # How much earlier all would meet, on average, if the named ranks came as the others typically do.
    others = np.setdiff1d(np.arange(late.shape[1]), named)
    typical = float(np.median(np.median(late[:, others], axis=0)))
    without = late.copy()
    for rank in named:
        without[:, rank] -= max(float(np.median(late[:, rank])) - typical, 0.0)
    return float((late.max(axis=1) - without.max(axis=1)).mean())


def _windows(series: Floats) -> Floats:
    parts = np.array_split(series, min(WINDOWS, max(len(series) // 4, 1)))
    return np.array([np.median(part, axis=0) for part in parts])


def _persists(series: Floats, above: float) -> bool:
    return float((_windows(series) > above).mean()) >= LEAST_WINDOWS


def _drift_and_onset(steps: RankSteps, series: Floats, bound: float) -> tuple[bool, int | None]:
    # Whether lateness grows all along, and from which step on there is any.
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


def _slow_steps(steps: RankSteps, late: Floats) -> dict[int, int | None]:
    # The length of a step: the median rank's own time, and the wait for the last.
    length = np.median(steps.own.sum(axis=2), axis=1) + late.max(axis=1)
    typical = float(np.median(length))
    slow: dict[int, int | None] = {}
    for place in np.flatnonzero(length >= SLOW_STEP * typical).tolist():
        rank = int(late[place].argmax())
        by_one = float(late[place, rank] - np.median(late.max(axis=1))) >= 0.5 * (length[place] - typical)
        slow[steps.numbers[place]] = steps.ranks[rank] if by_one else None
    return slow


def _intermittent(steps: RankSteps, late: Floats) -> dict[int, int]:
    # Ranks that are late in some steps, more often than the other ranks.
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


def _costly_operations(steps: RankSteps) -> RankSteps | None:
    # The operations with the most waiting, if they are a class apart: of many in a step, the one that begins it. A part
    # of a single class would look less spread out than it is, and so make any rank look late.
    # The choice does not depend on which rank is late.
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
