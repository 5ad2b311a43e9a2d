"""Transfer and skew of the same operation on every rank, and the rank that the others wait for.

A rank's time in a collective holds its wait for the last rank to come. So the shortest time of any rank is the
transfer, and what a rank's own time is longer by is skew, spent waiting. The rank that waits *least* is the one that
the others waited for; whether that says anything about the rank is asked of
:func:`deep500_timing.ranks.find_stragglers`, which judges runs as well.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

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
    gathered: dict[tuple[str, str, int], list[dict[int, int]]] = {}
    members: dict[str, tuple[int, ...]] = {}
    for group, all_ranks in groups.items():
        ranks = members[group] = tuple(rank for rank in all_ranks if rank in reports)
        by_sequence: dict[int, dict[int, Entry]] = {}
        for rank in ranks:
            for entry in reports[rank].get(group, ()):
                by_sequence.setdefault(entry[0], {})[rank] = entry
        meetings = []
        for _, entries in sorted(by_sequence.items()):
            if len(entries) < len(ranks) or len(ranks) < 2:
                result.unmatched += len(ranks) > 1
                continue
            names = {entry[1] for entry in entries.values()}
            if len(names) > 1:
                result.mismatched += 1
                continue
            nbytes = max(entry[2] for entry in entries.values())
            times = {rank: entry[3] for rank, entry in entries.items()}
            name = names.pop()
            gathered.setdefault((name, group, nbytes), []).append(times)
            if synchronizing is None or name in synchronizing:
                meetings.append(times)
        if meetings:
            result.lateness.append(_lateness(group, ranks, meetings))
    for (name, group, nbytes), operations in sorted(gathered.items()):
        meets = synchronizing is None or name in synchronizing
        result.rows.append(_skew(name, group, nbytes, members[group], operations, meets))
    return result


def _times_s(ranks: tuple[int, ...], operations: list[dict[int, int]]) -> Any:
    import numpy as np

    return np.array([[times[rank] for rank in ranks] for times in operations]) / 1e9


def _judged(ranks: tuple[int, ...], times_s: Any) -> Stragglers:
    from deep500_timing.adapters import steps_of_operations
    from deep500_timing.ranks import find_stragglers

    return find_stragglers(steps_of_operations(ranks, times_s, met_at="collective operations"))


def _lateness(group: str, ranks: tuple[int, ...], operations: list[dict[int, int]]) -> Lateness:
    found = _judged(ranks, _times_s(ranks, operations))
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


def _skew(
    name: str, group: str, nbytes: int, ranks: tuple[int, ...], operations: list[dict[int, int]], meets: bool
) -> Skew:
    times_s = _times_s(ranks, operations)
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
        count=len(operations),
        transfer_s=float(shortest_s.sum()),
        skew_s=dict(zip(ranks, waits_s.sum(axis=0).tolist(), strict=True)),
        late_rank=late,
        late_count=int(for_late.sum()),
        late_s=float(waits_s[for_late].sum()) / (len(ranks) - 1),
    )
