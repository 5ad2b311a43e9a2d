"""spikes, drift, warm-up: what the lengths of the steps say."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import STEP, name_of, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.findings._shared import what_they_share
from deep500_timing._views.findings._statistics import trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.tree import Node

_NAMED = 3
_KEPT = 20


def spikes(evidence: Evidence) -> Iterator[Finding]:
    """Some steps take a multiple of the median, and it costs the run."""
    steps = evidence.steady
    if steps is None or len(steps.durations_s) < at_least.LEAST_STEPS:
        return
    durations = steps.durations_s
    usual = float(np.median(durations))
    slow = np.flatnonzero(durations > at_least.SPIKE_RATIO * usual)
    excess_s = float((durations[slow] - usual).sum())
    if len(slow) < at_least.SPIKE_LEAST or excess_s < at_least.SPIKE_SHARE * float(durations.sum()):
        return
    numbers = steps.numbers[slow].tolist()
    slowest = int(steps.numbers[slow[np.argmax(durations[slow])]])
    shown = ", ".join(map(str, numbers[:_NAMED])) + (
        f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    )
    shared = what_they_share(evidence, slow)
    ordered = steps.numbers[slow[np.argsort(-durations[slow], kind="stable")]].tolist()
    yield Finding(
        "spikes",
        f"{len(slow)} steps took more than {at_least.SPIKE_RATIO:.0f} × the median of {took(usual)}: {shown}",
        where=shared,
        command=evidence.command("why", slowest),
        cost_s=excess_s,
        anchor="over-the-run",
        steps=tuple(ordered[:_KEPT]),
        rank=evidence.rank,
    )


def drift(evidence: Evidence) -> Iterator[Finding]:
    """Steps grow longer over the run, by more than noise does."""
    steps = evidence.steady
    if steps is None or len(steps.durations_s) < at_least.DRIFT_LEAST:
        return
    durations = steps.durations_s
    found = trend_of(durations)
    if found is None or found.chance > at_least.DRIFT_LEVEL or found.growth < at_least.DRIFT_SHARE:
        return
    grown = _what_grew(evidence.step_node)
    yield Finding(
        "drift",
        f"Steps become {percent(found.growth)} slower over the run, from {took(found.start)} to {took(found.end)}",
        why=grown,
        cost_s=(found.end - found.start) / 2 * len(durations),
        anchor="over-the-run",
        region=evidence.step_node.path if evidence.step_node is not None else (),
        rank=evidence.rank,
    )


def _what_grew(step: Node | None) -> str:
    grown: list[tuple[float, float, float, str]] = []
    for child in step.children if step is not None else ():
        known = [value for value in child.trend if value is not None][1:]
        if child.is_rest or len(known) < 6:
            continue
        third = len(known) // 3
        before, after = sum(known[:third]) / third, sum(known[-third:]) / third
        grown.append((after - before, before, after, child.name))
    total = sum(max(growth, 0.0) for growth, *_ in grown)
    if not grown or total <= 0:
        return ""
    most, before, after, name = max(grown)
    # Named only if it alone explains most of it.
    return f"{name_of(name)} goes from {took(before)} to {took(after)}" if most > 0.6 * total else ""


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """The first steps take a large part of the run."""
    found = _first_regions(evidence) or _first_steps(evidence)
    if found is not None and found.cost_s is not None and found.cost_s >= at_least.WARM_UP_SHARE * evidence.whole_s:
        yield found


def _first_regions(evidence: Evidence) -> Finding | None:
    # Where the first batch is a region of its own, as in Keras, which traces in it.
    firsts = [node for node in evidence.tree.walk() if node.name == f"{STEP} (first)" and node.total_s]
    step = evidence.step_node
    if not firsts or step is None or step.median_s is None:
        return None
    total_s, count = sum(node.total_s or 0.0 for node in firsts), sum(node.count for node in firsts)
    cost_s = total_s - count * step.median_s
    share = percent(total_s / evidence.whole_s) if evidence.whole_s else "much"
    return Finding(
        "warm-up",
        f"{share} of the run is warm-up: {STEP} (first) takes {took(total_s)}, "
        f"the steps after it {took(step.median_s)}",
        cost_s=cost_s,
        anchor="over-the-run",
        region=firsts[0].path,
        rank=evidence.rank,
    )


def _first_steps(evidence: Evidence) -> Finding | None:
    steps = evidence.steps
    if steps is None:
        return _first_of_tree(evidence)
    count = evidence.warm_up_steps
    if not count or len(steps.durations_s) < at_least.LEAST_STEPS // 2:
        return None
    usual = float(np.median(steps.durations_s[count:]))
    spent = float(steps.durations_s[:count].sum())
    first = "The first step takes" if count == 1 else f"The first {count} steps take"
    share = f"{percent(spent / evidence.whole_s)} of the run" if evidence.whole_s else "much"
    return Finding(
        "warm-up",
        f"{first} {share}, {took(spent)}: the steady state begins with step {int(steps.numbers[count])}, "
        f"at {took(usual)}",
        cost_s=spent - count * usual,
        anchor="over-the-run",
        steps=tuple(steps.numbers[: min(count, _KEPT)].tolist()),
        rank=evidence.rank,
    )


def _first_of_tree(evidence: Evidence) -> Finding | None:
    step = evidence.step_node
    if step is None or step.first_s is None or step.median_s is None or step.count < at_least.LEAST_STEPS // 2:
        return None
    if step.first_s < at_least.WARM_UP_RATIO * step.median_s:
        return None
    share = f"{percent(step.first_s / evidence.whole_s)} of the run" if evidence.whole_s else "much"
    return Finding(
        "warm-up",
        f"The first {STEP} takes {share}, {took(step.first_s)}: as a rule it takes {took(step.median_s)}",
        cost_s=step.first_s - step.median_s,
        anchor="over-the-run",
        region=step.path,
        rank=evidence.rank,
    )
