"""The verdict on stragglers: plain data, and sentences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from deep500_timing._summary.text import format_share, format_time, safe_name

SLOW_STEP = 1.5
"""A step so many times as long as the median is a slow one."""
_MOST_STEPS = 5
LEAST_OPERATIONS = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """The test of operations alone. Times are in seconds."""

    operations: int
    judged: int
    """How many of them the verdict is about: all, or the few that hold most of the waiting."""
    independent_operations: float
    chance: float
    """Probability that ranks which are all alike make one of them look as late as the latest does here."""
    cost_s: float
    """How much later each operation began on average because of the late ranks alone; 0 if there are none."""
    waiting_s: float
    """How long a rank waited for the last one in an operation: the mean over ranks and operations."""

    @property
    def enough(self) -> bool:
        """Whether there were enough operations to tell."""
        return self.operations >= LEAST_OPERATIONS


@dataclass(frozen=True, slots=True)
class WhatIf:
    """How much shorter steps would be, if each ends for all when the last rank comes, and nothing else changed."""

    without_rank_s: float
    """For each step on average, if the late ranks came as the others typically do."""
    all_alike_s: float
    """If every rank came with the median of them, in each step: the cost of all waiting."""


@dataclass(frozen=True, slots=True)
class BusyHost:
    """The host of a late rank, whose thread waits for a processor so much more than the others' that it is late."""

    waited: float
    """The share of the time."""
    neighbours_cores: float | None
    """Processors that other processes use; None if unknown."""
    neighbours_use: str
    """The same in words, with the processors of the machine; empty if unknown."""

    def __str__(self) -> str:
        waited = f"its thread waited for a processor for {format_share(self.waited)} of the time"
        return "; ".join(filter(None, (waited, self.neighbours_use)))


@dataclass(frozen=True)
class Stragglers:
    """The late ranks and the cause. As a text it is sentences. Times are in seconds for a step."""

    kind: str
    """``"rank"``, ``"ranks"``, ``"node"``, ``"nobody"``, or ``"unknown"`` where the data do not say."""
    ranks: tuple[int, ...] = ()
    """The late ones, the latest first."""
    host: str | None = None
    """The host that is late, if it is a host."""
    region: str | None = None
    """The region that explains the lateness by its excess; None if none does."""
    cause: str | None = None
    """The kind of that region: ``"IO"``, ``"compute"``, ``"communication"`` or ``"host"``."""
    busy_host: BusyHost | None = None
    """Its host, where other processes of that host are the cause."""
    lateness_s: float = 0.0
    """How much later than the median of the others the latest one typically came."""
    last_share: float = 0.0
    """Share of the steps in which the latest one came last; chance is one over the ranks."""
    excess_s: float = 0.0
    """How much longer its region took than the median of ranks."""
    bound_s: float = 0.0
    """Least lateness of a rank that is called late here."""
    step_s: float = 0.0
    steps: int = 0
    since: int | None = None
    """From which step on it is late; None if from the first."""
    grows: bool = False
    """Whether its lateness grows: drift, such as a device that heats up."""
    what_if: WhatIf | None = None
    slow_steps: dict[int, int | None] = field(default_factory=dict)
    """Steps that took :data:`SLOW_STEP` times the median or more: the rank that the others waited for, or None if it
    was slow for every rank."""
    intermittent: dict[int, int] = field(default_factory=dict)
    """Ranks that came late in some steps, more often than the other ranks: in how many."""
    reason: str = ""
    met_at: str = ""
    operations: Verdict | None = None
    """The test of operations alone: then there are neither regions nor steps, and times are for an operation."""
    lateness: dict[int, float] = field(default_factory=dict, repr=False)
    """For each rank, how much later than the median of ranks it typically came."""
    excess: dict[str, dict[int, float]] = field(default_factory=dict, repr=False)
    """For each region, for each rank, how much longer than the median of ranks its own time typically is."""

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> Stragglers:
        """The inverse of ``dataclasses.asdict``, through JSON as well, for a judgement of operations alone."""
        return cls(
            **plain
            | {
                "ranks": tuple(plain["ranks"]),
                "what_if": WhatIf(**plain["what_if"]),
                "operations": Verdict(**plain["operations"]),
                "lateness": {int(rank): late_s for rank, late_s in plain["lateness"].items()},
            }
        )

    def __str__(self) -> str:
        return "\n".join(sentences(self))


def sentences(found: Stragglers) -> list[str]:
    """A few lines: the ranks, by how much, the cause, the cost."""
    lines = [_verdict(found)]
    if found.ranks:
        lines.append(_because(found))
        course = _since(found)
        if course:
            lines.append(course)
    if found.what_if is not None and (found.step_s > 0 or found.operations is not None):
        lines += _what_if(found)
    lines += _slow_steps(found)
    for rank, count in sorted(found.intermittent.items(), key=lambda item: (-item[1], item[0]))[:_MOST_STEPS]:
        lines.append(f"Rank {rank} came late in {count} of {found.steps} steps, more often than the other ranks.")
    if found.met_at:
        what = "operations" if found.operations is not None else "steps"
        lines.append(f"Judged from {found.steps} {what}, by the waits in {found.met_at}.")
    return lines


def _share(seconds: float, found: Stragglers) -> str:
    if found.operations is not None:
        return f"{format_time(seconds)} an operation"
    if found.step_s <= 0:
        return format_time(seconds)
    return f"{format_time(seconds)} a step ({format_share(seconds / found.step_s)})"


def _verdict(found: Stragglers) -> str:
    if found.kind == "unknown":
        return f"The data do not tell whether a rank is late: {found.reason}."
    if found.kind == "nobody":
        bound = f" (from {_share(found.bound_s, found)} on)" if found.bound_s else ""
        return f"No rank is late: {found.reason}{bound}."
    lateness = _share(found.lateness_s, found)
    named = ", ".join(map(str, found.ranks[:_MOST_STEPS])) + (", …" if len(found.ranks) > _MOST_STEPS else "")
    if found.kind == "node":
        return f"The host {safe_name(found.host or '')} is late, its ranks {named}: by {lateness}."
    if found.kind == "ranks":
        return f"{len(found.ranks)} ranks are late: {named}; the latest by {lateness}."
    return f"Rank {named} is late by {lateness}."


def _because(found: Stragglers) -> str:
    if found.busy_host is not None:
        return f"Rank {found.ranks[0]} is late because of its host: {found.busy_host}."
    if found.operations is not None:
        return "The cause is unknown: there are operations, and no steps with regions."
    if found.region is None:
        return "The cause is unknown: no region takes that much longer than on the other ranks."
    what = f"its {safe_name(found.region)}" if found.region.isupper() else safe_name(found.region)
    kind = "" if found.cause == found.region else f" ({found.cause})"
    return f"Because {what}{kind} takes {format_time(found.excess_s)} longer than on the other ranks."


def _since(found: Stragglers) -> str:
    if found.grows:
        return "Its lateness grows over the run."
    return "" if found.since is None else f"Since step {found.since}."


def _what_if(found: Stragglers) -> list[str]:
    assert found.what_if is not None
    lines = []
    if found.ranks:
        saved = found.what_if.without_rank_s
        what, share = (
            ("a step", f" ({format_share(saved / found.step_s)})") if found.operations is None else ("an operation", "")
        )
        lines.append(f"Without this lateness {what} would be {format_time(saved)}{share} shorter.")
    lines.append(f"All waiting of ranks for each other costs {_share(found.what_if.all_alike_s, found)}.")
    return lines


def _slow_steps(found: Stragglers) -> list[str]:
    lines = []
    everyone = sorted(step for step, rank in found.slow_steps.items() if rank is None)
    if everyone:
        lines.append(f"{_some(everyone)} slow for every rank alike.")
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
