"""The summary as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import UNKNOWN, format_bytes, format_ms, format_number, format_share, lines_of

if TYPE_CHECKING:
    from deep500_timing_torch.comm._straggler import Lateness, Skew


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One operation at one message size, in groups of one size. Times are in seconds, None where they are unknown."""

    op: str
    message_bytes: float | None
    """Size as nccl-tests counts it; None where there is none, or none that is known."""
    group_size: int
    count: int
    """Operations with a known time."""
    total_s: float
    mean_s: float | None
    """Mean without the shortest and the longest tenth."""
    p50_s: float | None
    p95_s: float | None
    algbw_gb_per_s: float | None
    """``message_bytes / mean_s``, in 1e9 bytes per second."""
    busbw_gb_per_s: float | None
    """The same times the factor of the operation, to be held against the speed of the links."""
    issue_s: float | None
    """Mean time in the calls of asynchronous operations; on a device, in the calls of all."""
    exposed_s: float | None
    """Sum of the times spent waiting for asynchronous operations."""
    overlap: float | None
    """Share of the asynchronous operations' time that no caller waited for, 0 to 1."""
    upper_bound: bool
    """Some of these are known only to have ended before their wait did: times are upper bounds, bandwidths lower
    ones."""
    size_is_mean: bool
    """Messages of different sizes, within a power of two, of which ``message_bytes`` is the mean."""
    device: str
    """``"GPU"`` for times between events on a device, ``"CPU"`` for times on the host's clock."""
    pending: int
    """Operations that have not ended, or were not read since."""
    failed: int
    untimed: int
    """Operations without a known time, as in a coalescing block."""
    captured: int = 0
    """Operations that were captured into a CUDA graph, and have not run when they were called."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation of this rank that was issued and has not finished."""

    op: str
    group: str
    sequence: int | None
    """The group's sequence number of it, the same on every rank; None if the backend does not count."""
    message_bytes: float | None
    age_s: float
    """Seconds since it was issued."""

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        size = "" if self.message_bytes is None else f", {self.message_bytes:.0f} B"
        return f"{self.op}{number} of group {self.group!r}{size}, issued {self.age_s:.3f} s ago"


@dataclass(slots=True)
class CommSummary:
    """This rank's operations, and a comparison with the other ranks. As text, it is a table."""

    ops: list[OpTimes]
    rank: int
    world_size: int
    unseen: dict[str, int] = field(default_factory=dict)
    """For each process group, by its name, how many operations it issued by code that is not timed."""
    unfinished: list[Unfinished] = field(default_factory=list)
    """Operations that were issued and have not finished, the oldest first."""
    device_times: str | None = None
    """How operations on a device were timed, None if there were none."""
    hints: list[str] = field(default_factory=list)
    """Reasons why nothing was recorded, or not everything, with the remedy."""
    stragglers: list[Skew] | None = None
    """The comparison across ranks, None if it was not requested or failed."""
    lateness: list[Lateness] = field(default_factory=list)
    """For each group, the straggler, if there is one."""
    ahead_ranks: dict[int, int] = field(default_factory=dict)
    """Ranks that have asked for so many more comparisons than the others since the one before."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks that did not report within the deadline: dead, stuck, or they did not call it."""
    unmatched: int = 0
    """Operations that some rank of their group did not report."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""
    fault: str | None = None
    """The error of the exchange, None if there was none."""

    @property
    def late_rank(self) -> int | None:
        """The rank that is late by more than chance and jitter explain; the costliest, if groups differ; else None."""
        late = [found for found in self.lateness if found.late_rank is not None]
        return max(late, key=lambda found: found.cost_s * found.count).late_rank if late else None

    def find(self, op: str, message_bytes: float | None = None) -> OpTimes | None:
        """The times of an operation, at the message size if one is given; the first if there are several."""
        found = (times for times in self.ops if times.op == op and message_bytes in (None, times.message_bytes))
        return next(found, None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "late_rank": self.late_rank}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_MOST_UNFINISHED = 8


def _op_row(times: OpTimes) -> dict[str, str]:
    upper, lower = ("<=", ">=") if times.upper_bound else ("", "")
    return {
        "operation": times.op,
        "message": ("~" if times.size_is_mean else "") + format_bytes(times.message_bytes),
        "ranks": str(times.group_size),
        "on": times.device,
        "count": str(times.count),
        "total": format_ms(times.total_s),
        "mean": format_ms(times.mean_s, mark=upper),
        "p50": format_ms(times.p50_s),
        "p95": format_ms(times.p95_s),
        "algbw": format_number(times.algbw_gb_per_s, mark=lower),
        "busbw": format_number(times.busbw_gb_per_s, mark=lower),
        "exposed": format_ms(times.exposed_s),
        "overlap": format_share(times.overlap),
    }


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


def _table_of(rows: list[dict[str, str]], empty: str) -> list[str]:
    return lines_of([list(rows[0]), *(list(row.values()) for row in rows)], left=1) if rows else [empty]


def _lines(summary: CommSummary) -> list[str]:
    lines = [f"Communication, rank {summary.rank} of {summary.world_size} (times in ms, bandwidths in GB/s = 1e9 B/s)"]
    lines += _table_of([_op_row(times) for times in summary.ops], "nothing recorded")
    if any(times.upper_bound for times in summary.ops):
        lines.append("<=, >=: bounds: the time from the call to the end of the wait, within which it ended.")
    if any(times.size_is_mean for times in summary.ops):
        lines.append("~: messages of several sizes, within a power of two; the size is their mean.")
    for times in summary.ops:
        counts = (times.pending, times.failed, times.untimed, times.captured)
        kinds = ("pending", "failed", "not timed", "captured")
        said = ", ".join(f"{count} {kind}" for count, kind in zip(counts, kinds, strict=True) if count)
        if said:
            lines.append(f"{times.op}, {format_bytes(times.message_bytes)}: {said}")
    if summary.device_times is not None:
        lines.append(f"GPU times: {summary.device_times}.")
    lines += [f"Not finished: {operation}." for operation in summary.unfinished[:_MOST_UNFINISHED]]
    if len(summary.unfinished) > _MOST_UNFINISHED:
        lines.append(f"Not finished: {len(summary.unfinished) - _MOST_UNFINISHED} more.")
    for group, count in summary.unseen.items():
        operations, were = ("1 operation", "was") if count == 1 else (f"{count} operations", "were")
        lines.append(f"{operations} of group {group!r} {were} issued by code that is not timed.")
    lines += summary.hints
    if summary.stragglers is not None:
        lines += straggler_lines(summary.stragglers, summary.lateness)
        lines += _gaps(summary)
    return lines


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
    lines += _table_of([_skew_row(skew) for skew in skews], "nothing to compare")
    return lines + [_lateness_line(found, several=len(lateness) > 1) for found in lateness]


def _gaps(summary: CommSummary) -> list[str]:
    lines = []
    if summary.missing_ranks:
        ranks = ", ".join(map(str, summary.missing_ranks))
        lines.append(f"No report from rank {ranks} within the deadline: dead, stuck, or without a summary of its own.")
    for rank, rounds in summary.ahead_ranks.items():
        where, more = ("ahead", "more") if rounds > 0 else ("behind", "fewer")
        times = "a round" if abs(rounds) == 1 else f"{abs(rounds)} rounds"
        lines.append(f"Rank {rank} is {times} {where}: it has asked for {more} comparisons than the others.")
    if summary.unmatched:
        lines.append(f"Not compared: {summary.unmatched} operations that some rank of their group did not report.")
    if summary.mismatched:
        lines.append(f"Not compared: {summary.mismatched} operations that are not the same on every rank.")
    if summary.fault:
        lines.append(f"The exchange through the store failed: {summary.fault}")
    return lines
