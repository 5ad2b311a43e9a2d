"""The verdict on who is late, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_time, safe_name

if TYPE_CHECKING:
    from deep500_timing._across.late import Stragglers

_MOST_STEPS = 5


def sentences(found: Stragglers) -> list[str]:
    """A few lines: who, by how much, why, what it costs."""
    lines = [_verdict(found)]
    if found.ranks:
        lines.append(_because(found))
        course = _course(found)
        if course:
            lines.append(course)
    if found.what_if is not None and found.step_s > 0:
        lines += _what_if(found)
    lines += _slow_steps(found)
    if found.met_at:
        lines.append(f"Judged from {found.steps} steps, by who waited least in {found.met_at}.")
    return lines


def _share(seconds: float, found: Stragglers) -> str:
    return f"{format_time(seconds)} a step ({seconds / found.step_s:.1%})" if found.step_s > 0 else format_time(seconds)


def _verdict(found: Stragglers) -> str:
    if found.kind == "unknown":
        return f"Nobody can tell who is late: {found.reason}."
    if found.kind == "nobody":
        return f"No rank is late: {found.reason} (from {_share(found.bound_s, found)} on)."
    lateness = _share(found.lateness_s, found)
    named = ", ".join(map(str, found.ranks[:_MOST_STEPS])) + (", …" if len(found.ranks) > _MOST_STEPS else "")
    if found.kind == "node":
        return f"The machine {safe_name(found.host or '')} is late, its ranks {named}: by {lateness}."
    if found.kind == "ranks":
        return f"{len(found.ranks)} ranks are late: {named}; the latest by {lateness}."
    return f"Rank {named} is late by {lateness}."


def _because(found: Stragglers) -> str:
    if found.region is None:
        return "Its regions do not say why: none takes so much longer than on the other ranks."
    what = f"its {safe_name(found.region)}" if found.region.isupper() else safe_name(found.region)
    return f"Because {what} ({found.cause}) takes {format_time(found.excess_s)} longer than on the other ranks."


def _course(found: Stragglers) -> str:
    if found.grows:
        return "Its lateness grows over the run."
    return "" if found.since is None else f"Since step {found.since}."


def _what_if(found: Stragglers) -> list[str]:
    assert found.what_if is not None
    lines = []
    if found.ranks:
        saved = _share(found.what_if.without_rank_s, found)
        lines.append(f"Without it a step would be {saved} shorter, if nothing else changed.")
    lines.append(f"All that ranks wait for each other costs {_share(found.what_if.all_alike_s, found)}.")
    return lines


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
