"""late-rank, waits-for-ranks, imbalance, exposed-communication: rules about several ranks and their communication."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._summary.text import format_bytes
from deep500_timing._summary.tree import REST
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import name_of, percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._distributed.verdict import Stragglers
    from deep500_timing._summary.tree import Node
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
        who = f"The host {name_of(found.host or '')} is late, its rank {rank}"
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


def imbalance(evidence: Evidence) -> Iterator[Finding]:
    """The same rank has more work than the mean in both halves of the run."""
    step = evidence.step_node
    if evidence.run is None or step is None or len(evidence.by_rank) < 2 or step.count < 2 * at_least.LEAST_STEPS:
        return
    best: Finding | None = None
    for name, (first, second) in _halves(evidence).items():
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
        if cost < 0.01 * evidence.whole_s or (best is not None and cost <= (best.cost_s or 0)):
            continue
        best = Finding(
            "imbalance",
            f"Rank {heaviest} has {percent(min(over))} more {name_of(name)} than the mean of "
            f"{len(first)} ranks, all through the run",
            why=f"balance would save {took(saved)} a step",
            cost_s=cost,
            anchor="ranks",
            rank=heaviest,
        )
    if best is not None:
        yield best


def _halves(evidence: Evidence) -> dict[str, tuple[dict[int, float], dict[int, float]]]:
    # Medians by region and rank in both halves. Where ranks meet, of own times: a wait inside BACKWARD is no work.
    steps = evidence.rank_steps
    if steps is not None:
        middle, ranks = len(steps.numbers) // 2, steps.ranks

        def of(half: Any, place: int) -> dict[int, float]:
            return dict(zip(ranks, np.median(half[:, :, place], axis=0).tolist(), strict=True))

        return {
            region: (of(steps.own[:middle], place), of(steps.own[middle:], place))
            for place, region in enumerate(steps.regions)
            if region not in evidence.waits and region != REST and middle
        }
    steady, step = evidence.steady, evidence.step_node
    if steady is None or step is None or evidence.run is None:
        return {}
    parent = path_text(step.path)
    only = "" if evidence.session is None else f"and session = {evidence.session} "
    rows = evidence.run.sql(
        f"select region, rank, case when step >= {int(np.median(steady.numbers))} then 1 else 0 end as half, "
        f"median(dur_ns) as usual from intervals where device = 'CPU' and depth = {len(step.path)} "
        f"and step >= {int(steady.numbers[0])} and substr(path, 1, {len(parent) + 1}) = {literal(parent + '/')} {only}"
        "group by region, rank, case when step >= " + f"{int(np.median(steady.numbers))} then 1 else 0 end"
    ).rows()
    found: dict[str, tuple[dict[int, float], dict[int, float]]] = {}
    for row in rows:
        if row["region"] not in evidence.waits:
            found.setdefault(row["region"], ({}, {}))[row["half"]][row["rank"]] = row["usual"] / 1e9
    return found


class Communication(NamedTuple):
    """Communication in the steps of a rank."""

    nodes: list[Node]
    exposed_s: float
    """The time that overlaps nothing."""
    transfer_share: float
    """The share that is no waiting for other ranks."""
    is_compared: bool


def communication_of(evidence: Evidence) -> Communication | None:
    step = evidence.step_node
    if step is None or not step.total_s or step.count < at_least.LEAST_STEPS:
        return None
    nodes: list[Any] = []
    for node in step.walk():
        # An operation inside COMM is counted once, with COMM.
        if (
            node.name in evidence.waits
            and not node.is_rest
            and not any(node.path[: len(o.path)] == o.path for o in nodes)
        ):
            nodes.append(node)
    exposed_s = sum((node.total_s or 0.0) - node.overlap_s for node in nodes)
    if exposed_s <= 0:
        return None
    own = evidence.operations.get(evidence.rank or 0, {})
    total_s = sum(operation.total_s for operation in own.values())
    if total_s > 0:
        share = sum(operation.transfer_s for operation in own.values()) / total_s
        return Communication(nodes, exposed_s, share, any(operation.is_compared for operation in own.values()))
    if len(evidence.by_rank) < 2 or evidence.run is None:
        return Communication(nodes, exposed_s, 1.0, is_compared=False)
    return Communication(nodes, exposed_s, _share_by_step(evidence, nodes), is_compared=True)


def _share_by_step(evidence: Evidence, nodes: list[Node]) -> float:
    # Without recorded operations: in each step the shortest communication over the ranks is the transfer.
    assert evidence.run is not None
    paths = ", ".join(literal(path_text(node.path)) for node in nodes)
    only = "" if evidence.session is None else f"and session = {evidence.session} "
    row = evidence.run.sql(
        "select cast(sum(low) as double) as low, cast(sum(own) as double) as own from (select min(total) as low, "
        f"max(case when rank = {evidence.rank} then total end) as own from (select session, step, rank, "
        f"sum(dur_ns) as total from intervals where device = 'CPU' and path in ({paths}) and step is not null {only}"
        f"group by session, step, rank) as each group by session, step having count(*) = {len(evidence.by_rank)}) as s"
    ).rows()[0]
    return float(row["low"] / row["own"]) if row["own"] else 1.0


def exposed_communication(evidence: Evidence) -> Iterator[Finding]:
    """Communication that nothing hides takes a large part of the step, the waits for late ranks left out."""
    found, step = communication_of(evidence), evidence.step_node
    if found is None or step is None or not step.total_s:
        return
    transfer_s = found.exposed_s * found.transfer_share
    if transfer_s < at_least.EXPOSED_SHARE * step.total_s:
        return
    where = ""
    by_op = evidence.operations.get(evidence.rank or 0, {})
    if by_op:
        op, largest = max(by_op.items(), key=lambda item: (item[1].transfer_s, item[0]))
        where = (
            f"most of it in {name_of(op)}: {largest.calls} operations"
            if len(by_op) > 1
            else f"{largest.calls} times {name_of(op)}"
        )
        if largest.size_bytes > 0 and largest.transfer_s > 0:
            rate = f"{format_bytes(largest.size_bytes * largest.calls / largest.transfer_s)}/s"
            where += f" of {format_bytes(largest.size_bytes)} in the median, {rate}"
    waited = "" if found.is_compared or len(evidence.by_rank) > 1 else "waits for other ranks are in it"
    yield Finding(
        "exposed-communication",
        f"Communication that nothing hides takes {percent(transfer_s / step.total_s)} of {BATCH}, "
        f"{took(transfer_s / step.count)} a step",
        where=where,
        why=waited,
        cost_s=transfer_s,
        anchor="communication",
        region=found.nodes[0].path,
        rank=evidence.rank,
    )


def waits_for_ranks(evidence: Evidence) -> Iterator[Finding]:
    """Ranks wait for each other for a large part of the step, and none of them is always the last."""
    found, step = communication_of(evidence), evidence.step_node
    if found is None or step is None or not step.total_s or len(evidence.by_rank) < 2 or any(late_rank(evidence)):
        return
    waited_s = found.exposed_s * (1 - found.transfer_share)
    if waited_s < at_least.TURNS_SHARE * step.total_s:
        return
    yield Finding(
        "waits-for-ranks",
        f"Rank {evidence.rank} waits for other ranks for {percent(waited_s / step.total_s)} of {BATCH}, "
        f"{took(waited_s / step.count)} a step",
        where="and no rank is named as the late one",
        command=evidence.command("stragglers"),
        cost_s=waited_s,
        anchor="communication",
        region=found.nodes[0].path,
        rank=evidence.rank,
    )
