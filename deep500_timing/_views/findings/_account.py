"""The whole run: its parts, the sentence where no rule speaks, and a row of numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH, IO
from deep500_timing._views.findings._evidence import WAIT
from deep500_timing._views.findings._finding import joined, named, percent, took
from deep500_timing._views.findings._ranks import communication_of
from deep500_timing._views.findings._steps import warm_up_of

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node
    from deep500_timing._views.findings._evidence import Evidence, StepSeries

CALM_SHARE = 0.70
"""The share of the time that regions must cover for a verdict that nothing stands out."""
OURS = "deep500-timing (start)"
START_UP, AFTER, NO_REGION = "start-up", "after training", "no region"
"""Parts of a run: the time before the first step, that after the last step, and other time in no region."""
LEAST_STEPS = 20
_EVEN = 0.5
"""Steps are even if their 95th percentile is at most this much over the median."""
_NAMED = 4
_VALIDATIONS = ("valid", "eval", "test")
_OVERHEADS = ("checkpoint", "save", "log", "compile")
_LEAST_SHARE = 0.01
_LONG_START = 0.1
_PART, _PARTS = 0.1, 4
"""The share of a start-up from which on a part of it is named, and the most parts."""
_MOST = 5
_NOTHING_S = 1e-9
_SAMPLES = "throughput.samples_per_s"
_PAUSE = 4.0
"""Times the median from which on the time between two steps is a pause, and no part of the speed."""


class Entry(NamedTuple):
    """A region outside the steps, or time that no region there covers."""

    name: str
    total_s: float
    times: int = 0
    nodes: tuple[Node, ...] = ()
    """The places of the region; for time in no region the region around it."""
    is_rest: bool = False
    """Whether it is time in no region."""


class Account(NamedTuple):
    """The parts of a run on the thread of its steps; together they are the run."""

    whole_s: float
    training_s: float
    """The steps, and the waits for data between them."""
    entries: tuple[Entry, ...]
    """The others, by falling time."""

    def text(self, warm_up_s: float = 0.0) -> str:
        """As ``"training 71 %, VALIDATION 18 %, warm-up 5 %"``; parts below 1 % are left out."""
        if not self.whole_s:
            return ""
        parts = [("training", self.training_s - warm_up_s)] if self.training_s else []
        parts += [(entry.name if entry.is_rest else named(entry.name), entry.total_s) for entry in self.entries]
        parts += [("warm-up", warm_up_s)] if warm_up_s else []
        shown = [(name, seconds) for name, seconds in parts if seconds >= _LEAST_SHARE * self.whole_s]
        return ", ".join(f"{name} {percent(seconds / self.whole_s)}" for name, seconds in shown[:_MOST])


class Verdict(NamedTuple):
    """The sentence on a run without findings."""

    text: str = ""
    """One sentence; may be empty."""
    is_calm: bool = False
    """Whether regions cover enough of the time for it to say that nothing stands out."""


_CUT = """select 1 from intervals where {}group by session, thread, split_part(path, '/', 1) having
max(case when depth > 0 then start_ns end) > coalesce(max(case when depth = 0 then start_ns + dur_ns end), -1)"""
"""Regions that had none around them at the end of the program: it was stopped inside of that one."""


def account_of(evidence: Evidence) -> Account:
    """Divide a run into start-up, training and the rest."""
    tree, apart_of = evidence.tree, evidence.apart_of
    steps = [node for node in tree.walk() if node.name == BATCH and not any(map(is_validation, node.path))]
    around = {node.path[:depth] for node in steps for depth in range(len(node.path))}

    def seconds_of(node: Node) -> float:
        return (node.total_s or 0.0) - node.overlap_s - apart_of(node.path)[0]

    training_s = 0.0
    found: dict[tuple[str, bool], list[tuple[float, int, Node]]] = defaultdict(list)
    for node in tree.walk():
        if node.is_rest or (node.parent and node.parent not in around):
            continue
        if node.path in around:
            if node.rest_s is not None:
                inside_s = sum(apart_of(child.path)[0] for child in node.children if not child.is_rest)
                rest_s = node.rest_s - apart_of(node.path)[0] + inside_s
                found[f"{named(node.name)} outside its regions", True].append((rest_s, 0, node))
        elif steps and node.name in (BATCH, IO, WAIT):
            training_s += seconds_of(node)
        else:
            found[node.name, False].append((seconds_of(node), node.count - apart_of(node.path)[1], node))
    entries = []
    for (name, is_rest), parts in found.items():
        seconds, counts, nodes = zip(*parts, strict=True)
        entries.append(Entry(name, sum(seconds), sum(counts), nodes, is_rest))
    roots_s, start_up_s, after_s = sum(map(seconds_of, tree.roots)), evidence.start_up_s, evidence.after_s
    whole_s = max(evidence.whole_s, roots_s if len(tree.roots) == 1 else 0.0)
    entries += [Entry(START_UP, start_up_s), Entry(AFTER, after_s)]
    # Unknown where regions overlap, which may be more than the run, and where the program was stopped inside of one.
    rest_s = whole_s - start_up_s - after_s - roots_s
    is_known = not any(root.running or root.total_s is None for root in tree.roots)
    if is_known and (rest_s < _LEAST_SHARE * whole_s or not evidence.rows(_CUT.format(evidence.mine))):
        entries.append(Entry(NO_REGION, rest_s, is_rest=True))
    kept = [entry for entry in entries if entry.total_s > _NOTHING_S]
    return Account(whole_s, training_s, tuple(sorted(kept, key=lambda entry: (-entry.total_s, entry.name))))


def is_validation(name: str) -> bool:
    """Whether a region's name says that it validates."""
    return any(word in name.lower() for word in _VALIDATIONS)


def is_overhead(name: str) -> bool:
    """Whether a region's name says that it saves, logs or compiles."""
    return any(word in name.lower() for word in _OVERHEADS)


def verdict(evidence: Evidence) -> Verdict:
    """The sentence for a run without findings."""
    tree, step = evidence.tree, evidence.step_node
    longest = step.count if step is not None else max((node.count for node in tree.walk()), default=0)
    if evidence.run is None and longest < LEAST_STEPS:
        return Verdict()  # A table of a few intervals needs no excuse.
    if not tree.roots:
        return Verdict("Nothing is recorded yet.")
    if step is None or not step.total_s:
        if sum(node.count for node in tree.named(BATCH)):
            return Verdict()
        text = account_of(evidence).text()
        of = f" Of {evidence.whole}: {text}." if text else ""
        return Verdict(f"No finding: most need steps, in regions named {BATCH}.{of}")
    if step.count < LEAST_STEPS:
        only = "one step" if step.count == 1 else f"{step.count} steps"
        return Verdict(f"No finding: the run has only {only}, and most findings need {LEAST_STEPS}.")
    account = account_of(evidence)
    parts, covered = _parts_of(step)
    over = step.p95_s / step.median_s - 1 if step.median_s and step.p95_s is not None else 0.0
    spread = f"95 % of the steps are within {percent(over)} of the median" if over >= 0.005 else ""
    if over > _EVEN:
        spread = "" if evidence.may_queue("") else f"one step in 20 takes {over + 1:.1f} × the median or more"
    named_s = account.training_s + sum(entry.total_s for entry in account.entries if not entry.is_rest)
    named_s -= (1 - covered) * step.total_s
    is_calm = covered >= CALM_SHARE and named_s >= CALM_SHARE * account.whole_s and over <= _EVEN
    warm_up = warm_up_of(evidence)
    whole = account.text(warm_up.cost_s if warm_up is not None else 0.0)
    training = ""
    if account.training_s < 0.9 * account.whole_s and whole:
        training = f"of {evidence.whole}, {whole}"
    elif account.whole_s:
        training = f"training is {percent(account.training_s / account.whole_s)} of {evidence.whole}"
    said = "; ".join(part for part in (training, parts, spread) if part)
    return Verdict(f"{'Nothing stands out' if is_calm else 'No finding'}: {said}.", is_calm)


def _parts_of(step: Node) -> tuple[str, float]:
    # What the step is divided into, and the share that is covered.
    inside = [child for child in step.children if child.share is not None and not child.is_rest]
    ours_s = {child.name: sum(one.total_s or 0.0 for one in child.children if one.name == OURS) for child in inside}
    whole_s = (step.total_s or 0.0) - sum(ours_s.values())
    shares = sorted((((child.total_s or 0.0) - ours_s[child.name]) / whole_s, child.name) for child in inside)[::-1]
    if not any(child.divides for child in inside):
        waits = f", but for {percent(shares[0][0])} of {named(shares[0][1])}" if shares else ""
        return f"{BATCH} is not divided into regions{waits}", 0.0
    sums = np.cumsum([share for share, _ in shares])
    covered = min(float(sums[-1]), 1.0)
    chosen = shares[: int(np.searchsorted(sums, CALM_SHARE)) + 1][:_NAMED]
    share = float(sums[len(chosen) - 1])
    if share < CALM_SHARE:
        largest = f"the largest {named(shares[0][1])} with {percent(shares[0][0])}"
        return f"{len(inside)} regions cover {percent(covered)} of {BATCH}, {largest}", covered
    verb = "is" if len(chosen) == 1 else "are"
    return f"{percent(share)} of {BATCH} {verb} {joined([named(name) for _, name in chosen])}", covered


def notes_of(evidence: Evidence, *, says_start: bool) -> list[tuple[str, str]]:
    """Lines on a start-up of a tenth of the run or more, and on how to divide BATCH of Keras where nothing does."""
    start_up_s, step, fit = evidence.start_up_s, evidence.step_node, evidence.fit
    notes: list[tuple[str, str]] = []
    if says_start and start_up_s and start_up_s >= _LONG_START * evidence.whole_s:
        said = f"{took(start_up_s)} before the first step, {percent(start_up_s / evidence.whole_s)} of the run"
        parts = start_up_parts(evidence)
        notes.append(("start-up", f"{said}: {parts}" if parts else said))
    if step and fit and fit["backend"] != "jax" and not any(child.divides for child in step.children):
        notes.append((BATCH, "nothing divides it; TimerCallback(timer, phases=True) tells FORWARD and BACKWARD apart"))
    return notes


def start_up_parts(evidence: Evidence) -> str:
    """As ``"4.02 s in index_files() (train.py:11), 3.01 s in import torch"``; empty if it was not sampled."""
    parts = [(name, part_s) for name, part_s in evidence.start_up if part_s >= _PART * evidence.start_up_s]
    return ", ".join(f"{took(part_s)} in {name}" for name, part_s in parts[:_PARTS])


def summary_of(evidence: Evidence) -> list[tuple[str, str]]:
    """Names and values; unknown values are left out."""
    found = []
    if evidence.steady is not None and (speed := steps_per_s(evidence.steady)) is not None:
        found.append(("steps a second, in the steady state", f"{speed:.3g}"))
    rates = [values for (_, metric, _), (_, values) in evidence.samples.items() if metric == _SAMPLES]
    if rates:
        found.append(("samples a second, all ranks", f"{sum(float(np.median(values)) for values in rates):.4g}"))
    mfu = [values for (_, metric, _), (_, values) in evidence.samples.items() if metric.lower().endswith("mfu")]
    if mfu:
        found.append(("MFU", percent(float(np.median(np.concatenate(mfu))))))
    account, step = account_of(evidence), evidence.step_node
    if account.whole_s and account.training_s:
        found.append(("of the run is training", percent(account.training_s / account.whole_s)))
    if step is not None and step.total_s:
        waits = [node for node in evidence.tree.named(IO) if BATCH in node.path[:-1] or node.parent == step.parent]
        if waits and account.training_s:
            waits_s = sum((node.total_s or 0.0) - evidence.apart_of(node.path)[0] for node in waits)
            found.append(("of training waits for data", percent(min(waits_s / account.training_s, 1.0))))
        communication = communication_of(evidence)
        if communication is not None:
            found.append((f"of {BATCH} communicates", percent(communication.transfer_s / step.total_s)))
            if communication.is_compared:
                found.append((f"of {BATCH} waits for other ranks", percent(communication.waits_s / step.total_s)))
    return found


def steps_per_s(steps: StepSeries) -> float | None:
    """The speed without pauses such as validations; None of fewer than two steps."""
    between = np.diff(steps.starts_s)
    between = between[(between > 0) & (np.diff(steps.sessions) == 0)]
    if not len(between):
        return None
    return float(1 / between[between <= _PAUSE * np.median(between)].mean())
