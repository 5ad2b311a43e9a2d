"""Transfer and skew of the same operation on every rank, and the rank that the others wait for.

A rank's time in a collective holds its wait for the last rank to come. So the shortest time of any rank is the
transfer, and what a rank's own time is longer by is skew, spent waiting. The rank that waits *least* is the one that
the others waited for; whether that says anything about the rank is asked of
:func:`deep500_timing.ranks.find_stragglers`, which judges runs as well.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import UNKNOWN, Exchange, format_bytes, format_ms, format_share, lines_of
from deep500_timing_torch.comm._log import LOG

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from deep500_timing.ranks import Stragglers

Entry = tuple[int, str, int, int]
"""One operation on one rank: how many collectives its group had issued then, its name, bytes, time in ns."""


@dataclass(frozen=True, slots=True)
class Skew:
    """One operation at one message size in one group, compared across ranks. Times are in seconds."""

    op: str
    message_bytes: int
    """The largest on any rank; 0 for operations without a size."""
    group: str
    ranks: tuple[int, ...]
    count: int
    transfer_s: float | None
    """Sum over operations of the shortest time of any rank; None if only the times of the calls are known."""
    skew_s: dict[int, float]
    """For each rank, the sum of what its own times were longer by: how long it waited."""
    late_rank: int | None
    """The rank that is late in these operations by more than chance and jitter explain; None if none is, too few were
    compared to tell, or ranks may leave the operation before others come, as in a broadcast."""
    late_count: int
    """In how many operations it came last; 0 if there is none."""
    late_s: float
    """How long, on average over the others, they waited for it: the sum over operations; 0 if there is none."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Lateness:
    """The late rank of a group, from all operations for which every rank must come. Times are in seconds."""

    group: str
    ranks: tuple[int, ...]
    count: int
    judged: int
    """Of how many of them this speaks: all, or the few that hold most of the waiting."""
    enough: bool
    """Whether they are enough to tell, neighbours in time not counting as independent."""
    late_rank: int | None
    """The global rank that is late by more than chance and jitter explain; None if none is, or it is unknown."""
    last_share: float
    """Share of those in which it came last; 0 if there is none."""
    lateness_s: float
    """How much later than the median of the others it typically came; 0 if there is none."""
    cost_s: float
    """How much later an operation began on average because of it alone; 0 if there is none."""
    chance: float
    """Probability that ranks which are all alike make one of them look as late as the latest does here."""
    waiting_s: float
    """How long a rank waited for the last one in an operation: the mean over ranks and operations."""


@dataclass(slots=True)
class Comparison:
    """The ranks' reports, compared."""

    rows: list[Skew] = field(default_factory=list)
    lateness: list[Lateness] = field(default_factory=list)
    unmatched: int = 0
    """Operations that some rank of the group did not report: it was not timing, it is behind, or it is dead."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""


def compare(
    reports: Mapping[int, Mapping[str, Iterable[Entry]]],
    groups: Mapping[str, Iterable[int]],
    synchronizing: Collection[str] | None = None,
) -> Comparison:
    """Compare the operations of several ranks, each with the same one elsewhere.

    No rank leaves an operation named in ``synchronizing`` before every rank has come; None stands for all operations.
    """
    result = Comparison()
    for group, all_ranks in groups.items():
        ranks = tuple(rank for rank in all_ranks if rank in reports)
        if len(ranks) < 2:
            continue
        calls: dict[int, dict[int, Entry]] = defaultdict(dict)
        for rank in ranks:
            for entry in reports[rank].get(group, ()):
                calls[entry[0]][rank] = entry
        times_ns: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
        meetings_ns = []
        for _, entries in sorted(calls.items()):
            names = {name for _, name, _, _ in entries.values()}
            if len(entries) < len(ranks):
                result.unmatched += 1
            elif len(names) > 1:
                result.mismatched += 1
            else:
                name, nbytes = names.pop(), max(entry[2] for entry in entries.values())
                times_ns[name, nbytes].append([entries[rank][3] for rank in ranks])
                if synchronizing is None or name in synchronizing:
                    meetings_ns.append(times_ns[name, nbytes][-1])
        if meetings_ns:
            result.lateness.append(_lateness(group, ranks, meetings_ns))
        for (name, nbytes), rows_ns in times_ns.items():
            meets = synchronizing is None or name in synchronizing
            result.rows.append(_skew(name, group, nbytes, ranks, rows_ns, meets))
    result.rows.sort(key=lambda row: (row.op, row.group, row.message_bytes))
    return result


def _judged(ranks: tuple[int, ...], times_s: Any) -> Stragglers:
    # From one row of times for each operation, in the order of the ranks.
    from deep500_timing.adapters import steps_of_operations
    from deep500_timing.ranks import find_stragglers

    return find_stragglers(steps_of_operations(ranks, times_s, met_at="collective operations"))


def _lateness(group: str, ranks: tuple[int, ...], times_ns: list[list[int]]) -> Lateness:
    import numpy as np

    found = _judged(ranks, np.array(times_ns) / 1e9)
    test = found.operations
    assert test is not None
    return Lateness(
        group=group,
        ranks=ranks,
        count=test.operations,
        judged=test.judged,
        enough=test.enough,
        late_rank=found.ranks[0] if found.ranks else None,
        last_share=found.last_share,
        lateness_s=found.lateness_s,
        cost_s=test.cost_s,
        chance=test.chance,
        waiting_s=test.waiting_s,
    )


def _skew(name: str, group: str, nbytes: int, ranks: tuple[int, ...], times_ns: list[list[int]], meets: bool) -> Skew:
    import numpy as np

    times_s = np.array(times_ns) / 1e9
    shortest_s = times_s.min(axis=1, keepdims=True)
    waits_s = times_s - shortest_s
    named = _judged(ranks, times_s).ranks if meets else ()
    late = named[0] if named else None
    for_late = times_s.argmin(axis=1) == (-1 if late is None else ranks.index(late))
    return Skew(
        op=name,
        message_bytes=nbytes,
        group=group,
        ranks=ranks,
        count=len(times_ns),
        transfer_s=float(shortest_s.sum()),
        skew_s=dict(zip(ranks, waits_s.sum(axis=0).tolist(), strict=True)),
        late_rank=late,
        late_count=int(for_late.sum()),
        late_s=float(waits_s[for_late].sum()) / (len(ranks) - 1),
    )


# --- through the store of the process group ------------------------------------------------------------------------

_exchange = Exchange("comm")


def compare_ranks(deadline_s: float) -> tuple[Comparison, Any]:
    """Compare with the other ranks, which must do the same; returns their ``Answers`` as well."""
    answers = _exchange.round(_own_report(), _combine, deadline_s)
    found = json.loads(zlib.decompress(answers.combined or _combine(answers.reports)))
    # JSON knows neither tuples nor keys that are numbers.
    for row in (*found["rows"], *found["lateness"]):
        row["ranks"] = tuple(row["ranks"])
    for row in found["rows"]:
        row["skew_s"] = {int(rank): skew_s for rank, skew_s in row["skew_s"].items()}
    found["rows"] = [Skew(**row) for row in found["rows"]]
    found["lateness"] = [Lateness(**row) for row in found["lateness"]]
    return Comparison(**found), answers


def _own_report() -> bytes:
    LOG.drain(wait=True)
    found: dict[str, tuple[list[int], list[Entry]]] = {}
    for group in LOG.groups():
        if group.ring:
            # The members are part of the name: ranks that are in different groups may have named them alike.
            found.setdefault(f"{group.name} {group.global_ranks}", (group.global_ranks, []))[1].extend(group.ring)
    return zlib.compress(json.dumps(found).encode())


def _combine(reports: dict[int, bytes]) -> bytes:
    by_rank: dict[int, dict[str, Any]] = {}
    members: dict[str, list[int]] = {}
    for rank, report in reports.items():
        by_rank[rank] = {}
        for name, (ranks, entries) in json.loads(zlib.decompress(report)).items():
            members[name] = ranks
            by_rank[rank][name] = entries
    return zlib.compress(json.dumps(asdict(compare(by_rank, members))).encode())


# --- as text ------------------------------------------------------------------------------------------------------


def _skew_row(skew: Skew) -> dict[str, str]:
    late = UNKNOWN
    if skew.late_rank is not None:
        late = f"rank {skew.late_rank}, last in {skew.late_count}, {format_ms(skew.late_s / skew.count)} ms each"
    return {
        "operation": skew.op,
        "message": format_bytes(skew.message_bytes or None),
        "ranks": str(len(skew.ranks)),
        "count": str(skew.count),
        "transfer": format_ms(None if skew.transfer_s is None else skew.transfer_s / skew.count),
        "skew": format_ms(sum(skew.skew_s.values()) / skew.count / len(skew.ranks)),
        "the others waited for": late,
    }


def table_of(rows: list[dict[str, str]], empty: str) -> list[str]:
    return lines_of([list(rows[0]), *(list(row.values()) for row in rows)], left=1) if rows else [empty]


def _lateness_line(found: Lateness, *, several: bool) -> str:
    among = f" in group {found.group}" if several else ""
    waiting = format_ms(found.waiting_s)
    if found.late_rank is not None:
        which = "" if found.judged == found.count else " that were waited for longest"
        return (
            f"Rank {found.late_rank} is late{among}: it came last in {format_share(found.last_share)} of "
            f"{found.judged} operations{which} (chance: {format_share(1 / len(found.ranks))}), typically by "
            f"{format_ms(found.lateness_s)} ms, and cost {format_ms(found.cost_s)} ms an operation."
        )
    if not found.enough:
        return (
            f"Too few operations{among} to tell who is late ({found.count}; neighbours in time count in part): a rank "
            f"waited {waiting} ms for the last one, on average."
        )
    return f"No rank is late{among}: they take turns, and waiting for the last one took {waiting} ms an operation."


def straggler_lines(skews: list[Skew], lateness: list[Lateness]) -> list[str]:
    """The table of a comparison across ranks, and a sentence for each group."""
    lines = ["", "Waiting for each other (mean per operation, in ms; skew: own time less the shortest of any rank)"]
    lines += table_of([_skew_row(skew) for skew in skews], "nothing to compare")
    return lines + [_lateness_line(found, several=len(lateness) > 1) for found in lateness]
