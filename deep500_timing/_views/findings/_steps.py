"""spikes, drift, warm-up: what the lengths of the steps say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import STEP, name_of, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.findings._shared import what_they_share
from deep500_timing._views.findings._statistics import trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.tree import Node

_NAMED = 3
_KEPT = 20
_MOSTLY = 0.6
"""Of what slow steps, or growing ones, take longer: a region that explains less of it is not named."""


def spikes(evidence: Evidence) -> Iterator[Finding]:
    """Some steps take a multiple of the median, and it costs the run."""
    if evidence.run is None:
        yield from _spikes_of_tree(evidence)
        return
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
    of = f" of {len(durations)}" if len(slow) > at_least.SPIKE_MANY * len(durations) else ""
    ordered = steps.numbers[slow[np.argsort(-durations[slow], kind="stable")]].tolist()
    yield _of_steps(
        evidence,
        "spikes",
        f"{len(slow)}{of} steps took more than {at_least.SPIKE_RATIO:.0f} × the median of {took(usual)}: {shown}",
        where=what_they_share(evidence, slow),
        why=_what_takes_longer(evidence, slow, excess_s),
        command=evidence.command("why", slowest),
        cost_s=excess_s,
        steps=tuple(ordered[:_KEPT]),
    )


def _what_takes_longer(evidence: Evidence, slow: NDArray[np.int64], excess_s: float) -> str:
    # The region directly inside the steps that has most of what the slow ones took beyond the median, if one has.
    node, steps, run = evidence.step_node, evidence.steady, evidence.run
    if node is None or steps is None or run is None or not node.children:
        return ""
    nw = require("narwhals", extra="runs", caller="Looking for what takes longer in slow steps")
    frame = run.intervals(rank=evidence.rank, session=evidence.session).frame.filter(nw.col("device") == "CPU")
    best, most_s = "", 0.0
    for child in node.children:
        if child.is_rest:
            continue
        of_child = frame.filter(nw.col("path") == path_text(child.path)).select("start_ns", "dur_ns")
        rows = of_child.collect("pyarrow").to_native()
        # Each belongs to the last step that has begun by then.
        place = np.searchsorted(steps.starts_s, rows["start_ns"].to_numpy() / 1e9, side="right") - 1
        spent = np.bincount(place[place >= 0], rows["dur_ns"].to_numpy()[place >= 0] / 1e9, len(steps.starts_s))
        longer_s = float((spent[slow] - np.median(spent)).sum())
        if longer_s > most_s:
            best, most_s = child.name, longer_s
    return f"{name_of(best)} takes most of the excess" if most_s >= _MOSTLY * excess_s else ""


def _spikes_of_tree(evidence: Evidence) -> Iterator[Finding]:
    # Which steps they are is not known, but how many: by the highest quantile that stands on enough of them.
    node = evidence.step_node
    if node is None or not node.median_s or not node.total_s:
        return
    excess_s = node.total_s - (node.first_s or node.median_s) - (node.count - 1) * node.median_s
    if excess_s < at_least.SPIKE_SHARE * node.total_s:
        return
    for one_in, quantile_s in ((20, node.p95_s), (100, node.p99_s)):
        # One more than the least, as the first may be among them for a reason of its own.
        enough = node.count >= one_in * (at_least.SPIKE_LEAST + 1)
        if enough and quantile_s is not None and quantile_s > at_least.SPIKE_RATIO * node.median_s:
            yield _of_steps(
                evidence,
                "spikes",
                f"One {STEP} in {one_in} takes {int(quantile_s / node.median_s)} × the median of "
                f"{took(node.median_s)} or more",
                cost_s=excess_s,
                region=node.path,
            )
            return


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
    yield _of_steps(
        evidence,
        "drift",
        f"Steps become {percent(found.growth)} slower over the run, from {took(found.start)} to {took(found.end)}",
        why=grown,
        cost_s=(found.end - found.start) / 2 * len(durations),
        region=evidence.step_node.path if evidence.step_node is not None else (),
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
    return f"{name_of(name)} goes from {took(before)} to {took(after)}" if most > _MOSTLY * total else ""


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
    which = f"{STEP} (first) takes" if count == 1 else f"{count} × {STEP} (first) take"
    return _of_steps(
        evidence,
        "warm-up",
        f"{_share(evidence, cost_s)} of the run is warm-up: {which} {took(total_s)}, "
        f"the steps after it {took(step.median_s)} each",
        cost_s=cost_s,
        region=firsts[0].path,
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
    cost_s = spent - count * usual
    which = "the first step takes" if count == 1 else f"the first {count} steps take"
    return _of_steps(
        evidence,
        "warm-up",
        f"{_share(evidence, cost_s)} of the run is warm-up: {which} {took(spent)}, "
        f"those from step {int(steps.numbers[count])} on {took(usual)} each",
        cost_s=cost_s,
        # The last of them tells where the warm-up ends.
        steps=(*steps.numbers[: min(count, _KEPT) - 1].tolist(), int(steps.numbers[count - 1])),
    )


def _first_of_tree(evidence: Evidence) -> Finding | None:
    step = evidence.step_node
    if step is None or step.first_s is None or step.median_s is None or step.count < at_least.LEAST_STEPS // 2:
        return None
    if step.first_s < at_least.WARM_UP_RATIO * step.median_s:
        return None
    cost_s = step.first_s - step.median_s
    return _of_steps(
        evidence,
        "warm-up",
        f"{_share(evidence, cost_s)} of the run is warm-up: the first {STEP} takes {took(step.first_s)}, "
        f"the others {took(step.median_s)} each",
        cost_s=cost_s,
        region=step.path,
    )


def _of_steps(evidence: Evidence, rule: str, fact: str, **more: Any) -> Finding:
    return Finding(rule, fact, anchor="over-the-run", rank=evidence.rank, **more)


def _share(evidence: Evidence, cost_s: float) -> str:
    return percent(cost_s / evidence.whole_s) if evidence.whole_s else "Much"
