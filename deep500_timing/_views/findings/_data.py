"""waits-for-data, between-epochs: the loop waits for its input, or stands still where an epoch begins.

The workers of a data loader say why they do not keep up, by the times that they take themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import BATCH, CPU, EPOCH, IO
from deep500_timing._views.findings._account import is_overhead, is_validation
from deep500_timing._views.findings._evidence import Evidence, evidence_of, is_at
from deep500_timing._views.findings._finding import MOST_STEPS, Finding, Rule, named, percent, took
from deep500_timing._views.findings._remedies import remedy_of
from deep500_timing._views.findings._series import shared_by

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._finding import Yields

_WAIT_S = 1e-3
"""Shorter waits a step are no finding."""
_CONCENTRATED = 0.3
"""Share of the waiting that a few steps must hold to be told apart."""
_APART = 2.0
"""The factor between the shortest of them and the longest of the others."""
_FEW = 0.1
"""Share of the steps that are a few."""
_SKEWED = 1.3
"""Times the median from which on a mean needs the median with it."""
_UNEVEN = 1.25
_ALONE = 0.9
"""Share of the time between two epochs from which on samples there are of no region."""
_WORKERS = "keep a DataLoader's workers (persistent_workers=True), fill a smaller shuffle buffer"
RARER = "do it less often, or in the background"
_OF_ONE_CORE = "make a sample cheaper, or make it once: the process may use one core"
_MANY = 100_000
"""Intervals of a region from which on it is not looked for between epochs."""
_BUSY, _IDLE = 0.75, 0.5
"""A worker is busy if it works for this share of the steps, and idle if it works for less than the other."""
_LEAST_BATCHES = 20
"""Batches of a loader that are judged by."""
_MOST_WORKERS = 64
"""More workers than that are no remedy."""


def keep_workers(evidence: Evidence) -> str:
    """What helps where an epoch begins, by the loader that the program has."""
    if has_workers(evidence):
        return "keep the workers (persistent_workers=True)"
    return remedy_of(evidence, "EPOCH (start)", _WORKERS)


def waiting_node(evidence: Evidence) -> Node | None:
    """IO inside BATCH or next to it on its thread: the waits of a validation do not count."""
    step = evidence.step_node
    for node in evidence.tree.named(IO):
        is_next = step is not None and step.parent == node.parent
        if BATCH in node.path[:-1] or (is_next and evidence.apart_of(node.path)[1] < node.count):
            return node
    return None


def waits_for_data(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """IO takes a large part of its parent in the steady state, on the rank on which it takes most."""
    node = waiting_node(evidence)
    if node is None:
        return
    shares: dict[int, float] = {}
    if len(evidence.ranks) > 1:
        rows = evidence.rows(
            f"select rank, cast(sum(case when {is_at(node.path)} then dur_ns end) as double) "
            f"/ nullif(sum(case when {is_at(node.parent)} then dur_ns end), 0) as share from intervals "
            f"where device = '{CPU}' {evidence.only}and {is_at(node.path, node.parent)} group by rank order by rank"
        )
        shares = {row["rank"]: row["share"] for row in rows if row["share"]}
    worst = max(shares, key=lambda rank: (shares[rank], -rank), default=None)
    if worst is not None and evidence.run is not None and shares[worst] > _UNEVEN * shares.get(evidence.rank or 0, 0.0):
        evidence = evidence_of(evidence.run, worst, evidence.session)
        node = waiting_node(evidence)
    found = _judge(rule, evidence, node, shares) if node is not None else None
    if found is not None:
        yield found


def _judge(rule: Rule, evidence: Evidence, node: Node, shares: dict[int, float]) -> Finding | None:
    step, above = evidence.step_node, evidence.tree.parent_of(node)
    if node.count < rule.least or node.total_s is None or node.median_s is None or step is None:
        return None
    first_s = node.first_s or 0.0
    steady_s = node.total_s - first_s
    each_s, median_s = steady_s / (node.count - 1), node.median_s
    of_step = ""
    if above is None:
        inside = f"{IO} and {BATCH}"
        whole_s = steady_s + (step.total_s or 0.0) - (step.first_s or 0.0)
    else:
        inside, is_each = named(above.name), above.count == node.count
        whole_s = (above.total_s or 0.0) - ((above.first_s or 0.0) if is_each else first_s)
        if above.name == BATCH:
            of_step = f" of {took(whole_s / max(above.count - 1, 1) if is_each else above.mean_s)}"
            if node.count > above.count:
                # A step may wait several times: for each micro-batch, or for batches that it leaves out.
                each_s *= node.count / above.count
                series = evidence.series(node.path)
                median_s = float(np.median(series.durations_s)) if series is not None else each_s
    if whole_s <= 0 or steady_s < rule.share * whole_s or each_s < _WAIT_S:
        return None
    where, on = "", ""
    if shares and shares.get(evidence.rank or 0, 0.0) > _UNEVEN * float(np.median([*shares.values()])):
        others = [share for rank, share in shares.items() if rank != evidence.rank]
        which = "other" if len(others) == 1 else "median of the others"
        where, on = f"{percent(float(np.median(others)))} on the {which}", f" on rank {evidence.rank}"
    elif shares:
        where = f"on {sum(share >= rule.share for share in shares.values())} of {len(evidence.ranks)} ranks"
    few, cost_s = _few_long_waits(evidence, node, steady_s, each_s), steady_s
    remedy = remedy_of(evidence, rule.name, rule.remedy)
    if few is not None:
        fact, why, steps = few
        where, remedy = "", keep_workers(evidence) if why else remedy
        cost_s = node.total_s if why else steady_s  # the first epoch begins with a wait as well
    else:
        usual = f", {took(median_s)} in the median" if each_s > _SKEWED * median_s else ""
        fact, why, steps = f"the loop waits for data, {took(each_s)}{of_step} a step{usual}", "", ()
        lines = evidence.lines_in(node.path, table="maker_stacks")
        if not lines and "tensorflow" not in (*evidence.kinds, evidence.fit and evidence.fit["backend"]):
            lines = evidence.lines_in(node.path)  # In TensorFlow, the main thread waits in C.
        if not lines and evidence.fit is not None and evidence.fit["data"] == "generator":
            lines = "a Python generator makes one batch after the other"
        why, remedy, left_s = _why_of_workers(evidence, node, step) or (lines, remedy, 0.0)
        cost_s = max(cost_s - left_s, 0.0)
    return rule.found(
        evidence,
        f"{IO} is {percent(steady_s / whole_s)} of {inside}{on}: {fact}",
        where=where,
        why=why,
        cost_s=cost_s,
        region=node.path,
        steps=steps,
        command=evidence.command("why", steps[0]) if steps and not why else "",
        remedy=remedy,
    )


def _few_long_waits(
    evidence: Evidence, node: Node, steady_s: float, each_s: float
) -> tuple[str, str, tuple[int, ...]] | None:
    # A stall has another remedy than a slow pipeline: a mean per step would hide it.
    waits = evidence.series(node.path)
    if waits is None:
        median_s = node.median_s or 0.0
        if (node.count - 1) * median_s > 0.5 * steady_s:
            return None
        return f"the loop waits {took(each_s)} a step on average, {took(median_s)} in the median", "", ()
    slow = _long_ones(waits.durations_s, sum(node.count for node in evidence.tree.named(EPOCH)))
    if slow is None:
        return None
    others = np.delete(waits.durations_s, slow)
    first, last = (took(float(value)) for value in np.quantile(waits.durations_s[slow], (0.1, 0.9)))
    long = first if first == last else f"{first} to {last}"
    shared = shared_by(evidence, waits, slow)
    which = f"{len(slow)} of {len(waits.durations_s)} steps{f', {shared.text},' if shared.text else ''}"
    why = f"as when workers start{_each_start(evidence)}" if shared.begins_epoch else ""
    fact = f"{which} wait {long} for data, the others {took(float(np.median(others)))}"
    return fact, why, tuple(waits.slowest(slow)[:MOST_STEPS])


def _long_ones(waits: Any, epochs: int) -> Any:
    # The places of the few waits that hold most of the waiting; None if no few do.
    # The first of each epoch are few from three steps an epoch on.
    ordered, few = np.sort(waits)[::-1], max(int(_FEW * len(waits)), 2, min(epochs, len(waits) // 3))
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


def between_epochs(rule: Rule, evidence: Evidence) -> Iterator[Finding]:
    """No step runs for long between two epochs: workers that start, a buffer that fills, code in no region.

    Validations and checkpoints are left out: outside-steps judges them.
    """
    step = evidence.step_node
    if step is None or not step.parent:
        return
    others = [
        node
        for depth in range(len(step.path))
        for node in evidence.tree.inside(step.path[:depth])
        if node.path != step.path[: depth + 1] and not node.is_rest and node.count <= _MANY
    ]
    spans = evidence.spans(step.parent, step.path, *(node.path for node in others))
    if not len(spans[step.path]):
        return
    # Each session has its clock: the last one is judged.
    session = spans[step.path][-1, 0]
    spans = {path: of[of[:, 0] == session] for path, of in spans.items()}
    steps = spans[step.path]
    epoch = np.searchsorted(spans[step.parent][:, 2], steps[:, 2], "right")
    at_end = epoch[1:] != epoch[:-1]
    last = np.flatnonzero(at_end)
    if len(last) + 1 < rule.least or at_end.all():
        return
    ends, starts = steps[last, 3], steps[last + 1, 2]
    rest = (starts - ends - np.median((steps[1:, 2] - steps[:-1, 3])[~at_end])) / 1e9
    parts: dict[str, Any] = {}
    for node in others:
        own = spans[node.path]
        sums = np.concatenate(([0], np.cumsum(own[:, 3] - own[:, 2])))
        low, high = (np.searchsorted(own[:, 2], times) for times in (ends, starts))
        spent_s = (sums[high] - sums[low]) / 1e9
        rest = rest - spent_s
        if not (is_validation(node.name) or is_overhead(node.name)):
            parts[node.name] = parts.get(node.name, 0.0) + spent_s
    waiting = waiting_node(evidence)
    waits = evidence.series(waiting.path) if waiting is not None and BATCH in waiting.path[:-1] else None
    if waits is not None:
        excess_s = dict(zip(waits.numbers.tolist(), waits.durations_s - np.median(waits.durations_s), strict=True))
        first = np.array([excess_s.get(number, 0.0) for number in steps[last + 1, 1].tolist()])
        parts[IO] = parts.get(IO, 0.0) + np.maximum(first, 0.0)
    parts[""] = np.maximum(rest, 0.0)
    # The median, of two the shorter: what happens once is a start, or a pause.
    lengths = np.sort(sum(parts.values()))
    each_s = float(lengths[(len(lengths) - 1) // 2])
    total_s = each_s * len(last)
    whole_s, of = evidence.loop_of(evidence.whole_s)
    if total_s < rule.share * whole_s or each_s < 0.25 * (step.median_s or 0.0):
        return
    medians = {part: float(np.median(spent_s)) for part, spent_s in parts.items()}
    name = max(medians, key=lambda part: (medians[part], part))
    why, remedy = f"most of it in {named(name)}", rule.remedy
    if name in (IO, "EPOCH (start)"):
        start = _each_start(evidence)
        why, remedy = why + (f", where workers start{start}" if start else ""), keep_workers(evidence)
    elif not name:
        pauses = [*zip(steps[last, 0], ends, starts, strict=True)]
        stops = has_workers(evidence) and evidence.stops_workers(pauses)
        is_alone = medians[""] > _ALONE * float(np.median(starts - ends)) / 1e9
        lines = evidence.lines_between(pauses) if is_alone else ""
        why = "most of it in no region" + (f": {lines}" if lines else "")
        remedy = keep_workers(evidence) if stops else RARER if lines else "time its parts as regions"
    yield rule.found(
        evidence,
        f"Training stands still for {took(each_s)} between two epochs, {percent(total_s / whole_s)} of {of}",
        why=why,
        cost_s=total_s,
        region=step.parent,
        steps=tuple(int(number) for number in steps[last + 1, 1][:MOST_STEPS] if number >= 0),
        cause=name,
        remedy=remedy,
    )


def rows_of_workers(evidence: Evidence) -> Sequence[dict[str, Any]]:
    """What each worker did, in us over all iterations of the loader that training takes most batches from.

    ``start`` is the median of one start, ``started`` the sum of all. Worker -1 stands for a loader without workers.
    """
    return evidence.rows(
        f"with last as (select * from loader_workers where rank = {evidence.rank} and is_training = 1 {evidence.only}"
        "qualify row_number() over (partition by session, loader, iteration, worker order by time_ns desc) = 1), "
        "chosen as (select loader from last group by loader order by sum(batches) desc, loader limit 1) "
        "select worker, sum(fetch_us) as fetch, sum(collate_us) as collate, sum(put_us) as put, "
        "sum(batches) as batches, sum(samples) as samples, sum(idle_us) as idle, median(start_us) as start, "
        "sum(start_us) as started, any_value(cpus) as cpus from last semi join chosen using (loader) "
        "group by worker order by worker",
        "loader_workers",
    )


def has_workers(evidence: Evidence) -> bool:
    """Whether workers load the data of the training."""
    return any(row["worker"] >= 0 for row in rows_of_workers(evidence))


def _each_start(evidence: Evidence) -> str:
    starts = [row["start"] for row in rows_of_workers(evidence) if row["worker"] >= 0]
    return f", which takes {took(float(np.median(starts)) / 1e6)}" if any(starts) else ""


def _why_of_workers(evidence: Evidence, io: Node, step: Node) -> tuple[str, str, float] | None:
    # Why the loop waits for data in most steps, the remedy, and the seconds that it leaves; None if the workers do not
    # say.
    rows = rows_of_workers(evidence)
    if not rows or step.total_s is None or io.total_s is None:
        return None
    own, cpus = [row for row in rows if row["worker"] >= 0], int(rows[0]["cpus"])
    work_s = step.total_s - (io.total_s if step.path == io.parent else 0.0)
    whole_s, between_s = work_s + io.total_s, work_s / io.count
    if not own:
        enough = _enough(io.total_s / io.count, between_s, 0, cpus)
        why = evidence.lines_in(io.path) or f"the loop loads the data itself (num_workers=0){enough}"
        return why, _OF_ONE_CORE if cpus == 1 else f"num_workers above 0 with persistent_workers=True{enough}", 0.0
    fetch, collate, put, idle_us, batches, samples = (
        np.array([float(row[name]) for row in own])
        for name in ("fetch", "collate", "put", "idle", "batches", "samples")
    )
    total, count = float(batches.sum()), len(own)
    if total < _LEAST_BATCHES:
        return None
    # Each is too low for a different reason: workers are idle while the loop validates, and start while it waits.
    worked_s = (fetch + collate + put) / 1e6
    busy = np.maximum(worked_s / whole_s, worked_s / np.maximum(worked_s + idle_us / 1e6, 1e-9))
    idle = int((busy < _IDLE).sum())
    if idle == count:
        workers = ("the worker is", "both workers are")[count - 1] if count < 3 else f"all {count} workers are"
        making = making_s(rows)
        if making < io.total_s / io.count:
            why = f"a worker makes a batch in {took(making)}, and handing it over takes longer"
            return why, "num_workers=0", making * io.count
        why = f"{workers} idle for {percent(1 - busy.mean())} of the time, so the main process is the limit"
        return why, "a faster sampler, smaller objects, pin_memory", 0.0
    slowest = int(busy.argmax())
    if idle and busy[slowest] >= _BUSY:
        each_s = worked_s / np.maximum(batches, 1)
        others = np.delete(each_s, slowest)[np.delete(batches, slowest) > 0]
        waiting = "is idle: it waits" if idle == 1 else "are idle: they wait"
        than = f", the others {took(float(np.median(others)))}" if len(others) else ""
        return (
            f"{idle} of {count} workers {waiting} for worker {slowest}, which takes {took(each_s[slowest])} a batch"
            f"{than}, as batches keep their order",
            "give each worker the same amount of work",
            0.0,
        )
    if busy.mean() < _BUSY:
        return None
    totals = {"fetch": fetch.sum(), "collate": collate.sum(), "put": put.sum()}
    part = max(totals, key=lambda name: totals[name])
    per, number = ("sample", samples.sum()) if part == "fetch" else ("batch", total)
    enough = _enough(float(worked_s.sum()) / total, between_s, count, cpus)
    return f"{part} takes {took(totals[part] / 1e6 / number)} a {per}{enough}", "more workers (num_workers)", 0.0


def making_s(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds in which a worker makes a batch, without handing it over; NaN without workers that did."""
    own = [row for row in rows if row["worker"] >= 0]
    batches = sum(float(row["batches"]) for row in own)
    return sum(float(row["fetch"] + row["collate"]) for row in own) / 1e6 / batches if batches else float("nan")


def _enough(work_s: float, between_s: float, count: int, cpus: int) -> str:
    # The workers that make a batch in the time that the loop takes for one.
    needed = ceil(work_s / between_s) if between_s > 0 else _MOST_WORKERS + 1
    if needed > _MOST_WORKERS:
        return f"; more than {_MOST_WORKERS} workers would be needed"
    if needed <= count:
        return ""
    there = f", {count} {'is' if count == 1 else 'are'} there" if count else ""
    cores = f", on {cpus} {'core' if cpus == 1 else 'cores'}" if 0 < cpus < needed else ""
    return f"; {needed} {'worker' if needed == 1 else 'workers'} would keep up{there}{cores}"


def _is_the_pause(own: Finding, outside: Finding) -> bool:
    is_the_region = own.cause in (outside.cause, *outside.region) and own.cause not in ("", "EPOCH (start)")
    return is_the_region or (not own.cause and not outside.cause and not own.is_half_of(outside))


_FASTER = "more workers (num_workers), prefetch, pin_memory"
_LONGER = "longer epochs, or do it in the background"
_WAITS_TO: dict[str, Yields] = {
    "between-epochs": lambda own, pause: bool(own.steps) and own.remedy == pause.remedy and pause.cause != IO,
}
_EPOCHS_TO: dict[str, Yields] = {
    "waits-for-data": lambda own, wait: own.cause == IO and bool(wait.steps),
    "outside-steps": _is_the_pause,
}
RULES = (
    Rule("waits-for-data", waits_for_data, 0.10, 20, "tree", _FASTER, "", on_cpu=True, yields_to=_WAITS_TO),
    Rule("between-epochs", between_epochs, 0.05, 3, "over-the-run", _LONGER, "run", on_cpu=True, yields_to=_EPOCHS_TO),
)
