"""``log_summary``: the log as a table and as data, and the ranks held against each other."""

from __future__ import annotations

import json
import sys
import weakref
import zlib
from dataclasses import asdict, dataclass, field
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing._ranks.place import rank_and_world
from deep500_timing._summary.reading import summarize
from deep500_timing._summary.text import fit_encoding
from deep500_timing_torch.comm import _device
from deep500_timing_torch.comm._log import LOG, Record
from deep500_timing_torch.comm._ops import OPS, bandwidths
from deep500_timing_torch.comm._ranks import Answers, Exchange
from deep500_timing_torch.comm._straggler import Comparison, Skew, compare
from deep500_timing_torch.comm._table import render

if TYPE_CHECKING:
    from collections.abc import Iterable

TRIM = 0.1
"""Share of the times that the mean leaves out at each end."""


@dataclass(frozen=True, slots=True)
class OpTimes:
    """One operation at one message size, in groups of one size. Times are in seconds, None where they are unknown."""

    op: str
    message_bytes: float | None
    """Size as nccl-tests counts it; None where there is none, or none that is known."""
    group_size: int
    """Ranks of the group."""
    count: int
    """Operations whose time is known."""
    total_s: float
    """Sum of their times."""
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
    """Share of the asynchronous operations' time that nobody waited for, 0 to 1."""
    upper_bound: bool
    """The backend does not tell when some of these were done, only that it was before the end of the wait: times are
    upper bounds, bandwidths lower ones."""
    size_is_mean: bool
    """Messages of different sizes, within a power of two, of which ``message_bytes`` is the mean."""
    device: str
    """``"GPU"`` for times between events on a device, ``"CPU"`` for times on the host's clock."""
    pending: int
    """Asynchronous operations that are on their way, or that nobody has waited for."""
    failed: int
    """Operations that raised."""
    untimed: int
    """Operations that took place elsewhere, as in a coalescing block, or whose device time cannot be had."""


@dataclass(slots=True)
class CommSummary:
    """What :func:`log_summary` returns."""

    ops: list[OpTimes]
    """This rank's operations."""
    rank: int
    world_size: int
    stragglers: list[Skew] | None = None
    """The comparison across ranks, None if it was not asked for or could not be had."""
    missing_ranks: list[int] = field(default_factory=list)
    """Ranks that did not report within the deadline: dead, stuck, or not asked for a summary."""
    unmatched: int = 0
    """Operations that some rank of their group did not report."""
    mismatched: int = 0
    """Operations that are not the same one on every rank."""
    fault: str | None = None
    """What went wrong with the exchange, if anything did."""

    @property
    def late_rank(self) -> int | None:
        """The rank that the others waited for longest over all operations, None if there is none."""
        waits: dict[int, float] = {}
        for row in self.stragglers or ():
            if row.late_rank is not None:
                waits[row.late_rank] = waits.get(row.late_rank, 0.0) + row.late_s
        return max(waits, key=lambda rank: waits[rank]) if waits else None

    def find(self, op: str, message_bytes: float | None = None) -> OpTimes | None:
        """The times of an operation, at the message size if one is given; the first if there are several."""
        for times in self.ops:
            if times.op == op and (message_bytes is None or times.message_bytes == message_bytes):
                return times
        return None

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        return {**asdict(self), "late_rank": self.late_rank}

    def __str__(self) -> str:
        """The table."""
        return render(self)


def summary(*, wait: bool = False) -> CommSummary:
    """What this rank has recorded so far, printed nowhere and compared with nobody.

    Args:
        wait: Wait for times that are on their way from a device; without, they are counted as pending.
    """
    _device.collect(wait=wait)
    merged: dict[tuple[str, int | None, bool, int], list[Record]] = {}
    for record in LOG.records():
        key = (record.label, record.nbytes, record.size_is_mean, record.group.size)
        merged.setdefault(key, []).append(record)
    order = sorted(merged, key=lambda key: (key[0], -1 if key[1] is None else key[1], key[3]))
    rank, world_size = rank_and_world()
    return CommSummary([_times_of(merged[key]) for key in order], rank, world_size)


def _times_of(records: list[Record]) -> OpTimes:
    first = records[0]
    latency = summarize([record.latency for record in records])[0]
    stats = latency.stats()
    issues = [record.issue for record in records if record.issue is not None]
    issue = summarize(issues)[0].stats() if issues else None
    waits = [record.exposed for record in records if record.exposed is not None]
    exposed = summarize(waits)[0].stats() if waits else None
    paired_ns = sum(record.paired_latency_ns for record in records)
    hidden_ns = paired_ns - sum(record.paired_exposed_ns for record in records)
    mean_s = latency.trimmed_mean(TRIM)
    nbytes = first.message_bytes
    if first.size_is_mean:
        calls = sum(record.calls for record in records)
        nbytes = sum(record.bytes_total for record in records) / calls if calls else None
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
        issue_s=issue.mean if issue else None,
        exposed_s=exposed.total if exposed else None,
        overlap=min(max(hidden_ns / paired_ns, 0.0), 1.0) if paired_ns > 0 else None,
        upper_bound=any(record.upper_bound for record in records),
        size_is_mean=first.size_is_mean,
        device="GPU" if any(record.on_device for record in records) else "CPU",
        pending=sum(max(record.started - record.finished, 0) for record in records),
        failed=sum(record.failed for record in records),
        untimed=sum(record.untimed for record in records),
    )


# --- across ranks -------------------------------------------------------------------------------------------------

_last_round: tuple[Any, int] = (None, 0)
"""A reference to the store of the latest exchange, which it must not keep alive, and the number of the next one."""


def _exchange(report: bytes, rank: int, world_size: int, deadline_s: float) -> Answers:
    global _last_round
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    reference, number = _last_round
    if reference is None or reference() is not store:
        # Another process group, whose store has seen no round yet.
        reference, number = weakref.ref(store), 0
    answers = Exchange(store, rank, world_size, first=number).round(report, _combine, deadline_s)
    _last_round = reference, number + 1
    return answers


def _own_report() -> bytes:
    LOG.drain(wait=True)
    groups = [
        {"name": group.name, "ranks": group.global_ranks, "entries": list(group.ring)}
        for group in LOG.groups()
        if group.ring
    ]
    return zlib.compress(json.dumps(groups).encode())


def _synchronizes() -> dict[str, bool]:
    known = {op.same_as or op.name: op.synchronizes for op in OPS.values()}
    return known | {record.op.name: record.op.synchronizes for record in LOG.records() if record.op.name not in OPS}


def _compare(reports: dict[int, bytes]) -> Comparison:
    by_rank: dict[int, dict[str, list[Any]]] = {}
    members: dict[str, list[int]] = {}
    for rank, report in reports.items():
        own = by_rank.setdefault(rank, {})
        for group in json.loads(zlib.decompress(report)):
            # The members are part of the name: ranks that are in different groups may have named them alike.
            name = f"{group['name']} {group['ranks']}"
            members[name] = group["ranks"]
            own.setdefault(name, []).extend(tuple(entry) for entry in group["entries"])
    return compare(by_rank, members, _synchronizes())


def _combine(reports: dict[int, bytes]) -> bytes:
    comparison = _compare(reports)
    combined = {"reported": sorted(reports), **asdict(comparison)}
    return zlib.compress(json.dumps(combined).encode())


def _rows(plain: Iterable[dict[str, Any]]) -> list[Skew]:
    return [
        Skew(
            **row
            | {
                "ranks": tuple(row["ranks"]),
                "skew_s": {int(rank): skew for rank, skew in row["skew_s"].items()},
            }
        )
        for row in plain
    ]


def add_stragglers(found: CommSummary, deadline_s: float) -> None:
    """Compare with the other ranks, which must do the same, and put what comes of it into the summary."""
    if not (dist.is_available() and dist.is_initialized()):
        found.stragglers = []
        return
    answers = _exchange(_own_report(), found.rank, found.world_size, deadline_s)
    found.fault = answers.fault
    if answers.combined is not None:
        combined = json.loads(zlib.decompress(answers.combined))
        reported = set(combined["reported"])
        found.stragglers = _rows(combined["rows"])
        found.unmatched, found.mismatched = combined["unmatched"], combined["mismatched"]
    else:
        comparison = _compare(answers.reports)
        reported = set(answers.reports)
        found.stragglers = comparison.rows
        found.unmatched, found.mismatched = comparison.unmatched, comparison.mismatched
    found.missing_ranks = sorted(set(range(found.world_size)) - reported)


def log_summary(show_straggler: bool = False, *, deadline_s: float = 10.0, file: IO[str] | None = None) -> CommSummary:
    """Print a table of the operations, on rank 0, and return it as data.

    Args:
        show_straggler: Compare with the other ranks: how much of each operation is transfer and how much is waiting,
            and for whom. Every rank must call it, as often as the others. Ranks exchange through the store of the
            process group; those that do not answer are named as missing.
        deadline_s: Seconds after which a rank that has not reported is missing. No rank takes longer than that.
        file: Where to print; the standard output if None.
    """
    found = summary(wait=True)
    if show_straggler:
        add_stragglers(found, deadline_s)
    # Should rank 0 be dead, the first of the others prints.
    if found.rank == next((rank for rank in range(found.world_size) if rank not in found.missing_ranks), 0):
        stream = file or sys.stdout
        print(fit_encoding(str(found), getattr(stream, "encoding", None)), file=stream)
    return found
