"""The log as data and as a table: what :func:`summary` returns and :func:`log_summary` prints."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing.adapters import (
    CPU,
    DEADLINE_S,
    GPU,
    TRIM,
    fit_encoding,
    format_bytes,
    format_ms,
    format_number,
    format_share,
    rank_and_world,
    summarize,
    warn_once,
)
from deep500_timing_torch.comm._device import RECORDER, collect
from deep500_timing_torch.comm._log import CAPTURED, EXPOSED, FAILED, ISSUE, LOG, UNTIMED, Record
from deep500_timing_torch.comm._ops import bandwidths
from deep500_timing_torch.comm._settings import SETTINGS, fault
from deep500_timing_torch.comm._straggler import Skew, exchange, own_report, straggler_lines, table_of

if TYPE_CHECKING:
    from deep500_timing.ranks import Stragglers

_MOST_NAMED = 8


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
    lateness: dict[str, Stragglers] = field(default_factory=dict)
    """For each group, the straggler, if there is one."""
    ahead_ranks: dict[int, int] = field(default_factory=dict)
    """Ranks that have asked for so many more comparisons than the others since the one before."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks without a report within the deadline: dead, stuck, or they did not call it, or it could not be read."""
    unreadable_ranks: dict[int, str] = field(default_factory=dict)
    """Ranks with a report that could not be read, and the reason."""
    unmatched: int = 0
    """Operations that some rank of their group did not report."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""
    fault: str | None = None
    """The error of the exchange, None if there was none."""

    @property
    def late_rank(self) -> int | None:
        """The rank that is late by more than chance and jitter explain; the costliest, if groups differ; else None."""
        costs_s = {
            found.ranks[0]: found.operations.cost_s * found.operations.operations
            for found in self.lateness.values()
            if found.ranks and found.operations is not None
        }
        return max(costs_s, key=costs_s.__getitem__, default=None)

    def find(self, op: str, message_bytes: float | None = None) -> OpTimes | None:
        """The times of an operation, at the message size if one is given; the first if there are several."""
        found = (times for times in self.ops if times.op == op and message_bytes in (None, times.message_bytes))
        return next(found, None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "late_rank": self.late_rank}

    def __str__(self) -> str:
        return "\n".join(_lines(self))


# --- as text ------------------------------------------------------------------------------------------------------


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


def _lines(summary: CommSummary) -> list[str]:
    lines = [f"Communication, rank {summary.rank} of {summary.world_size} (times in ms, bandwidths in GB/s = 1e9 B/s)"]
    lines += table_of([_op_row(times) for times in summary.ops], "nothing recorded")
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
    lines += [f"Not finished: {operation}." for operation in _first(summary.unfinished)]
    for group, count in summary.unseen.items():
        operations, were = ("1 operation", "was") if count == 1 else (f"{count} operations", "were")
        lines.append(f"{operations} of group {group!r} {were} issued by code that is not timed.")
    lines += summary.hints
    if summary.stragglers is not None:
        lines += straggler_lines(summary.stragglers, summary.lateness)
        lines += _gaps(summary)
    return lines


def _gaps(summary: CommSummary) -> list[str]:
    lines = []
    silent = [rank for rank in summary.missing_ranks if rank not in summary.unreadable_ranks]
    if silent:
        ranks = ", ".join(map(str, silent))
        lines.append(f"No report from rank {ranks} within the deadline: dead, stuck, or without a summary of its own.")
    for rank, reason in summary.unreadable_ranks.items():
        lines.append(f"Rank {rank} sent what cannot be read, so its times are left out: {reason}.")
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


def _first(unfinished: list[Unfinished]) -> list[str]:
    # The first ones as text, and how many more there are.
    more = len(unfinished) - _MOST_NAMED
    return [*map(str, unfinished[:_MOST_NAMED]), *([f"{more} more"] if more > 0 else [])]


def _hints(found: CommSummary) -> Iterator[str]:
    # Why a summary is empty or incomplete, each reason with its remedy.
    by_functions = SETTINGS.instruments and SETTINGS.kernel is None
    if not SETTINGS.enabled:
        yield "Timing is switched off: comm.configure(enabled=True) switches it on."
    elif not SETTINGS.prof_all:
        only = ", ".join(sorted(SETTINGS.prof_ops)) or "nothing"
        yield f"Only {only} is timed, by configure(prof_all=False): comm.configure(prof_all=True) times everything."
    elif found.unseen and SETTINGS.kernel is not None:
        yield (
            "The compiled kernel sees all that PyTorch hands to a process group; these were issued through a backend "
            "object itself, or by a thread that was within an operation of comm.timed_op."
        )
    elif found.unseen:
        yield (
            "Patched functions do not see what is issued from C++ (DDP's reducer, functional and compiled collectives, "
            "DTensor), names that were imported before, and methods of a ProcessGroup."
        )
        if by_functions:
            yield f"The compiled kernel sees them; it is not at work because {SETTINGS.why_no_kernel}."
        else:
            yield "comm.instrument() sees them, by its compiled kernel; DDP's buckets also comm.instrument_ddp(model)."
    elif found.ops:
        if by_functions:
            yield f"Timed by patched functions; the compiled kernel is not at work because {SETTINGS.why_no_kernel}."
    elif not dist.is_initialized() and not LOG.known_groups:
        yield "There is no process group yet: nothing can have been communicated."
    elif SETTINGS.instruments:
        yield "comm.instrument() is in force, and no process group has issued an operation since."
    else:
        yield (
            "Only calls by way of deep500_timing_torch.comm are timed: call comm.instrument() before the training to "
            "time code that calls torch.distributed itself."
        )


# --- of this rank -------------------------------------------------------------------------------------------------


def summary(*, wait: bool = False) -> CommSummary:
    """The operations of this rank so far, without printing and without the other ranks.

    Args:
        wait: Wait for times that are on their way, as from a device; without, they are counted as pending.
    """
    collect(wait=wait)
    if wait:
        LOG.await_callbacks()
    merged: dict[tuple[str, int | None, bool, int], list[Record]] = {}
    for record in LOG.records():
        key = (record.label, record.nbytes, record.size_is_mean, record.group.size)
        merged.setdefault(key, []).append(record)
    order = sorted(merged, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[3]))
    pending = Counter(op.record for op in LOG.pending())
    rank, world_size = rank_and_world()
    found = CommSummary([_times_of(merged[key], pending) for key in order], rank, world_size)
    found.unseen = LOG.unseen()
    found.unfinished = _unfinished()
    if any(times.device == GPU for times in found.ops):
        found.device_times = RECORDER.description()
    found.hints = list(_hints(found))
    return found


def _unfinished() -> list[Unfinished]:
    try:
        now_ns = SETTINGS.now_ns()
    except Exception as error:
        fault("operations that have not finished", error)
        return []
    found = []
    for op in LOG.pending():
        record = op.record
        age_s = max(now_ns - op.start_ns, 0) / 1e9
        found.append(Unfinished(record.label, record.group.name, op.sequence, record.message_bytes, age_s))
    return found


def report_time_out(op: Any, error: BaseException) -> None:
    """If an operation has timed out, warn with what this rank has issued and not finished."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not ("timeout" in text or "timed out" in text):
        return
    group = op.record.group
    warn_once(
        f"{op.record.label} timed out on rank {group.global_ranks[group.rank]}. Issued and not finished on this rank: "
        f"{'; '.join(_first(_unfinished()))}. A rank that does not list a number has finished or not issued that "
        "operation.",
        key=f"comm time-out {op.record.label} {op.sequence}",
    )


def _times_of(records: list[Record], pending: Counter[Record]) -> OpTimes:
    first = records[0]
    latency = summarize([record.latency for record in records])
    stats = latency.stats()
    mean_s = latency.trimmed_mean(TRIM)

    counts = [sum(several) for several in zip(*(record.counts for record in records), strict=True)]
    sums_ns = [sum(several) for several in zip(*(record.sums_ns for record in records), strict=True)]
    paired_ns = sum(record.paired_ns for record in records)
    hidden_ns = sum(record.hidden_ns for record in records)
    nbytes = first.message_bytes
    if first.size_is_mean:
        nbytes = sum(record.bytes_total for record in records) / sum(record.calls for record in records)
    algbw, busbw = bandwidths(nbytes, first.group.size, mean_s or 0.0, first.op.factor)
    return OpTimes(
        op=first.label,
        message_bytes=nbytes,
        group_size=first.group.size,
        count=stats.count if stats else 0,
        total_s=stats.total if stats else 0.0,
        mean_s=mean_s,
        p50_s=stats.median if stats else None,
        p95_s=stats.p95 if stats else None,
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=busbw,
        issue_s=sums_ns[ISSUE] / counts[ISSUE] / 1e9 if counts[ISSUE] else None,
        exposed_s=sums_ns[EXPOSED] / 1e9 if counts[EXPOSED] else None,
        overlap=min(max(hidden_ns / paired_ns, 0.0), 1.0) if paired_ns > 0 else None,
        upper_bound=any(record.upper_bound for record in records),
        size_is_mean=first.size_is_mean,
        device=GPU if any(record.on_device for record in records) else CPU,
        pending=sum(pending[record] for record in records),
        failed=counts[FAILED],
        untimed=counts[UNTIMED],
        captured=counts[CAPTURED],
    )


# --- across ranks -------------------------------------------------------------------------------------------------


def add_stragglers(found: CommSummary, deadline_s: float) -> None:
    """Compare with the other ranks, which must do the same, and put what comes of it into the summary."""
    if not dist.is_initialized():
        found.stragglers = []
        return
    answers = exchange.round(own_report(), deadline_s)
    compared = answers.result
    found.stragglers, found.lateness = compared.rows, compared.lateness
    found.unmatched, found.mismatched = compared.unmatched, compared.mismatched
    found.missing_ranks, found.ahead_ranks, found.fault = answers.missing, answers.ahead, answers.fault
    found.unreadable_ranks = answers.unreadable


def log_summary(
    show_straggler: bool = False, *, deadline_s: float = DEADLINE_S, file: IO[str] | None = None
) -> CommSummary:
    """Print a table of the operations, on rank 0, and return it as data.

    Args:
        show_straggler: Compare with the other ranks: how much of each operation is transfer and how much is waiting,
            and for whom. Every rank must call it; one that does not costs the others the deadline, and is named as
            missing. Ranks exchange through the store of the process group.
        deadline_s: Seconds after which a rank that has not reported is missing. No rank takes longer than that.
        file: Where to print; the standard output if None.
    """
    found = summary(wait=True)
    if show_straggler:
        add_stragglers(found, deadline_s)
    # If rank 0 is dead, the first of the others prints; without its store the ranks do not know which of them live.
    first = next((rank for rank in range(found.world_size) if rank not in found.missing_ranks), 0)
    if found.rank == first or (found.fault is not None and found.rank == 1):
        stream = file or sys.stdout
        print(fit_encoding(str(found), getattr(stream, "encoding", None)), file=stream)
    return found
