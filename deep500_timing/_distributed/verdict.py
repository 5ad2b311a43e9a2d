"""The verdict on who is late: plain data, and sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_share, format_time, safe_name

if TYPE_CHECKING:
    from deep500_timing._distributed.operation_stragglers import Verdict

SLOW_STEP = 1.5
"""A step so many times as long as the median is a slow one."""
_MOST_STEPS = 5


@dataclass(frozen=True, slots=True)
class WhatIf:
    """How much faster steps had been, if each ends for all when the last rank comes and nothing else differed."""

    without_rank_s: float
    """For each step on average, had the late ranks been late by no more than the others typically are."""
    all_alike_s: float
    """Had every rank come with the median of them, in each step: all that waiting costs."""


@dataclass(frozen=True)
class Stragglers:
    """Who is late, and why. As a text it is sentences. Times are in seconds for a step."""

    kind: str
    """``"rank"``, ``"ranks"``, ``"node"``, ``"nobody"``, or ``"unknown"`` where the data do not say."""
    ranks: tuple[int, ...] = ()
    """The late ones, the latest first."""
    host: str | None = None
    """Their machine, if it is the machine that is late."""
    region: str | None = None
    """Whose excess explains it; None if none does."""
    cause: str | None = None
    """What that region is: ``"IO"``, ``"compute"``, ``"communication"`` or ``"host"``."""
    lateness_s: float = 0.0
    """How much later than the median of the others the latest one typically came."""
    last_share: float = 0.0
    """Share of the steps in which the latest one came last; chance is one over the ranks."""
    excess_s: float = 0.0
    """How much longer its region took than the median of ranks."""
    bound_s: float = 0.0
    """From which lateness on a rank is called late here."""
    step_s: float = 0.0
    steps: int = 0
    """How many were looked at."""
    since: int | None = None
    """From which step on it is late; None if from the first."""
    grows: bool = False
    """Whether its lateness grows: drift, such as a device that heats up."""
    what_if: WhatIf | None = None
    slow_steps: dict[int, int | None] = field(default_factory=dict)
    """Steps that took :data:`SLOW_STEP` times the median or more: which rank the others waited for, or None if it was
    slow for everybody."""
    reason: str = ""
    """Why nobody is named."""
    met_at: str = ""
    operations: Verdict | None = None
    """The test that has judged, where operations are all that is known: then there are neither regions nor steps, and
    times are for an operation."""
    lateness: dict[int, float] = field(default_factory=dict, repr=False)
    """For each rank, how much later than the median of ranks it typically came."""
    excess: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """For each region, for each rank, how much longer than the median of ranks its own time typically is."""
    relative: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """For each region, for each rank, the fastest rank's own time over its own: 1 for the fastest."""
    individual: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """For each region, for each rank, its best window's own time over its last one's: below 1 where it has slowed."""

    def nvrx_scores(self) -> dict[str, dict[str, dict[int, float]]]:
        """Scores under the names that NVIDIA's resiliency extension has for them.

        They are of own times, without waiting for others; there they are of sections and kernels as timed.
        """
        return {
            "section_relative_perf_scores": self.relative,
            "section_individual_perf_scores": self.individual,
        }

    def __str__(self) -> str:
        """A few lines."""
        return "\n".join(sentences(self))


def sentences(found: Stragglers) -> list[str]:
    """A few lines: who, by how much, why, what it costs."""
    lines = [_verdict(found)]
    if found.ranks:
        lines.append(_because(found))
        course = _course(found)
        if course:
            lines.append(course)
    if found.what_if is not None and (found.step_s > 0 or found.operations is not None):
        lines += _what_if(found)
    lines += _slow_steps(found)
    if found.met_at:
        what = "operations" if found.operations is not None else "steps"
        lines.append(f"Judged from {found.steps} {what}, by who waited least in {found.met_at}.")
    return lines


def _share(seconds: float, found: Stragglers) -> str:
    if found.operations is not None:
        return f"{format_time(seconds)} an operation"
    if found.step_s <= 0:
        return format_time(seconds)
    return f"{format_time(seconds)} a step ({format_share(seconds / found.step_s)})"


def _verdict(found: Stragglers) -> str:
    if found.kind == "unknown":
        return f"Nobody can tell who is late: {found.reason}."
    if found.kind == "nobody":
        bound = f" (from {_share(found.bound_s, found)} on)" if found.bound_s else ""
        return f"No rank is late: {found.reason}{bound}."
    lateness = _share(found.lateness_s, found)
    named = ", ".join(map(str, found.ranks[:_MOST_STEPS])) + (", …" if len(found.ranks) > _MOST_STEPS else "")
    if found.kind == "node":
        return f"The machine {safe_name(found.host or '')} is late, its ranks {named}: by {lateness}."
    if found.kind == "ranks":
        return f"{len(found.ranks)} ranks are late: {named}; the latest by {lateness}."
    return f"Rank {named} is late by {lateness}."


def _because(found: Stragglers) -> str:
    if found.operations is not None:
        return "Operations alone do not say why: no steps with regions are known."
    if found.region is None:
        return "Its regions do not say why: none takes so much longer than on the other ranks."
    what = f"its {safe_name(found.region)}" if found.region.isupper() else safe_name(found.region)
    kind = "" if found.cause == found.region else f" ({found.cause})"
    return f"Because {what}{kind} takes {format_time(found.excess_s)} longer than on the other ranks."


def _course(found: Stragglers) -> str:
    if found.grows:
        return "Its lateness grows over the run."
    return "" if found.since is None else f"Since step {found.since}."


def _what_if(found: Stragglers) -> list[str]:
    assert found.what_if is not None
    lines = []
    if found.ranks:
        saved = found.what_if.without_rank_s
        what, share = "operation", ""
        if found.operations is None:
            what, share = "step", f" ({format_share(saved / found.step_s)})"
        shorter = f"{format_time(saved)}{share}"
        lines.append(f"Were it as the others are, {_a(what)} would be {shorter} shorter, if nothing else changed.")
    lines.append(f"All that ranks wait for each other costs {_share(found.what_if.all_alike_s, found)}.")
    return lines


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"


def _slow_steps(found: Stragglers) -> list[str]:
    lines = []
    everybody = sorted(step for step, rank in found.slow_steps.items() if rank is None)
    if everybody:
        lines.append(f"{_some(everybody)} slow for every rank alike.")
    by_rank: dict[int, list[int]] = {}
    for step, rank in found.slow_steps.items():
        if rank is not None:
            by_rank.setdefault(rank, []).append(step)
    for rank, steps in sorted(by_rank.items(), key=lambda item: (-len(item[1]), item[0]))[:_MOST_STEPS]:
        lines.append(f"{_some(sorted(steps))} slow because of rank {rank}.")
    return lines


def _some(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:_MOST_STEPS]))
    more = f" and {len(steps) - _MOST_STEPS} more" if len(steps) > _MOST_STEPS else ""
    return f"Step {shown} was" if len(steps) == 1 else f"Steps {shown}{more} were"
