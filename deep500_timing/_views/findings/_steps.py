"""spikes, level-shift, drift, warm-up, recompilation: rules about the lengths of the steps."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.names import BATCH, IO
from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.findings._finding import (
    MOST_STEPS,
    START,
    UNEXPLAINED_S,
    WAITED,
    Rule,
    listed,
    longer,
    named,
    percent,
    took,
)
from deep500_timing._views.findings._machine import TO_MACHINE, is_waiting
from deep500_timing._views.findings._remedies import GC, of_collections, remedy_of
from deep500_timing._views.findings._series import CHANCE, cause_of, shared_by, shift_of, trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence, StepSeries
    from deep500_timing._views.findings._finding import Finding, Yields
    from deep500_timing._views.findings._series import Shift

_SPIKES = ((4.0, 0.01), (2.5, 0.10))
"""Steps over so many medians that cost so much of all steps; the second pair if the first finds none."""
_HIGHER = (10.0, 30.0, 100.0, 300.0, 1000.0)
_SPIKE_LEAST, _SPIKES_S = 3, 0.1  # the fewest, and the fewest seconds above the median in all
_MORE_CALLS = 2.0
"""From so many times as many regions on, a step does more than another."""
_SPIKE_MANY = 0.05
"""From this share of the steps on the sentence names their total."""
_WARM_UP_RATIO, _WARM_UP_LEAST, _WARM_UP_MOST = 1.5, 10, 0.2
_NEARLY = 0.95
_SHIFT_SHARE = 0.15
"""A change of level by this share is no drift."""
_LITTLE_WAITING = 0.05
"""The share of all steps up to which waiting for a processor is no disturbance, for a while or by and by."""


def spikes(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Some steps take a multiple of the median, and it costs the run."""
    steps = evidence.steady
    if steps is None or len(steps.durations_s) < rule.least:
        return
    durations = steps.durations_s
    usual = float(np.median(durations))
    for ratio, share in _SPIKES:
        slow = np.flatnonzero(durations > ratio * usual)
        excess_s = float((durations[slow] - usual).sum())
        if len(slow) >= _SPIKE_LEAST and excess_s >= share * float(durations.sum()):
            break
    else:
        return
    for higher in _HIGHER:
        fewer = np.flatnonzero(durations > higher * usual)
        # Long pauses among the spikes of a busy machine: these would hide their period.
        if _SPIKE_LEAST <= len(fewer) < len(slow) and (durations[fewer] - usual).sum() >= _NEARLY * excess_s:
            ratio, slow = higher, fewer
    of_usual = np.flatnonzero(durations <= ratio * usual)
    if evidence.more_calls(steps.numbers[slow].tolist(), steps.numbers[of_usual].tolist()) >= _MORE_CALLS:
        return  # they hold more work, such as an episode: the program's own
    shift = _shift(evidence, _SHIFT_SHARE)
    if shift is not None and len(slow) > 0.5 * (shift.end - shift.first):
        return  # the rule about changes of level says it
    of = f" of {len(durations)}" if len(slow) > _SPIKE_MANY * len(durations) else ""
    shared = shared_by(evidence, steps, slow).text
    waited = is_waiting(evidence, steps, slow, of_usual, at_random=not shared)
    cause = None if waited else cause_of(evidence, steps, slow, of_usual)
    region = cause.region if cause is not None else ""
    if excess_s < (_SPIKES_S if shared or cause else UNEXPLAINED_S) or (not waited and evidence.may_queue(region)):
        return
    numbers = steps.numbers[slow].tolist()
    ordered = steps.slowest(slow)
    why, remedy = _WAITED if waited else "", ""
    if cause is not None:
        lines = evidence.lines_in(cause.path, numbers) if cause.path and cause.rank in (None, evidence.rank) else ""
        remedy, lines = of_collections(lines) if region == GC else ("", lines)
        why = f"mostly in {cause.text}" + (f", {lines}" if lines else "")
    yield rule.found(
        evidence,
        f"{len(slow)}{of} steps took more than {ratio:g} × the median of {took(usual)}: {listed(numbers)}",
        where=shared,
        why=why,
        command="" if waited or remedy else evidence.command("why", ordered[0]),
        remedy=remedy,
        cost_s=excess_s,
        steps=tuple(ordered[:MOST_STEPS]),
        cause=region,
        kind=WAITED if waited else "",
    )


_WAITED = "the thread waited for a processor"


def _shift(evidence: Evidence, share: float) -> Shift | None:
    found = shift_of(evidence.steady.durations_s) if evidence.steady is not None else None
    return found if found is not None and found.level >= (1 + share) * found.usual else None


def level_shift(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """From one step on steps take longer, for good or for a while."""
    steps, found = evidence.steady, _shift(evidence, rule.share)
    if steps is None or found is None:
        return
    count = len(steps.durations_s)
    slow = np.arange(found.first, found.end)
    first, last = int(steps.numbers[found.first]), int(steps.numbers[found.end - 1])
    when = f"from step {first} on" if found.end == count else f"from step {first} to {last}"
    others = np.setdiff1d(np.arange(count), slow)
    if not (told := _of_level(evidence, steps, slow, others, (found.level - found.usual) * len(slow))):
        return
    yield rule.found(
        evidence,
        f"Steps take {longer(found.level / found.usual)} {when}, {took(found.level)} instead of {took(found.usual)}",
        command=evidence.command("why", int(steps.numbers[found.first + len(slow) // 2])),
        steps=(first,),
        **told,
    )


def _of_level(
    evidence: Evidence, steps: StepSeries, slow: NDArray[np.intp], others: NDArray[np.intp], cost_s: float
) -> dict[str, Any]:
    # Why, where, the cost and the kind of a finding on steps that take longer for long; empty if a queue may explain
    # them, little waiting, or another training, whose model or data are others.
    several = f"select 1 from events where what = 'training' and rank = {evidence.rank} {evidence.only}"
    if evidence.fit is None:  # fits of Keras are told apart
        several += f"union all (select 1 from intervals where region = 'FIT' and {evidence.mine}offset 1)"
    if evidence.rows(several):
        return {}
    region = evidence.step_node.path if evidence.step_node is not None else ()
    if is_waiting(evidence, steps, slow, others):
        is_little = cost_s < _LITTLE_WAITING * steps.durations_s.sum()
        return {} if is_little else {"why": _WAITED, "region": region, "cost_s": cost_s, "kind": WAITED}
    cause = cause_of(evidence, steps, slow, others, typical=True)
    if evidence.may_queue(cause.region if cause is not None else ""):
        return {}
    why = f"{cause.text} goes from {took(cause.usual_s)} to {took(cause.slow_s)}" if cause is not None else ""
    return {"why": why, "region": region, "cost_s": cost_s}


def drift(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Steps grow longer over the run, by more than noise does."""
    steps = evidence.steady
    if steps is None or len(steps.durations_s) < rule.least or _shift(evidence, _SHIFT_SHARE) is not None:
        return
    found = trend_of(steps.durations_s)
    if found is None or found.chance > CHANCE or found.growth < rule.share:
        return
    count = len(steps.durations_s)
    third = count // 3
    last, first = np.arange(count - third, count), np.arange(third)
    if not (told := _of_level(evidence, steps, last, first, (found.end - found.start) / 2 * count)):
        return
    yield rule.found(
        evidence,
        f"Steps become {longer(1 + found.growth)} over the run, from {took(found.start)} to {took(found.end)}",
        command=evidence.command("report"),
        **told,
    )


def warm_up(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """The first steps take a large part of the run."""
    found = warm_up_of(evidence)
    if found is None or found.cost_s < rule.share * evidence.whole_s:
        return
    steps = evidence.steps
    if steps is not None and found.steps:
        others = steps.numbers[steps.numbers > found.steps[-1]].tolist()
        if evidence.more_calls(found.steps, others) >= _MORE_CALLS:
            return
    fact, remedy, kind, command = found.said, "look at what else ran on the machine then", "", ""
    if found.is_start:
        share = percent(found.cost_s / evidence.whole_s) if evidence.whole_s else "Much"
        fact, kind = f"{share} of {evidence.whole} is warm-up: {found.said}", START
        remedy = remedy_of(evidence, rule.name, rule.remedy)
        if found.steps and not any("compil" in node.name.lower() for node in evidence.tree.walk()):
            remedy, command = "leave the first steps out of comparisons", evidence.command("why", found.steps[0])
    first = evidence.warm_up_steps
    if steps is not None and is_waiting(evidence, steps, np.arange(first), np.arange(first, len(steps.durations_s))):
        fact, remedy, kind, command = f"{fact}: {_WAITED}", "", WAITED, ""
    told = {"remedy": remedy, "command": command, "kind": kind}
    yield rule.found(evidence, fact, cost_s=found.cost_s, region=found.region, steps=found.steps, **told)


class WarmUp(NamedTuple):
    """The first steps, if they take longer than the others."""

    said: str
    cost_s: float
    """The excess over usual steps."""
    region: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    """The last of them tells where the warm-up ends."""
    is_start: bool = True
    """Whether they are few enough for a start; many slow steps may have any cause."""


def warm_up_of(evidence: Evidence) -> WarmUp | None:
    """The warm-up of any length; None without one."""
    step, steps = evidence.step_node, evidence.steps
    if steps is not None:
        return _first_steps(evidence, steps)
    if step is None or step.first_s is None or not step.median_s or step.count < _WARM_UP_LEAST:
        return None
    if step.first_s < _WARM_UP_RATIO * step.median_s:
        return None
    said = f"the first {BATCH} takes {took(step.first_s)}, the others {took(step.median_s)} each"
    return WarmUp(said, step.first_s - step.median_s, step.path)


def _first_steps(evidence: Evidence, steps: StepSeries) -> WarmUp | None:
    count = evidence.warm_up_steps
    if not count or len(steps.durations_s) < _WARM_UP_LEAST:
        return None
    usual = float(np.median(steps.durations_s[count:]))
    most = max(_WARM_UP_MOST * len(steps.durations_s), _WARM_UP_LEAST)
    # Nearly all of it may be that of the first ones, such as a compilation: these are the start then.
    excess = np.cumsum(steps.durations_s[:count] - usual)
    few = int(np.argmax(excess >= _NEARLY * excess[-1])) + 1
    count = few if few <= most else count
    spent = float(steps.durations_s[:count].sum())
    numbers = (*steps.numbers[: min(count, MOST_STEPS) - 1].tolist(), int(steps.numbers[count - 1]))
    is_start = count <= most
    if is_start:
        which = "the first step takes" if count == 1 else f"the first {count} steps take"
        said = f"{which} {took(spent)}, those from step {int(steps.numbers[count])} on {took(usual)} each"
    else:
        until = f"{longer(spent / count / usual)} until step {numbers[-1]}"
        said = f"Steps take {until}, {took(spent / count)} instead of {took(usual)}"
    return WarmUp(said, spent - count * usual, steps=numbers, is_start=is_start)


def recompilation(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """``torch.compile``, JAX or TensorFlow compiles functions again, because a guard failed or a shape is new."""
    # Keras compiles its step, and within it JAX does: that is one compilation.
    rows = evidence.rows(
        f"select frame, reason, dur_us from compilations c where rank = {evidence.rank} and reason <> '' "
        f"{evidence.only}and not exists (select 1 from compilations o where o.rank = c.rank and o.session = c.session "
        "and o.dur_us > c.dur_us and o.unix_us <= c.unix_us and o.unix_us + o.dur_us >= c.unix_us + c.dur_us)",
        "compilations",
    )
    cost_s = sum(row["dur_us"] for row in rows) / 1e6
    if len(rows) < rule.least or cost_s < rule.share * evidence.whole_s:
        return
    by_frame, by_reason = Counter[str](), Counter[str]()
    for row in rows:
        by_frame[row["frame"]] += row["dur_us"]
    [(frame, most_us)] = by_frame.most_common(1)
    for row in rows:  # of that function, where it has most of the time: PyTorch's reasons have numbers in them
        by_reason[row["reason"]] += row["dur_us"] * (most_us <= 0.5e6 * cost_s or row["frame"] == frame)
    [(reason, _)] = by_reason.most_common(1)
    remedies = [text for part, text in _REMEDIES.items() if part in reason]
    of = f" {'mostly ' * (len(by_frame) > 1)}of {named(frame)}" if most_us > 0.5e6 * cost_s else ""
    yield rule.found(
        evidence,
        f"{len(rows)} recompilations{of} take {percent(cost_s / evidence.whole_s)} of {evidence.whole}, {took(cost_s)}",
        why=shorten(safe_name(_NUMBER.sub("", " ".join(reason.split())).partition(" # ")[0]), 100),
        cost_s=cost_s,
        remedy=remedies[0] if remedies else remedy_of(evidence, rule.name, rule.remedy),
    )


def runs_eagerly(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """What could run as one graph runs each of its operations from Python, or a model of Keras without XLA."""
    step, fit = evidence.step_node, evidence.fit
    if step is not None and fit is None and evidence.kinds == ("tensorflow",):
        parts = [child for child in step.children if child.name in _EAGER]
        cost_s, count = sum(part.total_s or 0.0 for part in parts), max((part.count for part in parts), default=0)
        whole_s, of = evidence.loop_of(evidence.whole_s)
        if rule.share * whole_s <= cost_s <= _SMALL_S * count:
            fact = f"The loop is no tf.function: {took(cost_s / count)} a step, {percent(cost_s / whole_s)} of {of}"
            yield rule.found(evidence, fact, cost_s=cost_s, region=step.path, remedy="tf.function around the step")
    if step is None or step.total_s is None or fit is None or not (fit["eager"] or fit.get("could_jit")):
        return
    cost_s = step.total_s - sum(child.total_s or 0.0 for child in step.children if child.name in (IO, "compile"))
    whole_s, of = evidence.loop_of(evidence.whole_s)
    if cost_s < rule.share * whole_s:
        return
    takes = f"{took(cost_s / step.count)} a step, {percent(cost_s / whole_s)} of {of}"
    if fit["eager"]:
        fact = f"The model runs eagerly (run_eagerly=True): {takes}"
        yield rule.found(evidence, fact, cost_s=cost_s, region=step.path)
    elif cost_s / step.count <= _SMALL_S:
        fact = f"XLA is off (jit_compile=False), though the model allows it: {takes}"
        yield rule.found(evidence, fact, region=step.path, remedy="compare with compile(jit_compile=True)")


def _waits_in_them(own: Finding, wait: Finding) -> bool:
    return own.cause in ("", IO) and bool(wait.steps) and {*wait.steps} >= {*own.steps}


_SPIKES_TO: dict[str, Yields] = TO_MACHINE | {
    "recompilation": lambda own, _: own.cause in ("compile", "the rest of compile"),
    "waits-for-data": _waits_in_them,
    "between-epochs": lambda own, other: other.is_half_of(own) and bool(own.steps) and {*own.steps} <= {*other.steps},
}
_WARM_UP_TO: dict[str, Yields] = TO_MACHINE | {
    "recompilation": lambda own, other: own.kind != START and other.is_half_of(own),
    "waits-for-data": _waits_in_them,
}
_NUMBER = re.compile(r"\d+/\d+: ")
"""PyTorch's number of a compilation, before its reason; the line of the program is behind it."""
_CACHE = "cache compilation; leave the first steps out of comparisons"
_REMEDIES = {
    " size mismatch": "pad inputs to few shapes; in torch, mark_dynamic or dynamic=True",
    "a Python number": "pass it as a tensor",
    "a batch of another shape": "pad to few lengths; or compile with jit_compile=False",
    "inputs of another shape": "pad to few shapes; in tf.function, input_signature with None where they change",
    "outside of jit": "jit the function that calls it",
    "static arguments": "pad inputs to few shapes; pass what changes as an array, not as a static argument",
}
"""What helps, by a part of the reason that PyTorch gives, or TensorFlow's and JAX's plug-ins note."""
_OF_VALUES = "cache compilation; in torch, pass numbers that change as tensors"
_EAGER = ("FORWARD", "BACKWARD", "optimizer")
_SMALL_S = 0.02
"""A longer step is no matter of its operations' number."""
RULES = (
    Rule("spikes", spikes, 0.01, 20, "over-the-run", needs="run", yields_to=_SPIKES_TO),
    Rule("level-shift", level_shift, 0.15, 60, "over-the-run", needs="run", yields_to=TO_MACHINE),
    Rule("drift", drift, 0.05, 60, "over-the-run", "look for lists that grow", needs="run", yields_to=TO_MACHINE),
    Rule("warm-up", warm_up, 0.10, 10, "over-the-run", _CACHE, needs="", of_run=True, yields_to=_WARM_UP_TO),
    Rule("runs-eagerly", runs_eagerly, 0.20, 20, "tree", "compile() without run_eagerly", needs="run", on_cpu=True),
    Rule("recompilation", recompilation, 0.02, 3, "tree", _OF_VALUES, needs="run", of_run=True),
)
