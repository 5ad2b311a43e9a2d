"""late-rank, waits-for-ranks, exposed-communication: rules about several ranks and their communication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from deep500_timing._base.names import BACKWARD, BATCH, CPU
from deep500_timing._summary.text import format_bytes
from deep500_timing._summary.tree import REST, Node
from deep500_timing._views.findings._evidence import Evidence, is_at
from deep500_timing._views.findings._finding import Finding, Rule, named, percent, took
from deep500_timing._views.findings._machine import why_late

if TYPE_CHECKING:
    from deep500_timing._distributed.verdict import Stragglers

LATE_SHARE = 0.03
"""Lateness as a share of the step; the ranks of a run differ by about 1 % of a step by nature."""
_LATE_COST = 0.025
"""The saving without the late rank, as a share of the step; it is small if ranks are late by turns."""
_CLEAR = 0.9
"""A rank that is late at so many steps is so by no chance."""


def _late(evidence: Evidence, share: float) -> tuple[Stragglers, float] | None:
    # The verdict of `deep500-timing stragglers`, and the saving without that rank in a step, if both are large enough.
    found = evidence.stragglers
    if found is None or not found.ranks or found.lateness_s < share * found.step_s:
        return None
    saved = found.what_if.without_rank_s if found.what_if is not None else 0.0
    return (found, saved) if saved >= _LATE_COST * found.step_s else None


def late_rank(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """One rank comes late to where all meet, by the judgement of ``deep500-timing stragglers`` alone."""
    late = _late(evidence, rule.share)
    if late is None:
        return
    found, saved = late
    rank, each = found.ranks[0], "operations" if found.operations is not None else "steps"
    who = f"Rank {rank} is late"
    if found.kind == "node":
        who = f"The host {named(found.host or '')} is late, its rank {rank}"
    elif len(found.ranks) > 1:
        who = f"{len(found.ranks)} ranks are late, rank {rank}"
    judged = found.operations.judged if found.operations is not None else found.steps
    why = str(why_late(evidence, found) or "")
    if not why and found.region is not None:
        what = f"its {named(found.region)}" if found.region != REST else "what no region of its step covers"
        why = f"{what} takes {took(found.excess_s)} longer"
    chance = f" (chance: {percent(1 / len(evidence.ranks))})" if found.last_share < _CLEAR else ""
    since = "" if found.since is None else f"since step {found.since}"
    yield rule.found(
        evidence,
        f"{who} at {percent(found.last_share)} of {judged} {each}{chance}, by {took(found.lateness_s)}",
        where="more and more" if found.grows else since,
        why=why,
        command=evidence.command("stragglers"),
        cost_s=saved * found.steps,
        rank=rank,
    )


class Communication(NamedTuple):
    """Communication that overlaps nothing in the steps of a rank."""

    region: tuple[str, ...]
    whole_s: float
    """Of the steps."""
    steps: int
    transfer_s: float
    """The part that is no waiting for other ranks."""
    waits_s: float
    """The rest."""
    is_compared: bool
    """Whether the other ranks' times are known."""
    is_sampled: bool
    """Whether it is what PyTorch's DDP samples, as the operations were not seen."""


def communication_of(evidence: Evidence) -> Communication | None:
    step = evidence.step_node
    if step is None or not step.total_s or step.count < 20:
        return None
    nodes: list[Node] = []
    for node in step.walk():
        # An operation inside COMM is counted once, with COMM.
        is_inside = any(node.path[: len(other.path)] == other.path for other in nodes)
        if node.name in evidence.waits and not node.is_rest and not is_inside:
            nodes.append(node)
    exposed_s = sum((node.total_s or 0.0) - node.overlap_s for node in nodes)
    backward = [node for node in step.walk() if node.name == BACKWARD and not node.is_rest]
    # DDP waits in the backward pass.
    mine = f"rank = {evidence.rank} {evidence.only}"
    query = f"select median(communication_ns - hidden_ns) as ns from ddp_samples where {mine}"
    sampled_s = step.count * sum(row["ns"] or 0.0 for row in evidence.rows(query, "ddp_samples")) / 1e9
    sampled_s = min(sampled_s, sum(node.total_s or 0.0 for node in backward))
    if sampled_s > 0:
        nodes += backward
        exposed_s += sampled_s
    elif not nodes:
        nodes = backward or [step]
        exposed_s = _awaited_s(evidence, step, nodes)
    if exposed_s <= 0:
        return None
    own = evidence.operations.get(evidence.rank or 0, {}).values()
    total_s = sum(operation.total_s for operation in own)
    if total_s > 0 and not sampled_s:
        waits_s = exposed_s * (1 - sum(operation.transfer_s for operation in own) / total_s)
        is_compared = any(operation.is_compared for operation in own)
    else:
        is_compared = len(evidence.ranks) > 1
        waits_s = min(_longer_s(evidence, nodes), exposed_s) if is_compared else 0.0
    transfer_s = exposed_s - waits_s
    return Communication(nodes[0].path, step.total_s, step.count, transfer_s, waits_s, is_compared, sampled_s > 0)


def _awaited_s(evidence: Evidence, step: Node, nodes: list[Node]) -> float:
    # The last operation in a backward pass starts when the last gradient is there: DDP and FSDP then wait for it.
    # Elsewhere the step waits for each. Where a device runs, operations have its times, not those of the host's clock.
    if evidence.run is None or evidence.idle_s is not None or not evidence.operations:
        return 0.0
    paths = is_at(step.path, *(node.path for node in nodes))
    of_rank = f"where rank = {evidence.rank} {evidence.only}"
    [row] = evidence.rows(
        "with spans as (select session, start_ns as began_ns, start_ns + dur_ns as ended_ns, "
        f"{is_at(step.path)} as is_step from intervals "
        f"{of_rank}and device = '{CPU}' and {paths}), operations as (select session as of_session, "
        f"start_ns as issued_ns, start_ns + dur_ns as done_ns from collectives {of_rank}) "
        "select cast(sum(case when is_step then all_ns else last_ns - all_ns end) as double) as awaited_ns "
        "from (select is_step, sum(least(done_ns, ended_ns) - issued_ns) as all_ns, "
        "least(max(done_ns), max(ended_ns)) - max(issued_ns) as last_ns from spans join operations "
        "on session = of_session and issued_ns >= began_ns and issued_ns < ended_ns "
        "group by session, began_ns, is_step) as each"
    )
    return float(row["awaited_ns"] or 0.0) / 1e9


def _longer_s(evidence: Evidence, nodes: list[Node]) -> float:
    # Without recorded operations: in each step, the rank that comes last waits for none.
    paths = is_at(*(node.path for node in nodes))
    [row] = evidence.rows(
        "select cast(sum(low) as double) as low, cast(sum(own) as double) as own from (select min(total) as low, "
        f"max(case when rank = {evidence.rank} then total end) as own from (select session, step, rank, "
        f"sum(dur_ns) as total from intervals where device = '{CPU}' and {paths} and step is not null "
        f"{evidence.only}group by session, step, rank) as each group by session, step "
        f"having count(*) = {len(evidence.ranks)}) as s"
    )
    return float((row["own"] or 0.0) - (row["low"] or 0.0)) / 1e9


def exposed_communication(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Communication that nothing hides takes a large part of the step, the waits for late ranks left out."""
    found = communication_of(evidence)
    if found is None or found.transfer_s < rule.share * found.whole_s:
        return
    where = "by DDP's own samples" if found.is_sampled else ""
    by_op = evidence.operations.get(evidence.rank or 0)
    if by_op and not found.is_sampled:
        op, largest = max(by_op.items(), key=lambda item: (item[1].transfer_s, item[0]))
        where = f"{largest.calls} times {named(op)}"
        if len(by_op) > 1:
            where = f"most of it in {named(op)}: {largest.calls} operations"
        if largest.size_bytes > 0 and largest.transfer_s > 0:
            rate = f"{format_bytes(largest.size_bytes * largest.calls / largest.transfer_s)}/s"
            where += f" of {format_bytes(largest.size_bytes)} on average, {rate}"
    yield rule.found(
        evidence,
        f"Communication that nothing hides takes {percent(found.transfer_s / found.whole_s)} of {BATCH}, "
        f"{took(found.transfer_s / found.steps)} a step",
        where=where,
        why="" if found.is_compared or len(evidence.ranks) > 1 else "waits for other ranks are in it",
        cost_s=found.transfer_s,
        region=found.region,
        remedy=_OF_DDP if found.is_sampled else rule.remedy,
    )


def waits_for_ranks(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Ranks wait for each other for a large part of the step, and none of them is always the last."""
    found = communication_of(evidence)
    if found is None or len(evidence.ranks) < 2 or found.waits_s < rule.share * found.whole_s:
        return
    if _late(evidence, LATE_SHARE) is not None:
        return
    yield rule.found(
        evidence,
        f"Rank {evidence.rank} waits for other ranks for {percent(found.waits_s / found.whole_s)} of {BATCH}, "
        f"{took(found.waits_s / found.steps)} a step",
        where="and no rank is named as the late one",
        command=evidence.command("stragglers"),
        cost_s=found.waits_s,
        region=found.region,
    )


_OF_DDP = "larger batches, gradients of several under no_sync(), larger bucket_cap_mb"
"""DDP overlaps its operations with the backward pass already."""
_OVERLAP = "overlap it with the backward pass, larger buckets, fewer bytes"
RULES = (
    Rule("late-rank", late_rank, LATE_SHARE, 16, "stragglers", needs="run"),
    Rule("waits-for-ranks", waits_for_ranks, 0.20, 20, "communication"),
    Rule("exposed-communication", exposed_communication, 0.10, 20, "communication", _OVERLAP),
)
