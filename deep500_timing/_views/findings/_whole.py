"""lost, unnamed, dominant-region, outside-steps, goodput: missing numbers, and the time of the whole run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._base.names import BATCH, CPU
from deep500_timing._views.findings._account import (
    AFTER,
    OURS,
    START_UP,
    Account,
    Entry,
    account_of,
    is_overhead,
    is_validation,
    start_up_parts,
)
from deep500_timing._views.findings._data import RARER, has_workers, keep_workers
from deep500_timing._views.findings._evidence import EDGE, INTERPRETER, WAIT, Evidence, is_at
from deep500_timing._views.findings._finding import (
    MOST_STEPS,
    PAUSES,
    START,
    UNEVEN,
    UNEXPLAINED_S,
    Finding,
    Rule,
    Yields,
    listed,
    named,
    of_one_region,
    percent,
    took,
)
from deep500_timing._views.findings._remedies import GC, of_collections, remedy_of
from deep500_timing._views.findings._series import period_of
from deep500_timing.runs._stacks import HotPlace, said_of

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node

PARTS = "time its parts as regions"
_CLOSURE = "a smaller history_size, fewer of its iterations"
"""An optimizer that calls its closure several times, such as L-BFGS: the rest is its own arithmetic."""
BETWEEN = {
    "loss": f"{PARTS}; avoid .item() and print in it",
    "prepare batch": "make batches in a loader's workers, copy with pin_memory and non_blocking",
    "gradients": "do it less often; clip once a step, with foreach",
    "between steps": "do it less often, load data in workers, keep numbers on the device",
    "other code": PARTS,
}
"""The rows between two events that ``deep500-timing run`` and the trainers add to a step, and what usually helps. They
count from :data:`UNNAMED` on, as time in no region does."""
UNNAMED = 0.20
"""The rest as a share of its parent."""
_UNNAMED_OF_RUN = 0.02
_OURS_S = 5e-7
"""Shorter stretches between two regions are mostly our own."""
_DIVIDED = 0.50
"""Inside the step, a region is meant to be divided if the regions in it cover this share of its work."""
_VALIDATION, _OVERHEAD, _PAUSES, _IN_NONE = 0.20, 0.05, 0.05, 0.20
"""outside-steps, as shares of the run: a validation, checkpoints and the like, long pauses, time in no region."""
_VALIDATION_AIM, _OVERHEAD_AIM, _TIMES = 0.10, 0.02, 3
"""The shares for which the sentence names a period, and the least number of times for it."""
_COLLECTED = 0.10
"""Garbage collections as a share of the steps."""
_NEARLY = 0.9
_RARE = 0.5
"""Times a step up to which a region can be done less often. One that each step needs must become faster."""
_NO_GRAD = "FORWARD (no grad)"
_FASTER = "time its parts as regions; run it in parallel, or while the steps run"
_REMEDIES = {
    "compile": "cache compilation, pad inputs to few shapes",
    "optimizer": "larger batches; in torch, fused=True",
}
"""Regions that the project records itself, and what usually helps."""
_BESIDE = {
    "PREDICT": "model(x) for a few samples; do it less often",
    "TEST": "do it less often",
    "rollout": "several environments at once, so that a policy's call serves all; a faster environment",
    "generate": "shorter or fewer outputs; a faster engine for generation",
    "optimizer (not jitted)": "update inside the jitted step",
    "gradient (not jitted)": "jax.jit the step, its gradient and its update inside",
}
"""What stands out in a step whatever divides that, and what usually helps: calls of a model, parts outside of jit."""
_COPIES = r"(?:array|asarray|block_|device_)"
_BY_PLACE = {
    "Flax's functional training loop: nnx.split before it, jax.jit in it": re.compile(r"\(flax/nnx/"),
    "jax.jit what runs there": re.compile(
        rf"\b(?:jnp|lax|jax)\.(?!{_COPIES})|^(?!.*\b(?:jnp|jax)\.{_COPIES}).*\(jax/", re.DOTALL
    ),
}
"""What helps where `nnx.jit` takes objects of Flax apart, and where JAX works outside of jit; a copy is no work."""
_MANY_CALLS = 4
"""Calls a step from which on a model acts, or searches, and is no teacher."""
_OF_NO_GRAD = "compute it once, where the same inputs come again"
_OF_MANY = "call the model for several inputs at once"
_NAMED = 2
"""Regions after the last step that a sentence names."""
_LONG_START_S = 60.0
"""A shorter start-up is no finding: a trial may be little else."""
_MOSTLY = 0.6
_PAUSE = 2
"""Times the median pause between two BATCHes from which on one is long."""
_COMPUTE = ("FORWARD", "BACKWARD")
_STOPPED = frozenset(("KeyboardInterrupt", "SIGTERM"))
_RESTARTS = ("lost", "startup", "down", "queue")


def lost(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Something was dropped, is damaged, is missing or has failed: the numbers leave it out."""
    parts = []
    if evidence.run is not None:
        about = evidence.about
        parts += [f"{number} {what}" for what, number in about.lost.items() if number]
        missing = about.missing_ranks
        if missing:
            parts.append(f"nothing of rank{'s' if len(missing) > 1 else ''} {listed(missing, 6)}")
    for counter in ("failed", "discarded"):
        by_name: Counter[str] = Counter()
        for (name, _), counts in evidence.tree.counters.items():
            by_name[name] += counts.get(counter, 0)
        if counter == "failed" and evidence.run is not None and not _STOPPED.isdisjoint(evidence.about.ends):
            by_name.subtract(list(by_name))  # what was open when the user stopped the program
        most = sorted(+by_name, key=lambda name: (-by_name[name], name))
        if not most:
            continue
        if len(most) < 3:
            of = " and ".join(map(named, most))
        elif by_name[most[0]] > by_name[most[1]]:
            of = f"most in {named(most[0])}"
        else:
            of = f"{named(most[0])} and {len(most) - 1} others"
        total = (+by_name).total()
        parts.append(f"{total} {'region' if total == 1 else 'regions'} {counter} ({of})")
    if parts:
        yield rule.found(evidence, f"Not in the numbers: {'; '.join(parts)}", is_first=True)
    if evidence.run is not None and evidence.about.repeated_logs:
        number = evidence.about.repeated_logs
        fact = f"{number} {'log is' if number == 1 else 'logs are'} in two folders: the numbers have them twice"
        yield rule.found(evidence, fact, is_first=True)


def unnamed(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """A large part of a region lies in none of the regions inside it."""
    found: list[tuple[float, Node]] = []
    for node in evidence.tree.walk():
        if node.rest_s is None or not node.total_s or node.name in BETWEEN:
            continue
        # A region next to it that ends later names that time, such as the program's own around the optimizer's step.
        beside = evidence.tree.inside(node.parent)
        rest_s = node.rest_s - sum(other.overlap_s for other in beside if other is not node)
        if any(inner.name == BATCH for inner in node.walk() if inner is not node):
            inside_s = sum(evidence.apart_of(child.path)[0] for child in node.children if not child.is_rest)
            rest_s -= evidence.apart_of(node.path)[0] - inside_s
        else:
            # Any region that divides does so for a step. Inside the step, regions that cover half of the work do.
            work = [child for child in node.children if child.divides]
            work_s = sum((child.total_s or 0.0) - child.overlap_s for child in work)
            is_divided = work_s > 0 if node.name == BATCH else work_s >= _DIVIDED * (work_s + rest_s)
            if not is_divided or node.count < rule.least:
                continue
        gaps = node.count + sum(child.count for child in node.children)
        if rest_s < _OURS_S * gaps:
            continue  # reads of our own clock
        least = _VALIDATION if any(map(is_validation, node.path)) else _UNNAMED_OF_RUN
        if rest_s >= max(rule.share * node.total_s, least * evidence.whole_s):
            found.append((rest_s, node))
    if found:
        rest_s, node = max(found, key=lambda pair: pair[0])
        share = percent(rest_s / (node.total_s or rest_s))
        is_repeated = any(child.count > node.count for child in node.children)
        usual = remedy_of(evidence, rule.name if node.name == BATCH else "", rule.remedy)
        usual = _CLOSURE if node.name == "optimizer" and is_repeated else usual
        places = [one for one in evidence.places_in(node.path) if not (evidence.fit and ".fit(" in one.expression)]
        said = [f"{one.expression} {one.inside}" for one in places]
        yield rule.found(
            evidence,
            f"{share} of {named(node.name)} lies in no region, {took(rest_s)} in all",
            where=_where(evidence, node),
            why=said_of(places),
            cost_s=rest_s,
            region=node.path,
            cause=f"the rest of {named(node.name)}",
            remedy=next((remedy for one in said for remedy, of in _BY_PLACE.items() if of.search(one)), usual),
            place=_line_of(places),
        )


def _line_of(places: list[HotPlace]) -> str:
    return places[0].file if places and places[0].expression and places[0].share >= _MOSTLY else ""


def _where(evidence: Evidence, node: Node) -> str:
    if evidence.run is None:
        return ""
    paths, gaps = evidence.gaps(node)
    names = ["", *(named(path[-1]) for path in paths)]
    # Each pair of neighbours has a number; 0 is an interval without any region inside.
    pairs, which = np.unique((gaps[:, 4] - EDGE) * len(names) + gaps[:, 5] - EDGE, return_inverse=True)
    sums = np.where(pairs > 0, np.bincount(which, gaps[:, 3] - gaps[:, 2]), 0.0)
    if not sums.any() or sums.max() < _MOSTLY * sums.sum():
        return ""
    left, right = (names[number] for number in divmod(int(pairs[sums.argmax()]), len(names)))
    if not left or not right:
        return f"most of it before {right}" if right else f"most of it after {left}"
    return f"most of it between two {left}" if left == right else f"most of it between {left} and {right}"


def dominant_region(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """A region that is neither the forward nor the backward pass takes much of a step in which these are timed."""
    step = evidence.step_node
    assert step is not None
    whole_s, compute_s = step.total_s or 0.0, sum(node.total_s or 0.0 for node in step.children if _computes(node))
    others = [
        node
        for node in step.children
        if (node.divides or node.name in _REMEDIES) and not _computes(node) and node.name not in (*evidence.waits, GC)
        if node.total_s and (compute_s or node.name in _BESIDE)
    ]
    # Waits for ranks inside it, collections, and the start of the log, are no work of the region.
    spent = sorted(((_spent_s(evidence, node), node) for node in others), key=lambda pair: pair[0])[-1:]
    # They begin wherever an object is made: those in all regions are one cause.
    collected = sorted((node.total_s or 0.0, node.path, node) for node in step.walk() if node.name == GC)
    spent += [(sum(total_s for total_s, *_ in collected), node) for _, _, node in collected[-1:]]
    for spent_s, node in spent:
        least = _COLLECTED if node.name == GC else UNNAMED if node.name in BETWEEN else rule.share
        if spent_s >= least * whole_s:
            yield from _dominant(rule, evidence, step, spent_s, node)


def _dominant(rule: Rule, evidence: Evidence, step: Node, spent_s: float, node: Node) -> Iterator[Finding]:
    if node.name in BETWEEN:
        # The program's own region says more than the row around it.
        others_of = evidence.waits | {*BETWEEN, OURS}
        own = [child for child in node.children if child.name not in others_of and not child.is_rest]
        node = next((child for child in own if (child.total_s or 0.0) >= _NEARLY * spent_s), node)
    places = evidence.places_in(node.path)
    if node.name in (*BETWEEN, "optimizer") and places and places[0].name.endswith(".forward"):
        return  # a model that was not seen to be called, or a closure: the row has not its usual content
    is_even = (node.median_s or 0.0) * node.count >= 0.5 * spent_s and node.count >= 0.5 * step.count
    on_average = "" if is_even else " on average"
    if on_average and spent_s < UNEXPLAINED_S and not places and node.name != GC:
        return  # a few intervals of a trial, which a busy machine has as well
    of_no_grad = {_NO_GRAD: _OF_MANY if node.count >= _MANY_CALLS * step.count else _OF_NO_GRAD}
    usual, why = (BETWEEN | _REMEDIES | _BESIDE | of_no_grad).get(node.name, rule.remedy), said_of(places)
    usual, why = of_collections(why) if node.name == GC else (usual, why)
    yield rule.found(
        evidence,
        f"{named(node.name)} takes {percent(spent_s / (step.total_s or spent_s))} of {BATCH}, "
        f"{took(spent_s / step.count)} a step{on_average}",
        why=why,
        place=_line_of(places) if why else "",
        cost_s=spent_s,
        region=node.path,
        remedy=remedy_of(evidence, node.name, usual),
        cause=named(node.name),
        kind=UNEVEN if on_average or node.name == "compile" else "",
    )


def _spent_s(evidence: Evidence, node: Node) -> float:
    others = evidence.waits | {OURS, "compile", GC}
    spent_s = (node.total_s or 0.0) - sum(child.total_s or 0.0 for child in node.children if child.name in others)
    if evidence.run is None or not evidence.operations or node.name not in BETWEEN:
        return spent_s
    [row] = evidence.rows(
        "select cast(sum(c.dur_ns) as double) as ns from collectives c join intervals i on c.rank = i.rank and "
        "c.session = i.session and c.start_ns >= i.start_ns and c.start_ns < i.start_ns + i.dur_ns "
        f"where i.{is_at(node.path)} and i.device = '{CPU}' and i.rank = {evidence.rank}"
    )
    return spent_s - (row["ns"] or 0.0) / 1e9


def _computes(node: Node) -> bool:
    if node.name in (*BETWEEN, *_BESIDE, _NO_GRAD):
        return False
    return any(word in inner.name.upper() for inner in node.walk() for word in _COMPUTE)


def outside_steps(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """A large part of the run is not training: validation, checkpoints, pauses between steps, time in no region."""
    account = account_of(evidence)
    if not account.whole_s:
        return
    found = (_outside(rule, evidence, entry, account) for entry in account.entries)
    yield from [finding for finding in found if finding is not None][:2]


def _outside(rule: Rule, evidence: Evidence, entry: Entry, account: Account) -> Finding | None:
    step = evidence.step_node
    if not entry.nodes and entry.name in (START_UP, AFTER):  # no region that has such a name
        return _around(rule, evidence, entry)
    whole_s, of = evidence.loop_of(account.whole_s)
    share = entry.total_s / whole_s
    if not entry.nodes:
        if share < _IN_NONE:
            return None
        fact = f"{percent(share)} of {of} lies outside every region, {took(entry.total_s)}"
        places = evidence.places_in(())
        why, place = said_of(places), _line_of(places)
        return rule.found(evidence, fact, why=why, cost_s=entry.total_s, remedy=PARTS, place=place)
    entry = _called_in(entry)
    node = entry.nodes[0]
    if entry.is_rest:
        is_around = step is not None and node.path == step.parent
        return _pauses(rule, evidence, node, whole_s, of) if is_around and share >= _PAUSES else None
    least, aim = rule.share, _OVERHEAD_AIM
    if is_validation(entry.name):
        least, aim = _VALIDATION, _VALIDATION_AIM
        for wait in (child for child in node.children if child.name == WAIT):
            # The first one of an evaluation waits for the training before it, too.
            own_s = wait.count * (wait.median_s or 0.0) if wait.count > node.count else 0.0
            entry = entry._replace(total_s=entry.total_s - (wait.total_s or 0.0) + own_s)
        share = entry.total_s / whole_s
    elif is_overhead(entry.name) and entry.times > 1:
        least = _OVERHEAD
    if share < least or entry.name in {*evidence.waits, OURS}:
        return None
    is_rare = step is None or entry.times <= _RARE * step.count or is_overhead(entry.name) or is_validation(entry.name)
    own = remedy_of(evidence, entry.name, (_REMEDIES | _BESIDE | {"TEST": ""}).get(entry.name, "")) or None
    places = evidence.places_in(node.path)
    lines, period = said_of(places), ""
    if entry.name == "EPOCH (start)":
        own = keep_workers(evidence)
    elif entry.name == GC:
        own, lines = of_collections(lines)
    can_be_rarer = is_rare and entry.times > 1 and own is None
    remedy = own or (rule.remedy if can_be_rarer else _FASTER)
    numbers = [{*its.numbers.tolist()} for one in entry.nodes if is_rare and (its := evidence.series(one.path))]
    if step is not None and account.training_s and entry.times >= _TIMES and can_be_rarer:
        # How many steps must lie between two, for them to take a small share of the time with the training. What comes
        # twice after a step, as on two sets of data, is one.
        every = entry.total_s / (len(set().union(*numbers)) or entry.times)
        every *= (1 - aim) / (aim * account.training_s / step.count)
        digits = max(len(str(int(every))) - 2, 0)
        remedy = f"do it once in {int(round(every, -digits))} steps (then {percent(aim)}), or in the background"
    if numbers and evidence.steps is not None:
        period = period_of(sorted(numbers[0]), int(evidence.steps.numbers.max()))
    times = "once" if entry.times == 1 else f"{entry.times} times, {took(entry.total_s / max(entry.times, 1))} each"
    return rule.found(
        evidence,
        f"{named(entry.name)} takes {percent(share)} of {of}, {took(entry.total_s)}, {times}",
        where=period,
        why="" if can_be_rarer or (own is not None and entry.name != GC) else lines,
        cost_s=entry.total_s,
        region=node.path,
        cause=entry.name,
        remedy=remedy,
        place=_line_of(places),
    )


def _called_in(entry: Entry) -> Entry:
    # A callback that calls the model's `predict` costs what that does.
    for name in _BESIDE:
        nodes = tuple(child for node in entry.nodes for child in node.children if child.name == name)
        total_s = sum(node.total_s or 0.0 for node in nodes)
        if nodes and total_s >= _NEARLY * entry.total_s:
            return Entry(name, total_s, sum(node.count for node in nodes), nodes)
    return entry


def _around(rule: Rule, evidence: Evidence, entry: Entry) -> Finding | None:
    # Before the first step, and after the last one. Imports are not held against a trial, and no rank is blamed
    # without evidence.
    share = entry.total_s / evidence.whole_s
    if entry.name == START_UP:
        own_s = sum(part_s for name, part_s in evidence.start_up if not name.startswith((INTERPRETER, "import ")))
        if entry.total_s < _LONG_START_S and min(share, own_s / evidence.whole_s) < _IN_NONE:
            return None
        lies, why = "before the first step", start_up_parts(evidence)
    else:
        lines = evidence.lines_after() if share >= _IN_NONE else ""
        if not lines:
            return None
        parts = [f"{took(node.total_s)} in {named(node.name)}" for node in evidence.after[:_NAMED]]
        lies, why = "after the last step", ", ".join((*parts, lines))
    fact = f"{percent(share)} of {evidence.whole} lies {lies}, {took(entry.total_s)}"
    return rule.found(evidence, fact, why=why, cost_s=entry.total_s, remedy="", cause=entry.name, kind=entry.name)


def _pauses(rule: Rule, evidence: Evidence, around: Node, whole_s: float, of: str) -> Finding | None:
    # Long pauses between two BATCHes, in no region: a callback, a checkpoint, logging. Short ones after each step are
    # told by the rule unnamed.
    step = evidence.step_node
    if evidence.run is None or step is None:
        return None
    _, gaps = evidence.gaps(around)
    # The end of an epoch counts for its last step, and the beginning of the next one with it.
    first = np.flatnonzero(gaps[:, 4] == EDGE)
    first = first[(first > 0) & (gaps[first, 0] == gaps[first - 1, 0])]
    lengths = gaps[:, 3] - gaps[:, 2]
    lengths[first - 1] += lengths[first]
    pauses, lengths = gaps[gaps[:, 4] != EDGE], lengths[gaps[:, 4] != EDGE] / 1e9
    if len(lengths) < 2 * rule.least:
        return None
    long = np.flatnonzero(lengths > max(_PAUSE * float(np.median(lengths)), 0.25 * (step.median_s or 0.0)))
    total_s = float(lengths[long].sum())
    if len(long) < 2 or len(long) > 0.25 * len(lengths) or total_s < _PAUSES * whole_s:
        return None
    numbers = sorted({*pauses[long, 1].tolist()} - {-1})
    last = int(evidence.steps.numbers.max()) if evidence.steps is not None else 0
    after_which = f"step{'' if len(numbers) == 1 else 's'} {listed(numbers)}"
    spans = [*map(tuple, pauses[long][:, (0, 2, 3)].tolist())]
    if has_workers(evidence) and (pauses[long, 5] == EDGE).all() and evidence.stops_workers(spans):
        told = {"why": "as when workers shut down", "remedy": keep_workers(evidence)}
    else:
        told = {"why": evidence.lines_between(spans)}
        told["command"] = evidence.command("why", numbers[0] + 1) if numbers else ""
    return rule.found(
        evidence,
        f"{len(long)} pauses between the steps take {percent(total_s / whole_s)} of {of}, "
        f"{took(total_s / len(long))} each, in no region: after {after_which}",
        where=period_of(numbers, last),
        cost_s=total_s,
        anchor="over-the-run",
        region=around.path,
        steps=tuple(numbers[:MOST_STEPS]),
        kind=PAUSES,
        **told,
    )


def low_goodput(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """Lost work, starts and down time of a job that was restarted take a large part of the wall clock."""
    assert evidence.run is not None
    if evidence.session is not None or evidence.about.sessions < 2:
        return
    account = evidence.run.goodput()
    cost_s = account.seconds(*_RESTARTS)
    if not (account.failures or account.lost_steps) or not account.wall_s or cost_s < rule.share * account.wall_s:
        return
    parts = sorted((part for part in account.buckets if part.name in _RESTARTS), key=lambda p: -(p.seconds or 0.0))
    yield rule.found(
        evidence,
        f"Goodput is {percent(account.goodput)} of {took(account.wall_s)} with {account.starts} starts",
        why=", ".join(f"{part.title} {percent(part.share)}" for part in parts if part.share),
        command=evidence.command("goodput"),
        cost_s=cost_s,
    )


def _is_in_spikes(own: Finding, spikes: Finding) -> bool:
    same = own.cause == spikes.cause and own.cause not in _BESIDE  # rollouts come in few steps on purpose
    return same and (own.cost_s or 0.0) <= 1.25 * (spikes.cost_s or 0.0)


_CHECKPOINTS = "save checkpoints at the interval that the command names; start faster"
_OUTSIDE_TO: dict[str, Yields] = {
    "between-epochs": lambda own, other: other.is_half_of(own) and own.cause == other.cause in ("", "EPOCH (start)"),
    "recompilation": lambda own, _: own.cause == "compile",
    "goodput": lambda own, _: own.kind == START_UP,
}
_UNNAMED_TO: dict[str, Yields] = {
    "between-epochs": lambda own, other: other.is_half_of(own) and not other.cause and BATCH not in own.region,
    "outside-steps": lambda own, one: own.region == one.region and (one.kind == PAUSES or own.place == one.place != ""),
    "runs-eagerly": lambda own, other: BATCH in own.region and other.cost_s is not None,
    "spikes": _is_in_spikes,
}
_DOMINANT_TO: dict[str, Yields] = {
    "spikes": _is_in_spikes,
    "runs-eagerly": lambda own, other: BATCH in own.region and other.cost_s is not None,
    "warm-up": lambda own, other: own.kind == UNEVEN and other.kind == START and other.is_half_of(own),
    **dict.fromkeys(("copies", "cpu-waits-for-gpu"), of_one_region),
}
RULES = (
    Rule("lost", lost, 0, 1, "not-measured", "the end of the report says what is missing", needs=""),
    Rule("goodput", low_goodput, 0.10, 2, "goodput", _CHECKPOINTS, needs="run", of_run=True),
    Rule("outside-steps", outside_steps, 0.10, 10, "tree", RARER, yields_to=_OUTSIDE_TO),
    Rule("dominant-region", dominant_region, 0.40, 20, "tree", PARTS, on_cpu=True, yields_to=_DOMINANT_TO),
    Rule("unnamed", unnamed, UNNAMED, 20, "tree", PARTS, needs="", on_cpu=True, yields_to=_UNNAMED_TO),
)
