"""waits-for-data: the loop waits for its input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH, CPU, IO
from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._cause import shared_by
from deep500_timing._views.findings._evidence import how_many, name_of, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.findings._statistics import trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

_CONCENTRATED = 0.3
"""Share of the waiting that a few steps must hold to be told apart."""
_APART = 2.0
"""The factor between the shortest of them and the longest of the others."""
_HALF = 0.5
_FEW = 0.1
"""Share of the steps that are a few."""
_SKEWED = 1.3
"""Times the median from which on a mean needs the median with it."""
_KEPT = 20


def waits_for_data(evidence: Evidence) -> Iterator[Finding]:
    """IO takes a large part of its parent in the steady state, on the rank on which it takes most."""
    node = _waiting_node(evidence)
    if node is None:
        return
    shares = _shares(evidence, node)
    worst = max(shares, key=lambda rank: (shares[rank], -rank), default=evidence.rank)
    if worst is not None and worst != evidence.rank and shares[worst] > 1.25 * shares.get(evidence.rank or 0, 0.0):
        other = evidence.of_rank(worst)
        node = _waiting_node(other)
        evidence = other if node is not None else evidence
    found = _judge(evidence, node, shares) if node is not None else None
    if found is not None:
        yield found


def _waiting_node(evidence: Evidence) -> Node | None:
    step = evidence.step_node
    for node in evidence.tree.named(IO):
        # Inside BATCH or a sibling of it. The waits of a validation do not count.
        if BATCH in node.path[:-1] or (step is not None and step.parent == node.parent):
            return node
    return None


def _shares(evidence: Evidence, node: Node) -> dict[int, float]:
    path, parent = path_text(node.path), path_text(node.parent)
    shares = {}
    for rank, rows in evidence.by_rank.items():
        own, whole = rows.get((path, CPU)), rows.get((parent, CPU))
        if own and whole and own["total_ns"] and whole["total_ns"]:
            shares[rank] = own["total_ns"] / whole["total_ns"]
    return shares if len(evidence.by_rank) > 1 else {}


class _Wait(NamedTuple):
    whole_s: float
    steady_s: float
    each_s: float
    inside: str
    of_step: str


def _judge(evidence: Evidence, node: Node, shares: dict[int, float]) -> Finding | None:
    step = evidence.step_node
    above = evidence.tree.parent_of(node)
    if node.count < at_least.LEAST_STEPS or node.total_s is None or node.median_s is None:
        return None
    first_s = node.first_s or 0.0
    steady_s = node.total_s - first_s
    of_step = ""
    if above is not None:
        whole_s = (above.total_s or 0.0) - ((above.first_s or 0.0) if above.count == node.count else first_s)
        inside = name_of(above.name)
        if above.name == BATCH:
            of_step = f" of {took(whole_s / max(above.count - 1, 1))}"
    else:
        assert step is not None
        whole_s = steady_s + (step.total_s or 0.0) - (step.first_s or 0.0)
        inside = f"{IO} and {BATCH}"
    each_s = steady_s / (node.count - 1)
    if whole_s <= 0 or steady_s < at_least.WAIT_SHARE * whole_s or each_s < at_least.WAIT_S:
        return None
    wait = _Wait(whole_s, steady_s, each_s, inside, of_step)
    usual = f", {took(node.median_s)} in the median" if each_s > _SKEWED * node.median_s else ""
    fact, where, why, steps = _few_long_waits(evidence, node, wait) or (
        f"the loop waits for data, {took(each_s)}{of_step} a step{usual}",
        _where(evidence, shares),
        _growth(evidence, node),
        (),
    )
    on = f" on rank {evidence.rank}" if _is_uneven(evidence, shares) else ""
    return Finding(
        "waits-for-data",
        f"{IO} is {percent(steady_s / whole_s)} of {inside}{on}: {fact}",
        where=where,
        why=why,
        cost_s=steady_s,
        anchor="tree",
        region=node.path,
        rank=evidence.rank,
        steps=steps,
        command=evidence.command("why", steps[0]) if steps else "",
    )


def _few_long_waits(evidence: Evidence, node: Node, wait: _Wait) -> tuple[str, str, str, tuple[int, ...]] | None:
    # A stall has another remedy than a slow pipeline: a mean per step would hide it.
    waits = evidence.series(node.path)
    if waits is None:
        usual_s = (node.count - 1) * (node.median_s or 0.0)
        if usual_s > _HALF * wait.steady_s:
            return None
        return (
            f"the loop waits {took(wait.each_s)} a step on average, {took(node.median_s or 0.0)} in the median",
            "",
            "",
            (),
        )
    slow = _long_ones(waits.durations_s)
    if slow is None:
        return None
    others = np.delete(waits.durations_s, slow)
    first, last = (took(float(value)) for value in np.quantile(waits.durations_s[slow], (0.1, 0.9)))
    long = first if first == last else f"{first} to {last}"
    shared = shared_by(evidence, waits, slow)
    which = f"{len(slow)} of {len(waits.durations_s)} steps{f', {shared},' if shared else ''}"
    ordered = waits.numbers[slow[np.argsort(-waits.durations_s[slow], kind="stable")]].tolist()
    return (
        f"{which} wait {long} for data, the others {took(float(np.median(others)))}",
        "",
        "as when workers start" if shared.startswith("each the first of") else "",
        tuple(ordered[:_KEPT]),
    )


def _long_ones(waits: Any) -> Any:
    # The places of the few waits that hold most of the waiting; None if no few do.
    ordered, few = np.sort(waits)[::-1], max(int(_FEW * len(waits)), 2)
    if len(ordered) <= few or ordered[0] <= 0:
        return None
    # They end where the next shorter wait is shorter by the largest factor.
    factors = ordered[1:few] / np.maximum(ordered[2 : few + 1], 1e-9)
    count = int(np.argmax(factors)) + 2
    least = float(ordered[count - 1])
    if factors[count - 2] < _APART or least <= 4 * float(np.median(waits)):
        return None
    slow = np.flatnonzero(waits >= least)
    return slow if float(waits[slow].sum()) >= _CONCENTRATED * float(waits.sum()) else None


def _is_uneven(evidence: Evidence, shares: dict[int, float]) -> bool:
    return bool(shares) and shares.get(evidence.rank or 0, 0.0) > 1.25 * float(np.median(list(shares.values())))


def _where(evidence: Evidence, shares: dict[int, float]) -> str:
    if not shares:
        return ""
    if _is_uneven(evidence, shares):
        others = [share for rank, share in shares.items() if rank != evidence.rank]
        return f"{percent(float(np.median(others)))} on the {'other' if len(others) == 1 else 'median of the others'}"
    return how_many(sum(share >= at_least.WAIT_SHARE for share in shares.values()), len(evidence.by_rank))


def _growth(evidence: Evidence, node: Node) -> str:
    waits = evidence.series(node.path)
    if waits is None or len(waits.durations_s) < at_least.DRIFT_LEAST:
        return ""
    found = trend_of(waits.durations_s[1:])
    if found is None or found.chance > at_least.DRIFT_LEVEL or found.growth < at_least.WAIT_GROWTH:
        return ""
    return f"it grows, from {took(found.start)} to {took(found.end)}"
