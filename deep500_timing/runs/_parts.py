"""What some steps of a run are made of: the own time of each region in them, and what lies before them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import COMM
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path

if TYPE_CHECKING:
    from collections.abc import Iterable

BETWEEN = ""
"""The path of the time between a BATCH and the one before it that no region covers."""
_WAITING = {COMM}


class Parts(NamedTuple):
    """Times in ns. A step lasts from the end of the BATCH before it to the end of its BATCH."""

    lengths: dict[tuple[int, int], int]
    """By rank and step."""
    own: dict[tuple[int, str], dict[int, int]]
    """By rank and path, then by step: the region's time without the regions inside it."""
    parents: set[str]
    """Paths that hold other regions: their own time is their rest."""


def parts_of(run: Any, steps: Iterable[int], session: int) -> Parts:
    """Read the parts of some steps on all ranks.

    A region between two BATCHes belongs to the step after it. The first step of a rank has nothing before it.
    """
    wanted = sorted(set(steps))
    if not wanted:
        return Parts({}, {}, set())
    of_session = f"session = {int(session)} and device = 'CPU'"
    around = _listed({step + shift for step in wanted for shift in (-1, 0)})
    batches = run.sql(
        "select rank, thread, path, step, min(start_ns) as first, max(start_ns + dur_ns) as last, "
        f"cast(sum(dur_ns) as bigint) as total from intervals where {of_session} and region = 'BATCH' "
        f"and step in ({around}) group by rank, thread, path, step"
    ).rows()
    totals: dict[str, int] = defaultdict(int)
    for row in batches:
        totals[row["path"]] += row["total"]
    if not totals:
        return Parts({}, {}, set())
    main = max(totals, key=lambda path: (totals[path], path))
    batches = [row for row in batches if row["path"] == main]
    inside = run.sql(
        "select rank, path, step, cast(sum(dur_ns - overlap_ns) as bigint) as total from intervals "
        f"where {of_session} and step in ({_listed(wanted)}) "
        f"and substr(path, 1, {len(main) + 1}) = {literal(main + '/')} group by rank, path, step"
    ).rows()
    own: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    parents = {path_text(tuple(split_path(row["path"])[:-1])) for row in inside}
    for row in inside:
        own[row["rank"], row["path"]][row["step"]] += row["total"]
        above = path_text(tuple(split_path(row["path"])[:-1]))
        own[row["rank"], above][row["step"]] -= row["total"]
    asked = set(wanted)
    at = {(row["rank"], row["step"]): row for row in batches}
    lengths: dict[tuple[int, int], int] = {}
    gaps: dict[tuple[int, int], int] = {}
    for (rank, step), row in at.items():
        if step not in asked:
            continue
        own[rank, main][step] += row["total"]
        before = at.get((rank, step - 1))
        gaps[rank, step] = max(row["first"] - before["last"], 0) if before is not None else 0
        lengths[rank, step] = row["last"] - row["first"] + gaps[rank, step]
        # Micro-batches of one step lie apart: the time between them is in no region either.
        own[rank, BETWEEN][step] += gaps[rank, step] + row["last"] - row["first"] - row["total"]
    for rank, step, path, took in _between(run, of_session, around, main, batches, gaps):
        own[rank, path][step] += took
        own[rank, BETWEEN][step] -= took
    return Parts(lengths, {key: dict(of) for key, of in own.items()}, parents)


def _between(
    run: Any, of_session: str, around: str, main: str, batches: list[dict[str, Any]], gaps: dict[tuple[int, int], int]
) -> Iterable[tuple[int, int, str, int]]:
    # The outermost regions that lie between two BATCHes of a rank, on the BATCHes' thread.
    names = tuple(split_path(main))
    above = [path_text(names[:depth]) for depth in range(len(names))]
    rows = run.sql(
        "select rank, thread, path, start_ns, dur_ns from intervals "
        f"where {of_session} and step in ({around}) and depth < {len(names)} "
        f"and path not in ({', '.join(map(literal, [main, *above]))})"
    ).rows()
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row in batches:
        starts[row["rank"], row["thread"]].append((row["first"], row["step"]))
    ordered = {key: sorted(of) for key, of in starts.items()}
    for row in rows:
        following = ordered.get((row["rank"], row["thread"]))
        if following is None or path_text(tuple(split_path(row["path"])[:-1])) not in above:
            continue
        place = int(np.searchsorted([start for start, _ in following], row["start_ns"]))
        if place < len(following):
            start, step = following[place]
            gap = gaps.get((row["rank"], step), 0)
            if start - gap <= row["start_ns"]:
                yield row["rank"], step, row["path"], min(row["dur_ns"], gap)


def waiting_regions(run: Any) -> set[str]:
    """The regions in which ranks wait for each other: communication, and operations recorded as such."""
    return _WAITING | {row["op"] for row in run.sql("select distinct op from collectives").rows() if row["op"]}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in sorted(numbers))
