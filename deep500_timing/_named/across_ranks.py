"""The reports of all ranks on their named timers, as text in Megatron-LM's form."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._distributed.exchange import Answers

TimesByRank: TypeAlias = "dict[int, dict[str, float]]"
"""Seconds by rank and name."""
TimesByName: TypeAlias = "dict[str, dict[int, float]]"
"""Seconds by name and rank."""

OPTIONS = ("max", "minmax", "all")
"""The ways to show the times of all ranks."""


def pack(times: dict[str, float]) -> bytes:
    """One rank's report, of times in seconds by name."""
    return json.dumps(times).encode()


def join(reports: dict[int, bytes]) -> bytes:
    """The reports of all ranks in one message, as rank 0 sends it."""
    return json.dumps({rank: json.loads(report) for rank, report in reports.items()}).encode()


def read(reports: dict[int, bytes] | bytes) -> TimesByRank:
    """Read single reports by rank, or the message of :func:`join`."""
    if isinstance(reports, bytes):
        joined: dict[str, dict[str, float]] = json.loads(reports)
        return {rank: joined[str(rank)] for rank in sorted(map(int, joined))}
    return {rank: json.loads(report) for rank, report in sorted(reports.items())}


def by_name(found: TimesByRank, names: list[str] | None) -> TimesByName:
    """The times of each timer by rank; timers that no rank has are left out."""
    order = list(dict.fromkeys(itertools.chain(*found.values()))) if names is None else names
    times = {name: {rank: times[name] for rank, times in found.items() if name in times} for name in order}
    return {name: by_rank for name, by_rank in times.items() if by_rank}


def text_of(times: TimesByName, answers: Answers, option: str, normalizer: float, deadline_s: float) -> str | None:
    """The report, in ms; None if nothing was timed and there is nothing to say."""
    notes = "".join(f"\n  {note}" for note in _notes(answers, deadline_s))
    if not times:
        return notes.strip() or None
    scale = 1000.0 / normalizer
    lines = []
    if option == "all":
        lines.append("times across ranks (ms):")
        for name, by_rank in times.items():
            lines.append(f"  {name}:")
            lines.extend(f"     rank {rank:2d}: {time_s * scale:.2f}" for rank, time_s in by_rank.items())
    else:
        both = option == "minmax"
        lines.append("(min, max) time across ranks (ms):" if both else "max time across ranks (ms):")
        for name, by_rank in times.items():
            low, high = min(by_rank.values()) * scale, max(by_rank.values()) * scale
            lines.append(f"    {name + ' ':.<48}: " + (f"({low:.2f}, {high:.2f})" if both else f"{high:.2f}"))
    return "\n".join(lines) + notes


def _notes(answers: Answers, deadline_s: float) -> Iterator[str]:
    if answers.fault is not None:
        yield f"the other ranks could not be asked: {answers.fault}"
    if answers.missing:
        yield f"no times from rank {', '.join(map(str, answers.missing))} within {deadline_s:g} s"
    for rank, calls in answers.ahead.items():
        where, more = ("ahead", "more") if calls > 0 else ("behind", "fewer")
        rounds = "a round" if abs(calls) == 1 else f"{abs(calls)} rounds"
        yield f"rank {rank} is {rounds} {where}: it has asked for so many {more}"
