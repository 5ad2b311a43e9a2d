"""late-rank, imbalance, exposed-communication: what ranks do to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import COMMUNICATION, STEP, name_of, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.tree import REST

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._distributed.verdict import Stragglers
    from deep500_timing._views.findings._evidence import Evidence


def late_rank(evidence: Evidence) -> Iterator[Finding]:
    """One rank comes late to where all meet, by the judgement of ``deep500-timing stragglers`` alone."""
    found = evidence.stragglers
    if found is None or not found.ranks or found.lateness_s < at_least.LATE_SHARE * found.step_s:
        return
    saved = found.what_if.without_rank_s if found.what_if is not None else 0.0
    if saved < at_least.LATE_COST * found.step_s:
        return
    rank, each = found.ranks[0], "operations" if found.operations is not None else "steps"
    who = f"Rank {rank} is late"
    if found.kind == "node":
        who = f"The machine {name_of(found.host or '')} is late, its rank {rank}"
    elif len(found.ranks) > 1:
        who = f"{len(found.ranks)} ranks are late, rank {rank}"
    judged = found.operations.judged if found.operations is not None else found.steps
    why = ""
    if found.region is not None:
        what = f"its {name_of(found.region)}" if found.region != REST else "what no region of its step covers"
        why = f"{what} takes {took(found.excess_s)} longer than on the other ranks"
    yield Finding(
        "late-rank",
        f"{who} at {percent(found.last_share)} of {judged} {each} (chance: {percent(1 / len(evidence.by_rank))}), "
        f"by {took(found.lateness_s)}",
        where=_course(found),
        why=why,
        command=evidence.command("stragglers"),
        cost_s=saved * found.steps,
        anchor="stragglers",
        rank=rank,
    )


def _course(found: Stragglers) -> str:
    if found.grows:
        return "more and more"
    return "" if found.since is None else f"since step {found.since}"


def _own_work(evidence: Evidence) -> dict[str, dict[int, float]]:
    # Mean per step of what lies directly in BATCH and is no communication, by path and rank.
    step = evidence.step_node
    if step is None:
        return {}
    waits = {COMMUNICATION}
    if evidence.run is not None:
        waits |= {
            row["op"]
            for row in evidence.run.table("collectives")
            .frame.select("op")
            .unique()
            .collect("pyarrow")
            .to_native()
            .to_pylist()
        }
    parent = path_text(step.path)
    found: dict[str, dict[int, float]] = {}
    for rank, rows in evidence.by_rank.items():
        for (path, device), row in rows.items():
            if device == "CPU" and row["parent"] == parent and row["region"] not in waits and row["count"]:
                found.setdefault(path, {})[rank] = row["total_ns"] / row["count"] / 1e9
    return found


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """The same rank has more work than the mean in both halves of the run."""
    run, step = evidence.run, evidence.step_node
    if run is None or step is None or len(evidence.by_rank) < 2 or step.count < 2 * at_least.LEAST_STEPS:
        return
    halves = _halves(evidence)
    best: Finding | None = None
    for path, (first, second) in halves.items():
        if len(first) != len(evidence.by_rank) or first.keys() != second.keys():
            continue
        heaviest = max(first, key=lambda rank: (first[rank], -rank))
        over = []
        for half in (first, second):
            mean = float(np.mean(list(half.values())))
            over.append(half[heaviest] / mean - 1 if mean > 0 else 0.0)
        if min(over) < at_least.IMBALANCE_SHARE or heaviest != max(second, key=lambda rank: (second[rank], -rank)):
            continue
        saved = float(sum(half[heaviest] - np.mean(list(half.values())) for half in (first, second)) / 2)
        cost = saved * step.count
        if saved * step.count < 0.01 * evidence.whole_s or (best is not None and cost <= (best.cost_s or 0)):
            continue
        best = Finding(
            "imbalance",
            f"Rank {heaviest} has {percent(min(over))} more {name_of(split_path(path)[-1])} than the mean of "
            f"{len(first)} ranks, all through the run",
            why=f"balance would save {took(saved)} a step",
            cost_s=cost,
            anchor="ranks",
            region=tuple(split_path(path)),
            rank=heaviest,
        )
    if best is not None:
        yield best


def _halves(evidence: Evidence) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    nw = require("narwhals", extra="runs", caller="Comparing ranks")
    run, steady = evidence.run, evidence.steady
    wanted = list(_own_work(evidence))
    if run is None or steady is None or not wanted:
        return {}
    middle = int(np.median(steady.numbers))
    first = int(steady.numbers[0])
    frame = run.intervals(session=evidence.session).frame
    frame = frame.filter(nw.col("path").is_in(wanted) & (nw.col("device") == "CPU") & (nw.col("step") >= first))
    grouped = (
        frame.with_columns(late=nw.col("step") >= middle)
        .group_by("path", "rank", "late")
        .agg(nw.col("dur_ns").median().alias("usual"))
    )
    found: dict[str, tuple[dict[int, float], dict[int, float]]] = {}
    for row in grouped.collect("pyarrow").to_native().to_pylist():
        halves = found.setdefault(row["path"], ({}, {}))
        halves[bool(row["late"])][row["rank"]] = row["usual"] / 1e9
    return found


def exposed_communication(evidence: Evidence) -> Iterator[Finding]:
    """Communication that nothing hides takes a large part of the step."""
    step = evidence.step_node
    if step is None or not step.total_s or step.count < at_least.LEAST_STEPS:
        return
    by_op = _operations(evidence)
    names = {COMMUNICATION, *by_op}
    nodes: list[Any] = []
    for node in step.walk():
        # The outermost ones: an operation within COMM is counted once.
        if node.name in names and not node.is_rest and not any(node.path[: len(o.path)] == o.path for o in nodes):
            nodes.append(node)
    exposed = sum((node.total_s or 0.0) - node.overlap_s for node in nodes)
    if exposed < at_least.EXPOSED_SHARE * step.total_s:
        return
    where = ""
    if by_op:
        op, (total_s, count, size) = max(by_op.items(), key=lambda item: (item[1][0], item[0]))
        where = f"most of it in {name_of(op)}: {count} operations" if len(by_op) > 1 else f"{count} times {name_of(op)}"
        if size > 0:
            from deep500_timing._summary.text import format_bytes

            where += f" of {format_bytes(size)} in the median, {format_bytes(size * count / total_s)}/s"
    yield Finding(
        "exposed-communication",
        f"Communication that nothing hides takes {percent(exposed / step.total_s)} of {STEP}, "
        f"{took(exposed / step.count)} a step",
        where=where,
        cost_s=exposed,
        anchor="communication",
        region=nodes[0].path,
        rank=evidence.rank,
    )


def _operations(evidence: Evidence) -> dict[str, tuple[float, int, float]]:
    # By operation, on the rank that is looked at: seconds, how many, median size in bytes.
    if evidence.run is None:
        return {}
    table = evidence.run.table("collectives").arrow()
    found: dict[str, list[tuple[int, int]]] = {}
    columns = (table[name].to_pylist() for name in ("rank", "op", "dur_ns", "bytes"))
    for rank, op, dur, size in zip(*columns, strict=True):
        if rank == evidence.rank and op:
            found.setdefault(op, []).append((dur, size if size is not None else -1))
    return {
        op: (sum(dur for dur, _ in rows) / 1e9, len(rows), float(np.median([size for _, size in rows])))
        for op, rows in found.items()
    }
