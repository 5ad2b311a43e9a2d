"""spikes, level-shift, drift, warm-up: rules about the lengths of the steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import BATCH
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._cause import cause_of, shared_by
from deep500_timing._views.findings._evidence import FIRST_STEP, percent, took
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.findings._statistics import shift_of, trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._cause import Cause
    from deep500_timing._views.findings._evidence import Evidence

_NAMED = 3
_KEPT = 20


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
    for ratio, share in at_least.SPIKES:
        slow = np.flatnonzero(durations > ratio * usual)
        excess_s = float((durations[slow] - usual).sum())
        if len(slow) >= at_least.SPIKE_LEAST and excess_s >= share * float(durations.sum()):
            break
    else:
        return
    slowest = int(steps.numbers[slow[np.argmax(durations[slow])]])
    of = f" of {len(durations)}" if len(slow) > at_least.SPIKE_MANY * len(durations) else ""
    cause = cause_of(evidence, steps, slow, np.flatnonzero(durations <= ratio * usual))
    ordered = steps.numbers[slow[np.argsort(-durations[slow], kind="stable")]].tolist()
    yield _of_steps(
        evidence,
        "spikes",
        f"{len(slow)}{of} steps took more than {ratio:g} × the median of {took(usual)}: "
        f"{_listed(steps.numbers[slow].tolist())}",
        where=shared_by(evidence, steps, slow),
        why=_most(evidence, cause, steps.numbers[slow].tolist()),
        command=evidence.command("why", slowest),
        cost_s=excess_s,
        steps=tuple(ordered[:_KEPT]),
        cause=cause.region if cause is not None else "",
    )


def _most(evidence: Evidence, cause: Cause | None, slow: list[int]) -> str:
    if cause is None:
        return ""
    lines = evidence.lines_in(cause.path, slow) if cause.path and cause.rank in (None, evidence.rank) else ""
    return f"{cause.text} takes most of the excess" + (f", {lines}" if lines else "")


def _listed(numbers: list[int]) -> str:
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return ", ".join(map(str, numbers[:_NAMED])) + more


def _spikes_of_tree(evidence: Evidence) -> Iterator[Finding]:
    # Their numbers are not known, but how many there are: the highest quantile that stands on enough of them tells.
    node = evidence.step_node
    if node is None or not node.median_s or not node.total_s:
        return
    excess_s = node.total_s - (node.first_s or node.median_s) - (node.count - 1) * node.median_s
    ratio, share = at_least.SPIKES[0]
    if excess_s < share * node.total_s:
        return
    for one_in, quantile_s in ((20, node.p95_s), (100, node.p99_s)):
        # One more than the least: the first step may be slow for another reason.
        enough = node.count >= one_in * (at_least.SPIKE_LEAST + 1)
        if enough and quantile_s is not None and quantile_s > ratio * node.median_s:
            yield _of_steps(
                evidence,
                "spikes",
                f"At least one {BATCH} in {one_in} takes {int(quantile_s / node.median_s)} × the median of "
                f"{took(node.median_s)} or more",
                cost_s=excess_s,
                region=node.path,
            )
            return


def level_shift(evidence: Evidence) -> Iterator[Finding]:
    """From one step on steps take longer, for good or for a while."""
    steps = evidence.steady
    found = shift_of(steps.durations_s) if steps is not None else None
    if steps is None or found is None or found.level < (1 + at_least.SHIFT_SHARE) * found.usual:
        return
    count = len(steps.durations_s)
    slow = np.arange(found.first, found.end)
    usual = np.setdiff1d(np.arange(count), slow)
    first, last = int(steps.numbers[found.first]), int(steps.numbers[found.end - 1])
    when = f"from step {first} on" if found.end == count else f"from step {first} to {last}"
    cause = cause_of(evidence, steps, slow, usual, typical=True)
    yield _of_steps(
        evidence,
        "level-shift",
        f"Steps take {percent(found.level / found.usual - 1)} longer {when}, {took(found.level)} instead of "
        f"{took(found.usual)}",
        why=_goes(cause),
        command=evidence.command("why", int(steps.numbers[found.first + len(slow) // 2])),
        cost_s=(found.level - found.usual) * len(slow),
        steps=(first,),
        region=evidence.step_node.path if evidence.step_node is not None else (),
    )


def _goes(cause: Cause | None) -> str:
    return f"{cause.text} goes from {took(cause.usual_s)} to {took(cause.slow_s)}" if cause is not None else ""


def drift(evidence: Evidence) -> Iterator[Finding]:
    """Steps grow longer over the run, by more than noise does."""
    steps = evidence.steady
    if steps is None or len(steps.durations_s) < at_least.DRIFT_LEAST or any(level_shift(evidence)):
        return
    found = trend_of(steps.durations_s)
    if found is None or found.chance > at_least.DRIFT_LEVEL or found.growth < at_least.DRIFT_SHARE:
        return
    count = len(steps.durations_s)
    third = count // 3
    yield _of_steps(
        evidence,
        "drift",
        f"Steps become {percent(found.growth)} slower over the run, from {took(found.start)} to {took(found.end)}",
        why=_goes(cause_of(evidence, steps, np.arange(count - third, count), np.arange(third), typical=True)),
        command=evidence.command("report"),
        cost_s=(found.end - found.start) / 2 * count,
        region=evidence.step_node.path if evidence.step_node is not None else (),
    )


def warm_up(evidence: Evidence) -> Iterator[Finding]:
    """The first steps take a large part of the run."""
    found = warm_up_of(evidence)
    if found is not None and found.cost_s is not None and found.cost_s >= at_least.WARM_UP_SHARE * evidence.whole_s:
        yield found


def warm_up_of(evidence: Evidence) -> Finding | None:
    """The warm-up of any length; None without one."""
    return _first_regions(evidence) or _first_steps(evidence)


def _first_regions(evidence: Evidence) -> Finding | None:
    # Keras times its first batch, in which it traces, as a separate region.
    firsts = [node for node in evidence.tree.walk() if node.name == FIRST_STEP and node.total_s]
    step = evidence.step_node
    if not firsts or step is None or step.median_s is None:
        return None
    total_s, count = sum(node.total_s or 0.0 for node in firsts), sum(node.count for node in firsts)
    cost_s = total_s - count * step.median_s
    which = f"{FIRST_STEP} takes" if count == 1 else f"{count} × {FIRST_STEP} take"
    return _of_steps(
        evidence,
        "warm-up",
        f"{_share(evidence, cost_s)} of {evidence.whole} is warm-up: {which} {took(total_s)}, "
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
        f"{_share(evidence, cost_s)} of {evidence.whole} is warm-up: {which} {took(spent)}, "
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
        f"{_share(evidence, cost_s)} of {evidence.whole} is warm-up: the first {BATCH} takes {took(step.first_s)}, "
        f"the others {took(step.median_s)} each",
        cost_s=cost_s,
        region=step.path,
    )


def _of_steps(evidence: Evidence, rule: str, fact: str, **more: Any) -> Finding:
    return Finding(rule, fact, anchor="over-the-run", rank=evidence.rank, **more)


def _share(evidence: Evidence, cost_s: float) -> str:
    return percent(cost_s / evidence.whole_s) if evidence.whole_s else "Much"
