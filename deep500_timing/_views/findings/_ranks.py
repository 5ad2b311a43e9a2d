"""late-rank, imbalance, exposed-communication: what ranks do to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._ground.require import require
from deep500_timing._ranks.stragglers import find_late_rank
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import COMMUNICATION, STEP, name_of, percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from deep500_timing._ranks.stragglers import Verdict
    from deep500_timing._views.findings._evidence import Evidence

    Floats = NDArray[np.float64]

_CAUSE_SHARE = 0.02
"""By how much a region of the late rank must be over the others to be called the cause."""


def late_rank(evidence: Evidence) -> Iterator[Finding]:
    """One rank comes late to what all take part in, by the straggler test alone."""
    found = _late(evidence)
    if found is None:
        return
    verdict, ranks = found
    if verdict.rank is None:
        return
    step = evidence.step_node
    # Of a few costly operations the lateness is spread over all.
    late_s = max(verdict.lateness_s * verdict.judged / max(verdict.operations, 1), verdict.cost_s)
    if step is not None and step.median_s and late_s < at_least.LATE_SHARE * step.median_s:
        return
    rank = ranks[verdict.rank]
    yield Finding(
        "late-rank",
        f"Rank {rank} is late at {percent(verdict.last_share)} of {verdict.judged} collectives "
        f"(chance: {percent(1 / len(ranks))}), by {took(verdict.lateness_s)}",
        why=_cause(evidence, rank),
        command=evidence.command("stragglers"),
        cost_s=verdict.cost_s * verdict.operations,
        anchor="ranks",
        rank=rank,
    )


def _late(evidence: Evidence) -> tuple[Verdict, list[int]] | None:
    # The one place that says who is late; a fuller analysis takes its place.
    matrix, ranks = _together(evidence)
    return None if matrix is None else (find_late_rank(matrix), ranks)


def _together(evidence: Evidence) -> tuple[Floats | None, list[int]]:
    # Time of each collective that all ranks took part in, of shape (operations, ranks), in the order of time.
    if evidence.run is None or len(evidence.by_rank) < 2:
        return None, []
    table = evidence.run.table("collectives").arrow()
    columns = {name: table[name].to_pylist() for name in ("rank", "session", "group", "op", "sequence", "dur_ns")}
    times: dict[tuple[Any, ...], dict[int, int]] = {}
    counted: dict[tuple[Any, ...], int] = {}
    for rank, session, group, op, sequence, dur in zip(*columns.values(), strict=True):
        number = sequence
        if number is None or number < 0:
            # Without numbers the order on each rank tells which belong together.
            key = rank, session, group, op
            number = counted[key] = counted.get(key, -1) + 1
        times.setdefault((session, group, op, number), {})[rank] = dur
    ranks = sorted(evidence.by_rank)
    rows = [[of_rank[rank] for rank in ranks] for of_rank in times.values() if len(of_rank) == len(ranks)]
    if rows:
        return np.array(rows, dtype=np.float64), ranks
    return _by_steps(evidence, ranks), ranks


def _by_steps(evidence: Evidence, ranks: list[int]) -> Floats | None:
    # No collective was written down by itself: what each step spends in COMM.
    assert evidence.run is not None
    nw = require("narwhals", extra="runs", caller="Looking for a late rank")
    frame = evidence.run.intervals(session=evidence.session).frame
    frame = frame.filter((nw.col("region") == COMMUNICATION) & (nw.col("device") == "CPU") & ~nw.col("step").is_null())
    grouped = frame.group_by("rank", "session", "step").agg(nw.col("dur_ns").sum().cast(nw.Int64).alias("total"))
    by_step: dict[tuple[int, int], dict[int, int]] = {}
    for row in grouped.collect("pyarrow").to_native().to_pylist():
        by_step.setdefault((row["session"], row["step"]), {})[row["rank"]] = row["total"]
    rows = [[of[rank] for rank in ranks] for _, of in sorted(by_step.items()) if len(of) == len(ranks)]
    return np.array(rows, dtype=np.float64) if rows else None


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


def _cause(evidence: Evidence, rank: int) -> str:
    best: tuple[float, float, str] | None = None
    for path, means in _own_work(evidence).items():
        others = [value for other, value in means.items() if other != rank]
        if rank not in means or not others:
            continue
        usual = float(np.median(others))
        excess = means[rank] - usual
        if usual > 0 and excess > _CAUSE_SHARE * usual and (best is None or excess > best[0]):
            best = (excess, excess / usual, split_path(path)[-1])
    return f"its {name_of(best[2])} takes {percent(best[1])} longer" if best is not None else ""


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
