"""waits-for-data: the loop waits for its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import STEP, WAIT, how_many, name_of, percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.tree import Node

_GROWTH = 1.2


def waits_for_data(evidence: Evidence) -> Iterator[Finding]:
    """IO takes a large part of what it lies in, in the steady state."""
    for node in evidence.tree.named(WAIT):
        above = evidence.tree.parent_of(node)
        step = evidence.step_node
        if above is None and (step is None or step.parent != node.parent):
            continue
        if above is not None and STEP not in above.path and not (step is not None and step.parent == node.parent):
            continue  # Of a validation, say, where nobody trains.
        found = _judge(evidence, node, above)
        if found is not None:
            yield found
            return


def _judge(evidence: Evidence, node: Node, above: Node | None) -> Finding | None:
    if node.count < at_least.LEAST_STEPS or node.total_s is None or node.median_s is None:
        return None
    step = evidence.step_node
    first_s = node.first_s or 0.0
    steady_s = node.total_s - first_s
    if above is not None:
        whole_s = (above.total_s or 0.0) - ((above.first_s or 0.0) if above.count == node.count else first_s)
        inside = name_of(above.name)
    else:
        assert step is not None
        whole_s = steady_s + (step.total_s or 0.0) - (step.first_s or 0.0)
        inside = f"{WAIT} and {STEP}"
    each_s = steady_s / (node.count - 1)
    if whole_s <= 0 or steady_s < at_least.WAIT_SHARE * whole_s or each_s < at_least.WAIT_S:
        return None
    fact = f"{WAIT} is {percent(steady_s / whole_s)} of {inside}: the loop waits for data, {took(each_s)}"
    if above is not None and above.name == STEP and above.mean_s is not None:
        fact += f" of {took(whole_s / max(above.count - 1, 1))}"
    fact += " a step"
    return Finding(
        "waits-for-data",
        fact,
        where=_where(evidence, node, above),
        why=_growth(node),
        cost_s=steady_s,
        anchor="tree",
        region=node.path,
        rank=evidence.rank,
    )


def _where(evidence: Evidence, node: Node, above: Node | None) -> str:
    ranks = evidence.by_rank
    if len(ranks) < 2 or above is None:
        return ""
    path, parent = path_text(node.path), path_text(above.path)
    waiting = 0
    for rows in ranks.values():
        own, whole = rows.get((path, "CPU")), rows.get((parent, "CPU"))
        if own and whole and own["total_ns"] and whole["total_ns"]:
            waiting += own["total_ns"] >= at_least.WAIT_SHARE * whole["total_ns"]
    return how_many(waiting, len(ranks))


def _growth(node: Node) -> str:
    known = [value for value in node.trend if value is not None][1:]
    if node.count < 4 * at_least.LEAST_STEPS or len(known) < 6:
        return ""
    third = len(known) // 3
    before, after = sum(known[:third]) / third, sum(known[-third:]) / third
    return f"it grows, from {took(before)} to {took(after)}" if after > _GROWTH * before else ""
