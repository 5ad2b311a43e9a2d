"""``log_summary``: the log as a table and as data, and the ranks held against each other."""

from __future__ import annotations

import json
import sys
import zlib
from collections import Counter
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import torch.distributed as dist

from deep500_timing.adapters import DEADLINE_S, TRIM, Exchange, fit_encoding, rank_and_world, summarize
from deep500_timing_torch.comm._device import RECORDER, collect
from deep500_timing_torch.comm._log import CAPTURED, EXPOSED, FAILED, ISSUE, LOG, UNTIMED
from deep500_timing_torch.comm._ops import bandwidths
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._straggler import Lateness, Skew, compare
from deep500_timing_torch.comm._table import CommSummary, OpTimes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from deep500_timing_torch.comm._log import Record


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
    found.unfinished = LOG.unfinished()
    if any(times.device == "GPU" for times in found.ops):
        found.device_times = RECORDER.description()
    found.hints = list(_hints(found))
    return found


def _times_of(records: list[Record], pending: Mapping[Record, int] = {}) -> OpTimes:
    first = records[0]
    latency = summarize([record.latency for record in records])[0]
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
        device="GPU" if any(record.on_device for record in records) else "CPU",
        pending=sum(pending.get(record, 0) for record in records),
        failed=counts[FAILED],
        untimed=counts[UNTIMED],
        captured=counts[CAPTURED],
    )


# --- across ranks -------------------------------------------------------------------------------------------------

_exchange = Exchange("comm")


def _own_report() -> bytes:
    LOG.drain(wait=True)
    found: dict[str, tuple[list[int], list[Any]]] = {}
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


def add_stragglers(found: CommSummary, deadline_s: float) -> None:
    """Compare with the other ranks, which must do the same, and put what comes of it into the summary."""
    if not dist.is_initialized():
        found.stragglers = []
        return
    answers = _exchange.round(_own_report(), _combine, deadline_s)
    combined = json.loads(zlib.decompress(answers.combined or _combine(answers.reports)))
    # JSON knows neither tuples nor keys that are numbers.
    for row in (*combined["rows"], *combined["lateness"]):
        row["ranks"] = tuple(row["ranks"])
    for row in combined["rows"]:
        row["skew_s"] = {int(rank): skew_s for rank, skew_s in row["skew_s"].items()}
    found.stragglers = [Skew(**row) for row in combined["rows"]]
    found.lateness = [Lateness(**row) for row in combined["lateness"]]
    found.unmatched, found.mismatched = combined["unmatched"], combined["mismatched"]
    found.missing_ranks, found.ahead_ranks, found.fault = answers.missing, answers.ahead, answers.fault


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
