"""Who is late, and why: judged from how late each rank came to where they meet, and from what each did before.

Ranks meet at synchronizing operations. Who waits least there is who the others waited for; how long a region took says
little, since the wait for the slowest is inside of what everybody is timed at. So **lateness** is taken from the waits,
and a region's **own time** is what is left of it without the waits inside it.

A rank is late if its typical lateness (the median over steps) stands out from what ranks differ by when nothing is
wrong. That scale cannot be had from eight latenesses. It is pooled: from how much the own times of all regions of all
other ranks deviate from the median of ranks, relative to the region's time, which is some thirty numbers for eight
ranks; where the latenesses of the others spread wider than that, they are the scale. The bound is a quantile of
Student's t for so many numbers, at :data:`LEVEL` for all ranks together. Besides it must matter (:data:`LEAST_SHARE` of
a step), stand on enough steps that count as independent, and hold in most of the windows of the run.

The cause is the region with the largest excess over the median of ranks, if that stands out itself and explains at
least :data:`EXPLAINED` of the lateness; else no cause is named.

Checked over thousands of simulated worlds in ``benchmarks/stragglers.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.late_by_region import regions_of_ranks
from deep500_timing._distributed.operation_stragglers import LEAST_OPERATIONS, autocorrelation_time, find_late_rank
from deep500_timing._distributed.verdict import SLOW_STEP, Stragglers, WhatIf

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

LEVEL = 0.005
"""Probability of naming any rank where nothing is wrong, all tests together."""
LEAST_SHARE = 0.01
"""Lateness that matters, as a share of a step."""
EXPLAINED = 0.5
"""What of a lateness its cause explains at least."""
LEAST_WINDOWS = 0.6
"""In what share of the windows a rank must be late."""
FEW_RANKS = 4
"""Below so many ranks the others are too few for a scale: chance and jitter decide, see ``find_late_rank``."""
WINDOWS = 8
"""Into how many parts of a run its steps are divided."""
_SMALL_REGION = 0.005
"""Regions below this share of a step say nothing of how ranks differ."""
_OUTLIER = 4.0
CAUSES = {
    "IO": "IO",
    "FORWARD": "compute",
    "BACKWARD": "compute",
    "OPTIMIZER": "compute",
    "COMM": "communication",
}
"""What a region is, by its name in capitals; any other, and what lies outside all regions, is the host's."""
REST = "the rest"
"""The name of what lies outside all regions."""


@dataclass(frozen=True)
class Steps:
    """What is known of the ranks, step by step, in seconds. A step may be a window of several, as their mean."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    """The machine of each."""
    numbers: tuple[int, ...]
    """Of each step."""
    regions: tuple[str, ...]
    lateness: Floats
    """Shape ``(steps, ranks)``: how much later than some common moment each came to where they meet."""
    own: Floats
    """Shape ``(steps, ranks, regions)``: a region's time without the waits inside it."""
    step_s: float
    """A typical step's length."""
    met_at: str = ""
    """Where they meet, in words."""
    least: int = LEAST_OPERATIONS
    """Steps that count as independent which a verdict needs."""


def judge(steps: Steps) -> Stragglers:
    """Who is late in these steps, and why."""
    import numpy as np

    count, ranks = steps.lateness.shape
    common: dict[str, Any] = {"steps": count, "step_s": steps.step_s, "met_at": steps.met_at}
    if ranks < 2:
        return Stragglers("unknown", reason="there is one rank", **common)
    if count < steps.least:
        reason = f"{count} steps are too few, {steps.least} are the least"
        return Stragglers("unknown", reason=reason, **common)
    late = steps.lateness - np.median(steps.lateness, axis=1, keepdims=True)
    own = steps.own - np.median(steps.own, axis=1, keepdims=True)
    common["slow_steps"] = _slow_steps(steps, late)
    common["relative"], common["individual"], common["excess"] = regions_of_ranks(
        steps.ranks, steps.regions, steps.own, own, WINDOWS
    )
    # Of two ranks the median is halfway to the late one; the other had come as it did.
    all_alike = float((late.max(axis=1) - (late.min(axis=1) if ranks == 2 else 0.0)).mean())
    found = None
    # The whole, and the last third: who has become late is late only there.
    for place, first in enumerate((0, 2 * count // 3)):
        if count - first < steps.least and place:
            continue
        found = _late_in(steps, late[first:], own[first:], LEVEL / 2)
        if found.ranks or not found.enough:
            break
    assert found is not None
    common["lateness"] = dict(zip(steps.ranks, found.lateness, strict=True))
    if not found.ranks:
        what_if = WhatIf(0.0, all_alike)
        kind = "nobody" if found.enough else "unknown"
        return Stragglers(kind, reason=found.reason, bound_s=found.bound, what_if=what_if, **common)
    named = list(found.ranks)
    region, excess = _cause(steps, own[first:], found)
    grows, since = _course(steps, late[:, named[0]], found.bound)
    others = np.setdiff1d(np.arange(ranks), named)
    typical = float(np.median(np.median(late[first:, others], axis=0)))
    without = late.copy()
    for rank in named:
        without[:, rank] -= max(float(np.median(late[first:, rank])) - typical, 0.0)
    saved = late.max(axis=1) - without.max(axis=1)
    machine = _node_of(steps, named)
    kind = "node" if machine else "rank" if len(named) == 1 else "ranks"
    return Stragglers(
        kind,
        ranks=tuple(steps.ranks[rank] for rank in named),
        host=machine,
        region=region,
        cause=None if region is None else CAUSES.get(region.upper(), "host"),
        lateness_s=found.lateness[named[0]],
        last_share=float((late[first:].argmax(axis=1) == named[0]).mean()),
        excess_s=excess,
        bound_s=found.bound,
        since=since,
        grows=grows,
        what_if=WhatIf(float(saved.mean()), all_alike),
        **common,
    )


@dataclass(slots=True)
class _Found:
    ranks: list[int]
    """As indices, the latest first."""
    lateness: list[float]
    bound: float
    relative: float
    """By how much ranks differ in a region, as a share of its time."""
    enough: bool = True
    reason: str = ""


def _late_in(steps: Steps, late: Floats, own: Floats, level: float) -> _Found:
    import numpy as np

    count, ranks = late.shape
    typical = np.median(late, axis=0)
    matters = LEAST_SHARE * steps.step_s
    independent = count / _correlated(late) if steps.least == LEAST_OPERATIONS else float(count)
    if independent < steps.least:
        reason = (
            f"{count} steps in which neighbours are alike count as {independent:.0f} independent ones; "
            f"{steps.least} are the least"
        )
        return _Found([], typical.tolist(), matters, 0.0, enough=False, reason=reason)
    deviations = np.median(own, axis=0)  # of shape (ranks, regions)
    base = np.median(np.median(steps.own, axis=0), axis=0)
    if ranks < FEW_RANKS:
        return _late_of_few(steps, late, typical, matters)
    named: list[int] = []
    bound = matters
    relative = 0.0
    for _ in range(max(ranks // 2, 1)):
        rank = int(np.argmax(np.where(np.isin(np.arange(ranks), named), -np.inf, typical)))
        others = np.setdiff1d(np.arange(ranks), [*named, rank])
        if len(others) < FEW_RANKS - 1:
            break
        relative, numbers = _pooled(deviations[others], base, steps.step_s)
        direct = _spread(typical[others])
        scale = max(relative * math.sqrt(float((base**2).sum())), direct) * _wider(len(others))
        bound = max(_student(1 - level / ranks, numbers) * scale, matters)
        if typical[rank] - float(np.median(typical[others])) <= bound:
            break
        named.append(rank)
    else:
        return _Found([], typical.tolist(), bound, relative, reason="half of the ranks stand out, so that none does")
    kept = [rank for rank in named if _persists(late[:, rank], bound / 2)]
    reason = "" if kept else "no rank stands out from what ranks differ by" if not named else "no rank is late for long"
    return _Found(kept, typical.tolist(), bound, relative, reason=reason)


def _late_of_few(steps: Steps, late: Floats, typical: Floats, matters: float) -> _Found:
    durations = (late.max(axis=1, keepdims=True) - late) * 1e9
    verdict = find_late_rank(durations)
    rank = verdict.rank
    lateness = typical.tolist()
    if rank is None:
        return _Found([], lateness, matters, 0.0, verdict.enough, "chance or jitter explains who came last")
    lateness[rank] = verdict.lateness_s
    if verdict.lateness_s <= matters:
        return _Found([], lateness, matters, 0.0, True, "who is late is late by less than 1 % of a step")
    return _Found([rank], lateness, matters, 0.0)


def _pooled(deviations: Floats, base: Floats, step_s: float) -> tuple[float, int]:
    # By how much ranks differ, as a share of a region's time, and from how many numbers that is known.
    import numpy as np

    large = base >= _SMALL_REGION * step_s
    shares = (deviations[:, large] / base[large]).ravel()
    if not len(shares):
        return 0.0, max(len(deviations) - 1, 1)
    middle = 1.4826 * float(np.median(np.abs(shares)))
    kept = shares[np.abs(shares) <= _OUTLIER * middle]
    regions = int(large.sum())
    # A number for each region went into its median.
    numbers = max(len(kept) - regions, len(deviations) - 1, 1)
    return float(np.sqrt((kept**2).sum() / numbers)), numbers


def _wider(others: int) -> float:
    # The largest of normal numbers was taken out, so the others are narrower than all; it is compared with their
    # median, which has an error of its own. The largest's expectation: Blom, Statistical Estimates, 1958.
    number = others + 1
    largest = NormalDist().inv_cdf((number - 0.375) / (number + 0.25))
    left = (number - largest**2 - 0.3) / others
    return math.sqrt((1 + math.pi / 2 / others) / max(left, 0.25))


def _spread(values: Floats) -> float:
    import numpy as np

    return 1.4826 * float(np.median(np.abs(values - np.median(values))))


def _student(share: float, numbers: int) -> float:
    """A quantile of Student's t, by the expansion of Fisher and Cornish (Technometrics 2, 1960) to the third order."""
    z, n = NormalDist().inv_cdf(share), float(numbers)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / n + second / n**2 + third / n**3


def _windows(series: Floats) -> Floats:
    import numpy as np

    # Of shape (windows, …).
    parts = np.array_split(series, min(WINDOWS, max(len(series) // 4, 1)))
    return np.array([np.median(part, axis=0) for part in parts])


def _correlated(late: Floats) -> float:
    # Over how many steps the noise is alike: of the ranks that change least over the run, so that one which has become
    # late does not make all look as if they were.
    import numpy as np

    ranks = late.shape[1]
    if ranks < FEW_RANKS:
        return autocorrelation_time(late)
    changes = np.ptp(_windows(late), axis=0)
    return autocorrelation_time(late[:, np.sort(np.argsort(changes, kind="stable")[: ranks - max(ranks // 8, 1)])])


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


def _cause(steps: Steps, own: Floats, found: _Found) -> tuple[str | None, float]:
    import numpy as np

    rank = found.ranks[0]
    deviations = np.median(own, axis=0)
    others = np.setdiff1d(np.arange(len(deviations)), found.ranks)
    # Of two ranks the median is halfway to the late one.
    excess = deviations[rank] - (np.median(deviations[others], axis=0) if len(deviations) < FEW_RANKS else 0.0)
    if not len(excess):
        return None, 0.0
    base = np.median(np.median(steps.own, axis=0), axis=0)
    spread = np.array([_spread(deviations[others, place]) for place in range(len(excess))])
    scale = np.maximum(found.relative * base, spread if len(others) >= FEW_RANKS - 1 else 0.0)
    place = int(np.argmax(excess))
    if excess[place] <= 3 * scale[place] or excess[place] < EXPLAINED * found.lateness[rank]:
        return None, 0.0
    return steps.regions[place], float(excess[place])


def _node_of(steps: Steps, named: list[int]) -> str | None:
    # The machine, if the late ranks are most of its ranks, two at least, and no others.
    hosts = {steps.hosts[rank] for rank in named}
    if len(hosts) != 1 or len(set(steps.hosts)) < 2:
        return None
    host = hosts.pop()
    return host if len(named) >= 2 and len(named) >= 0.75 * steps.hosts.count(host) else None


def _slow_steps(steps: Steps, late: Floats) -> dict[int, int | None]:
    import numpy as np

    # What a step takes: the median rank's own time, and the wait for the last.
    common = np.median(steps.own.sum(axis=2), axis=1) if steps.own.shape[2] else np.full(len(late), steps.step_s)
    length = common + late.max(axis=1)
    typical = float(np.median(length))
    slow: dict[int, int | None] = {}
    for place in np.flatnonzero(length >= SLOW_STEP * typical).tolist():
        rank = int(late[place].argmax())
        by_one = float(late[place, rank] - np.median(late.max(axis=1))) >= 0.5 * (length[place] - typical)
        slow[steps.numbers[place]] = steps.ranks[rank] if by_one else None
    return slow
