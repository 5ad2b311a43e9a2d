"""Transfer and skew of the same operation on every rank, and the rank that the others wait for.

A rank's time in a collective holds its wait for the last rank to come. So the shortest time of any rank is the
transfer, and what a rank's own time is longer by is skew, spent waiting. The rank that waits *least* is the one that
the others waited for; whether that says anything about the rank is asked of
:func:`deep500_timing.ranks.find_stragglers`, which judges runs as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from deep500_timing.adapters import (
    UNKNOWN,
    Exchange,
    format_bytes,
    format_ms,
    format_share,
    lines_of,
    safe_name,
    steps_of_operations,
)
from deep500_timing.ranks import Stragglers, find_stragglers
from deep500_timing_torch.comm._log import LOG

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
    transfer_s: float
    """Sum over operations of the shortest time of any rank."""
    skew_s: dict[int, float]
    """For each rank, the sum of what its own times were longer by: how long it waited."""
    late_rank: int | None
    """The rank that is late in these operations by more than chance and jitter explain; None if none is, or too few
    were compared to tell."""
    late_count: int
    """In how many operations it came last; 0 if there is none."""
    late_s: float
    """How long, on average over the others, they waited for it: the sum over operations; 0 if there is none."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Comparison:
    """The ranks' reports, compared."""

    rows: list[Skew] = field(default_factory=list)
    lateness: dict[str, Stragglers] = field(default_factory=dict)
    """For each group, who is late, from all of its operations."""
    unmatched: int = 0
    """Operations that some rank of the group did not report: it was not timing, it is behind, or it is dead."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""


def compare(reports: Mapping[int, Mapping[str, Iterable[Entry]]], groups: Mapping[str, Iterable[int]]) -> Comparison:
    """Compare the operations of several ranks, each with the same one elsewhere.

    No rank leaves one of them before every rank has come.
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
                meetings_ns.append(times_ns[name, nbytes][-1])
        if meetings_ns:
            result.lateness[group] = _judged(ranks, meetings_ns)
        for (name, nbytes), rows_ns in times_ns.items():
            result.rows.append(_skew(name, group, nbytes, ranks, rows_ns))
    result.rows.sort(key=lambda row: (row.op, row.group, row.message_bytes))
    return result


def _judged(ranks: tuple[int, ...], times_ns: list[list[int]]) -> Stragglers:
    # From one row of times for each operation, in the order of the ranks.
    import numpy as np

    return find_stragglers(steps_of_operations(ranks, np.array(times_ns) / 1e9, met_at="collective operations"))


def _skew(name: str, group: str, nbytes: int, ranks: tuple[int, ...], times_ns: list[list[int]]) -> Skew:
    import numpy as np

    times_s = np.array(times_ns) / 1e9
    shortest_s = times_s.min(axis=1, keepdims=True)
    waits_s = times_s - shortest_s
    late = next(iter(_judged(ranks, times_ns).ranks), None)
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

_MOST = 1 << 62
"""Numbers of operations, sizes and times in nanoseconds are below it."""


def own_report() -> dict[str, tuple[list[int], list[Entry]]]:
    LOG.drain(wait=True)
    found: dict[str, tuple[list[int], list[Entry]]] = {}
    for group in LOG.groups():
        if group.ring:
            # The members are part of the name: ranks that are in different groups may have named them alike.
            found.setdefault(f"{group.name} {group.global_ranks}", (group.global_ranks, []))[1].extend(group.ring)
    return found


def _read(report: dict[str, Any]) -> dict[str, Any]:
    # A rank's report as it is; it raises what it likes if it is none.
    for name, (ranks, entries) in report.items():
        if not name.endswith(f" {ranks}") or len({*ranks}) < len(ranks) or not {*map(type, ranks)} <= {int}:
            raise ValueError("a group has not the ranks that its name says")
        for sequence, op, nbytes, time_ns in entries:
            numbers = sequence, nbytes, time_ns
            if type(op) is not str or not all(type(one) is int and abs(one) < _MOST for one in numbers):
                raise ValueError("an operation is not a number, a name, a size and a time")
    return report


def _combine(reports: dict[int, dict[str, Any]]) -> dict[str, Any]:
    members = {name: ranks for report in reports.values() for name, (ranks, _) in report.items()}
    entries = {rank: {name: own for name, (_, own) in report.items()} for rank, report in reports.items()}
    return asdict(compare(entries, members))


def _opened(plain: dict[str, Any]) -> Comparison:
    # JSON knows neither tuples nor keys that are numbers.
    skews = [row | {"skew_s": {int(rank): skew_s for rank, skew_s in row["skew_s"].items()}} for row in plain["rows"]]
    return Comparison(
        rows=[Skew(**row | {"ranks": tuple(row["ranks"])}) for row in skews],
        lateness={group: Stragglers.from_dict(found) for group, found in plain["lateness"].items()},
        unmatched=int(plain["unmatched"]),
        mismatched=int(plain["mismatched"]),
    )


exchange = Exchange("comm", _read, _combine, _opened)
"""Its result is a :class:`Comparison`."""


# --- as text ------------------------------------------------------------------------------------------------------


def _skew_row(skew: Skew) -> dict[str, str]:
    late = UNKNOWN
    if skew.late_rank is not None:
        late = f"rank {skew.late_rank}, last in {skew.late_count}, {format_ms(skew.late_s / skew.count)} ms each"
    return {
        "operation": safe_name(skew.op),
        "message": format_bytes(skew.message_bytes or None),
        "ranks": str(len(skew.ranks)),
        "count": str(skew.count),
        "transfer": format_ms(skew.transfer_s / skew.count),
        "skew": format_ms(sum(skew.skew_s.values()) / skew.count / len(skew.ranks)),
        "the others waited for": late,
    }


def table_of(rows: list[dict[str, str]], empty: str) -> list[str]:
    return lines_of([list(rows[0]), *(list(row.values()) for row in rows)], left=1) if rows else [empty]


def _lateness_line(group: str, found: Stragglers, *, several: bool) -> str:
    among = f" in group {safe_name(group)}" if several else ""
    test = found.operations
    assert test is not None
    waiting = format_ms(test.waiting_s)
    if found.ranks:
        which = "" if test.judged == test.operations else " that were waited for longest"
        return (
            f"Rank {found.ranks[0]} is late{among}: it came last in {format_share(found.last_share)} of "
            f"{test.judged} operations{which} (chance: {format_share(1 / len(found.lateness))}), typically by "
            f"{format_ms(found.lateness_s)} ms, and cost {format_ms(test.cost_s)} ms an operation."
        )
    if not test.enough:
        return (
            f"Too few operations{among} to tell who is late ({test.operations}; neighbours in time count in part): a "
            f"rank waited {waiting} ms for the last one, on average."
        )
    return f"No rank is late{among}: they take turns, and waiting for the last one took {waiting} ms an operation."


def straggler_lines(skews: list[Skew], lateness: dict[str, Stragglers]) -> list[str]:
    """The table of a comparison across ranks, and a sentence for each group."""
    lines = ["", "Waiting for each other (mean per operation, in ms; skew: own time less the shortest of any rank)"]
    lines += table_of([_skew_row(skew) for skew in skews], "nothing to compare")
    return lines + [_lateness_line(group, found, several=len(lateness) > 1) for group, found in lateness.items()]
