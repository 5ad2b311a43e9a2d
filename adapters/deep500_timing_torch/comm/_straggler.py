"""Who waits for whom: transfer and skew of the same operation on every rank.

A rank's time in a collective holds its wait for the last rank to come. So the shortest time of any rank is the
transfer, and what a rank's own time is longer by is skew, spent waiting. The rank that waits *least* is the one that
the others waited for.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

Entry = tuple[int, str, int, int]
"""One operation on one rank: how many collectives its group had issued then, its name, bytes, time in ns."""

LATE_SHARE = 0.1
"""A rank is called late if the others' waits for it are at least this share of all their time in the operation."""


@dataclass(frozen=True, slots=True)
class Skew:
    """One operation at one message size in one group, compared across ranks. Times are in seconds."""

    op: str
    message_bytes: int
    """The largest on any rank; 0 for operations without a size."""
    group: str
    """Name of the process group."""
    ranks: tuple[int, ...]
    """Global ranks that were compared."""
    count: int
    """Operations that every one of them has reported."""
    transfer_s: float
    """Sum over operations of the shortest time of any rank."""
    skew_s: dict[int, float]
    """For each rank, the sum of what its own times were longer by: how long it waited."""
    late_rank: int | None
    """The rank that the others waited for most, None if they waited for nobody to speak of, or if ranks may leave
    the operation before others come, as in a broadcast."""
    late_count: int
    """In how many operations it came last."""
    late_s: float
    """How long, on average over the others, they waited for it: the sum over operations."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return asdict(self)


@dataclass(slots=True)
class Comparison:
    """What the ranks' reports say together."""

    rows: list[Skew] = field(default_factory=list)
    unmatched: int = 0
    """Operations that some rank of the group did not report: it was not timing, it is behind, or it is dead."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""


def compare(
    reports: Mapping[int, Mapping[str, Iterable[Entry]]],
    groups: Mapping[str, Iterable[int]],
    synchronizes: Mapping[str, bool],
) -> Comparison:
    """Compare the operations of several ranks, each with the same one elsewhere.

    Args:
        reports: For each rank that reported, for each of its groups, its operations.
        groups: The global ranks of each group.
        synchronizes: For the name of an operation, whether no rank leaves it before every rank has come.
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
        for entries in by_sequence.values():
            if len(entries) < len(ranks) or len(ranks) < 2:
                result.unmatched += len(ranks) > 1
                continue
            names = {entry[1] for entry in entries.values()}
            if len(names) > 1:
                result.mismatched += 1
                continue
            nbytes = max(entry[2] for entry in entries.values())
            times = {rank: entry[3] for rank, entry in entries.items()}
            gathered.setdefault((names.pop(), group, nbytes), []).append(times)
    for (name, group, nbytes), operations in sorted(gathered.items()):
        result.rows.append(_skew(name, group, nbytes, members[group], operations, synchronizes.get(name, False)))
    return result


def _skew(
    name: str, group: str, nbytes: int, ranks: tuple[int, ...], operations: list[dict[int, int]], synchronizes: bool
) -> Skew:
    transfer_ns = 0
    skew_ns = dict.fromkeys(ranks, 0)
    waited_for_ns = dict.fromkeys(ranks, 0.0)
    came_last = dict.fromkeys(ranks, 0)
    longest_ns = 0
    for times in operations:
        shortest = min(times.values())
        transfer_ns += shortest
        longest_ns += max(times.values())
        last = min(times, key=lambda rank: times[rank])
        came_last[last] += 1
        for rank, own in times.items():
            skew_ns[rank] += own - shortest
        waited_for_ns[last] += sum(own - shortest for own in times.values()) / (len(times) - 1)
    late = max(ranks, key=lambda rank: waited_for_ns[rank])
    called = synchronizes and waited_for_ns[late] > 0 and waited_for_ns[late] >= LATE_SHARE * longest_ns
    return Skew(
        op=name,
        message_bytes=nbytes,
        group=group,
        ranks=ranks,
        count=len(operations),
        transfer_s=transfer_ns / 1e9,
        skew_s={rank: skew / 1e9 for rank, skew in skew_ns.items()},
        late_rank=late if called else None,
        late_count=came_last[late] if called else 0,
        late_s=waited_for_ns[late] / 1e9 if called else 0.0,
    )
