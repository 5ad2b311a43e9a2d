"""lost, unnamed, dominant-region, outside-steps: missing numbers, and the time of the whole run."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._base.names import BATCH, COMM, IO
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._account import Entry, account_of, is_validation
from deep500_timing._views.findings._cause import period_of
from deep500_timing._views.findings._evidence import FIRST_STEP, name_of, percent, took
from deep500_timing._views.findings._finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence

_LOOKED_AT = 50
_MOSTLY = 0.6
_WAITS = (IO, COMM)
_COMPUTE = ("FORWARD", "BACKWARD")
_OVERHEADS = ("checkpoint", "save", "log", "compile")
_AROUND = 2
"""Times the median pause between two BATCHes from which on one is a gap."""


def lost(evidence: Evidence) -> Iterator[Finding]:
    """Something was dropped, is damaged, is missing or has failed: the numbers leave it out."""
    parts = []
    if evidence.run is not None:
        about = evidence.about
        for number, what in (
            (about.dropped, "intervals dropped"),
            (about.damaged_bytes, "bytes of logs damaged"),
            (about.missing_frames, "frames of logs missing"),
        ):
            if number:
                parts.append(f"{number} {what}")
        missing = about.missing_ranks
        if missing:
            shown = ", ".join(map(str, missing[:6])) + (f" and {len(missing) - 6} more" if len(missing) > 6 else "")
            parts.append(f"nothing of rank {shown}" if len(missing) == 1 else f"nothing of ranks {shown}")
    counts: dict[str, dict[str, int]] = {}
    for (name, _), counted in evidence.tree.counters.items():
        for counter in ("failed", "discarded"):
            if counted.get(counter):
                of_counter = counts.setdefault(counter, {})
                of_counter[name] = of_counter.get(name, 0) + counted[counter]
    for counter, by_name in counts.items():
        most = sorted(by_name, key=lambda name: (-by_name[name], name))
        total = sum(by_name.values())
        if len(most) < 3:
            of = " and ".join(map(name_of, most))
        elif by_name[most[0]] > by_name[most[1]]:
            of = f"most in {name_of(most[0])}"
        else:
            of = f"{name_of(most[0])} and {len(most) - 1} others"
        parts.append(f"{total} {'region' if total == 1 else 'regions'} {counter} ({of})")
    if parts:
        yield Finding(
            "lost", f"Not in the numbers: {'; '.join(parts)}", is_first=True, anchor="not-measured", rank=evidence.rank
        )


def unnamed(evidence: Evidence) -> Iterator[Finding]:
    """A large part of a region lies in none of the regions inside it."""
    worst: Node | None = None
    for node in evidence.tree.walk():
        if node.rest_s is None or not node.total_s or node.name == FIRST_STEP:
            continue
        if node.rest_s < max(at_least.UNNAMED_SHARE * node.total_s, at_least.UNNAMED_OF_RUN * evidence.whole_s):
            continue
        if not any(inner.name == BATCH for inner in node.walk() if inner is not node):
            # Waits do not divide a region: it is named for the work around them. Any other region divides a step.
            # Inside the step, regions that cover half of the work do.
            work_s = sum((child.total_s or 0.0) - child.overlap_s for child in node.children if _is_work(child))
            is_divided = work_s > 0 if node.name == BATCH else work_s >= at_least.NAMED_SHARE * (work_s + node.rest_s)
            if not is_divided or node.count < at_least.LEAST_STEPS:
                continue
        if worst is None or worst.rest_s is None or node.rest_s > worst.rest_s:
            worst = node
    if worst is not None and worst.rest_s is not None and worst.total_s:
        yield Finding(
            "unnamed",
            f"{percent(worst.rest_s / worst.total_s)} of {name_of(worst.name)} lies in no region, {took(worst.rest_s)}",
            where=_where(evidence, worst),
            why=evidence.lines_in(path_text(worst.path)),
            cost_s=worst.rest_s,
            anchor="tree",
            region=worst.path,
            rank=evidence.rank,
        )


def _is_work(node: Node) -> bool:
    return not node.is_rest and node.name not in _WAITS


def _where(evidence: Evidence, node: Node) -> str:
    # Gaps in intervals from the middle of the run: before, between and after the regions inside.
    if evidence.run is None:
        return ""
    only = "" if evidence.session is None else f"and session = {evidence.session} "
    of_rank = f"from intervals where rank = {evidence.rank} {only}and device = 'CPU' and thread = 0 "
    outer = evidence.run.sql(
        f"select start_ns, dur_ns {of_rank}and path = {literal(path_text(node.path))} order by start_ns"
    ).rows()
    middle = max(len(outer) // 2 - _LOOKED_AT // 2, 0)
    chosen = outer[middle : middle + _LOOKED_AT]
    if not chosen:
        return ""
    low, high = chosen[0]["start_ns"], max(row["start_ns"] + row["dur_ns"] for row in chosen)
    names = ", ".join(literal(path_text(child.path)) for child in node.children if not child.is_rest)
    found = evidence.run.sql(
        f"select region, start_ns, dur_ns {of_rank}and path in ({names}) and start_ns between {low} and {high}"
    ).rows()
    spans = sorted((row["start_ns"], row["start_ns"] + row["dur_ns"], row["region"]) for row in found)
    gaps: dict[str, int] = {}
    for row in chosen:
        start, end = row["start_ns"], row["start_ns"] + row["dur_ns"]
        inside = [span for span in spans if start <= span[0] and span[1] <= end]
        if not inside:
            continue
        for what, length in (
            (f"before {name_of(inside[0][2])}", inside[0][0] - start),
            (f"after {name_of(inside[-1][2])}", end - max(span[1] for span in inside)),
        ):
            gaps[what] = gaps.get(what, 0) + length
        for one, next_one in pairwise(inside):
            same = one[2] == next_one[2]
            what = f"between two {name_of(one[2])}" if same else f"between {name_of(one[2])} and {name_of(next_one[2])}"
            gaps[what] = gaps.get(what, 0) + max(next_one[0] - one[1], 0)
    total = sum(gaps.values())
    largest = max(gaps, key=lambda what: (gaps[what], what), default="")
    return f"most of it {largest}" if total and gaps[largest] >= _MOSTLY * total else ""


def dominant_region(evidence: Evidence) -> Iterator[Finding]:
    """A region that is neither the forward nor the backward pass takes much of a step in which these are timed."""
    step = evidence.step_node
    if step is None or not step.total_s or step.count < at_least.LEAST_STEPS:
        return
    compute_s = sum(node.total_s or 0.0 for node in step.children if _computes(node))
    if not compute_s:
        return
    others = [
        node for node in step.children if _is_work(node) and not _computes(node) and node.name not in evidence.waits
    ]
    node = max(others, key=lambda node: node.total_s or 0.0, default=None)
    if node is None or node.total_s is None:
        return
    least = at_least.UNNAMED_SHARE if node.name.startswith(at_least.AFTER) else at_least.DOMINANT_SHARE
    if node.total_s < least * step.total_s:
        return
    yield Finding(
        "dominant-region",
        f"{name_of(node.name)} takes {percent(node.total_s / step.total_s)} of {BATCH}, "
        f"{took(node.total_s / step.count)} a step",
        where=f"FORWARD and BACKWARD take {percent(compute_s / step.total_s)}",
        why=evidence.lines_in(path_text(node.path)),
        cost_s=node.total_s,
        anchor="tree",
        region=node.path,
        rank=evidence.rank,
    )


def _computes(node: Node) -> bool:
    if node.name.startswith(at_least.AFTER):
        return False
    return any(word in inner.name.upper() for inner in node.walk() for word in _COMPUTE)


def outside_steps(evidence: Evidence) -> Iterator[Finding]:
    """A large part of the run is not training: validation, checkpoints, pauses between steps, time in no region."""
    account = account_of(evidence)
    step = evidence.step_node
    if not account.whole_s or step is None or step.count < at_least.LEAST_STEPS // 2:
        return
    said = 0
    for entry in account.entries:
        least = _least_share(entry.name)
        if entry.is_rest:
            found = _rest_outside(evidence, entry, account.whole_s)
        elif entry.total_s >= least * account.whole_s and entry.name not in evidence.waits:
            found = _region_outside(evidence, entry, account.training_s, account.whole_s)
        else:
            found = None
        if found is not None and said < 2:
            said += 1
            yield found


def _least_share(name: str) -> float:
    if is_validation(name):
        return at_least.VALIDATION_SHARE
    does_not_train = any(word in name.lower() for word in _OVERHEADS)
    return at_least.OVERHEAD_SHARE if does_not_train else at_least.OUTSIDE_SHARE


def _rarer(evidence: Evidence, entry: Entry, training_s: float) -> str:
    # How many steps must lie between two, for them to take a small share of the time with the training.
    step = evidence.step_node
    if step is None or entry.times < at_least.PERIOD_TIMES or not training_s:
        return ""
    aim = at_least.VALIDATION_AIM if is_validation(entry.name) else at_least.OVERHEAD_AIM
    every = entry.total_s / entry.times * (1 - aim) / (aim * training_s / step.count)
    digits = max(len(str(int(every))) - 2, 0)
    return f"; every {int(round(every, -digits))} steps it would take {percent(aim)}"


def _region_outside(evidence: Evidence, entry: Entry, training_s: float, whole_s: float) -> Finding:
    times = "once" if entry.times == 1 else f"{entry.times} times, {took(entry.total_s / max(entry.times, 1))} each"
    return Finding(
        "outside-steps",
        f"{name_of(entry.name)} takes {percent(entry.total_s / whole_s)} of {evidence.whole}, {took(entry.total_s)}, "
        f"{times}",
        where=_steps_of(evidence, entry.nodes[0]),
        why=f"training takes {percent(training_s / whole_s)}{_rarer(evidence, entry, training_s)}",
        cost_s=entry.total_s,
        anchor="tree",
        region=entry.nodes[0].path,
        rank=evidence.rank,
    )


def _steps_of(evidence: Evidence, node: Node) -> str:
    series = evidence.series(node.path)
    if series is None or evidence.steps is None:
        return ""
    return period_of(sorted({*series.numbers.tolist()}), int(evidence.steps.numbers.max()))


def _rest_outside(evidence: Evidence, entry: Entry, whole_s: float) -> Finding | None:
    if not entry.nodes:
        if entry.total_s < at_least.NO_REGION_SHARE * whole_s:
            return None
        return Finding(
            "outside-steps",
            f"{percent(entry.total_s / whole_s)} of the run lies outside every region, {took(entry.total_s)}",
            why=evidence.lines_in(""),
            cost_s=entry.total_s,
            anchor="tree",
            rank=evidence.rank,
        )
    step = evidence.step_node
    if step is None or entry.nodes[0].path != step.parent or entry.total_s < at_least.GAP_SHARE * whole_s:
        return None
    return _gaps(evidence, entry.nodes[0], whole_s)


def _gaps(evidence: Evidence, around: Node, whole_s: float) -> Finding | None:
    # Long pauses between two BATCHes, in no region: a callback, a checkpoint, logging. Short ones after each step are
    # told by the rule unnamed.
    run, step = evidence.run, evidence.step_node
    if run is None or step is None:
        return None
    only = "" if evidence.session is None else f"and session = {evidence.session} "
    depth = len(step.path) - 1
    rows = run.sql(
        "select session, step, path, start_ns, start_ns + dur_ns as end_ns from intervals "
        f"where rank = {evidence.rank} and device = 'CPU' and thread = 0 and depth = {depth} "
        f"and substr(path, 1, {len(path_text(around.path)) + 1}) = {literal(path_text(around.path) + '/')} {only}"
        "order by session, start_ns"
    ).rows()
    outer = run.sql(
        f"select session, start_ns, start_ns + dur_ns as end_ns from intervals where rank = {evidence.rank} and "
        f"device = 'CPU' and path = {literal(path_text(around.path))} {only}order by session, start_ns"
    ).rows()
    # The end of an epoch counts for its last step, and its beginning with it.
    bounds = np.array([(row["session"], row["start_ns"], row["end_ns"]) for row in outer]).reshape(-1, 3)
    within = [
        int(np.searchsorted(bounds[bounds[:, 0] == row["session"], 1], row["start_ns"], "right"))
        + int((bounds[:, 0] < row["session"]).sum())
        - 1
        for row in rows
    ]
    gaps, after, spans = [], [], []
    for place, (one, around_one) in enumerate(zip(rows, within, strict=True)):
        following = rows[place + 1] if place + 1 < len(rows) else None
        if following is not None and within[place + 1] == around_one:
            gap = following["start_ns"] - one["end_ns"]
            spans.append((one["session"], one["end_ns"], following["start_ns"]))
        else:
            gap = max(int(bounds[around_one, 2]) - one["end_ns"], 0)
            spans.append((one["session"], one["end_ns"], int(bounds[around_one, 2])))
            if following is not None and following["session"] == one["session"]:
                gap += following["start_ns"] - int(bounds[within[place + 1], 1])
        gaps.append(gap / 1e9)
        after.append(one["step"])
    if len(gaps) < at_least.LEAST_STEPS:
        return None
    lengths = np.array(gaps)
    least_s = max(_AROUND * float(np.median(lengths)), 0.25 * (step.median_s or 0.0))
    long = np.flatnonzero(lengths > least_s)
    total_s = float(lengths[long].sum())
    if len(long) < 2 or len(long) > 0.25 * len(lengths) or total_s < at_least.GAP_SHARE * whole_s:
        return None
    numbers = sorted({int(after[place]) for place in long.tolist() if after[place] is not None})
    last = int(evidence.steps.numbers.max()) if evidence.steps is not None else 0
    named = ", ".join(map(str, numbers[:3])) + (f" and {len(numbers) - 3} more" if len(numbers) > 3 else "")
    return Finding(
        "outside-steps",
        f"{len(long)} pauses between the steps take {percent(total_s / whole_s)} of the run, "
        f"{took(total_s / len(long))} each, in no region: after {'step' if len(numbers) == 1 else 'steps'} {named}",
        where=period_of(numbers, last),
        why=evidence.lines_between(spans[place] for place in long.tolist()),
        command=evidence.command("why", int(numbers[0]) + 1) if numbers else "",
        cost_s=total_s,
        anchor="over-the-run",
        region=around.path,
        steps=tuple(numbers[:20]),
        rank=evidence.rank,
    )
