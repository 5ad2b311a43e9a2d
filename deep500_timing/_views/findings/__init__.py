"""Findings: facts about a run in sentences, with their numbers, the most costly first.

``find(run)`` gives the findings; the first is the diagnosis. ``docs/findings.md`` has the rules and their thresholds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH, IO
from deep500_timing._base.settings import setting
from deep500_timing._base.warn import warn_once
from deep500_timing._views.findings import _data, _devices, _ranks, _steps, _whole
from deep500_timing._views.findings._account import CALM, START_UP, account_of, start_note, summary_of, verdict
from deep500_timing._views.findings._evidence import FIRST_STEP, Evidence, evidence_of
from deep500_timing._views.findings._finding import Finding, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from deep500_timing._summary.tree import Tree
    from deep500_timing.runs import Run

__all__ = [
    "CALM",
    "FIRST_STEP",
    "RULES",
    "Evidence",
    "Finding",
    "account_of",
    "evidence_of",
    "find",
    "start_note",
    "summary_of",
    "verdict",
]

ENVIRONMENT = "DEEP500_TIMING_FINDINGS"
MOST = 5
"""Findings that are shown."""
LEAST_SHARE = 0.01
"""The share of the time after the start-up that a finding must cost. A device that is throttled is told at any cost."""
SHORT_S = 60.0
"""A shorter run is a trial."""
_LOAD_FASTER = "more workers (num_workers), prefetch, pin_memory"
_LATER = "longer epochs, or do it in the background"
_FEWER_LAUNCHES = "larger batches, CUDA graphs, torch.compile"
_OVERLAP = "overlap it with the backward pass, larger buckets, fewer bytes"
_NO_WAITS = "look for .item(), .cpu(), print of a tensor"
_NO_TENSORS = "keep numbers, not tensors: loss.item(), .detach()"
_CACHE = "cache compilation; leave the first steps out of comparisons"
_FEW_SHAPES = "pad inputs to few shapes; in torch, mark_dynamic or dynamic=True"
_CHECKPOINTS = "save checkpoints at the interval that the command names; start faster"
_RULES = (
    Rule("lost", _whole.lost, 0, 1, "not-measured", "the end of the report says what is missing", needs=""),
    Rule("late-rank", _ranks.late_rank, _ranks.LATE_SHARE, 16, "stragglers", needs="run"),
    Rule("waits-for-data", _data.waits_for_data, 0.10, 20, "tree", _LOAD_FASTER, needs="", on_cpu=True),
    Rule("between-epochs", _data.between_epochs, 0.05, 3, "over-the-run", _LATER, needs="run", on_cpu=True),
    Rule("waits-for-ranks", _ranks.waits_for_ranks, 0.20, 20, "communication"),
    Rule("exposed-communication", _ranks.exposed_communication, 0.10, 20, "communication", _OVERLAP),
    Rule("launch-bound", _devices.launch_bound, 0.20, 20, "tree", _FEWER_LAUNCHES, needs="", on_cpu=True),
    Rule("cpu-waits-for-gpu", _devices.cpu_waits_for_gpu, 0.10, 20, "tree", _NO_WAITS, on_cpu=True),
    Rule("copies", _devices.copies, 0.10, 20, "tree", "pin_memory=True and non_blocking=True"),
    Rule("throttled", _devices.throttled, 0.05, 20, "devices", "cooling, power limit", needs="run"),
    Rule("memory-grows", _devices.memory_grows, 0.05, 20, "memory", _NO_TENSORS, needs="run"),
    Rule("spikes", _steps.spikes, 0.01, 20, "over-the-run", needs="run"),
    Rule("level-shift", _steps.level_shift, 0.15, 60, "over-the-run", needs="run"),
    Rule("drift", _steps.drift, 0.05, 60, "over-the-run", "look for lists that grow", needs="run"),
    Rule("warm-up", _steps.warm_up, 0.10, 10, "over-the-run", _CACHE, needs=""),
    Rule("recompilation", _steps.recompilation, 0.02, 3, "tree", _FEW_SHAPES, needs="run"),
    Rule("goodput", _whole.low_goodput, 0.10, 2, "goodput", _CHECKPOINTS, needs="run"),
    Rule("outside-steps", _whole.outside_steps, 0.10, 10, "tree", "do it less often, or in the background"),
    Rule("dominant-region", _whole.dominant_region, 0.40, 20, "tree", _whole.PARTS, on_cpu=True),
    Rule("unnamed", _whole.unnamed, _whole.UNNAMED, 20, "tree", _whole.PARTS, needs="", on_cpu=True),
)
RULES = {rule.name: rule for rule in _RULES}
"""Every rule, by its name. Of equal costs, the earlier one comes first."""


def find(
    source: Run | Tree | Evidence, *, rank: int | None = None, session: int | None = None, off: Iterable[str] = ()
) -> list[Finding]:
    """What stands out, the most costly first; lost data come before all.

    A rule that fails is left out: ``Evidence.failed`` has its error.

    Args:
        source: A run, or a tree alone, for which only some rules can speak; or the evidence of either.
        rank: Take the tree of this rank; the lowest rank if None. Rules about steps and ranks look at all ranks.
        session: Of this session only; all if None.
        off: Names of rules to leave out, in addition to ``DEEP500_TIMING_FINDINGS`` (``-spikes,-drift``).

    Raises:
        ValueError: No rule has such a name.
    """
    silent = set(off)
    unknown = sorted(silent - RULES.keys())
    if unknown:
        raise ValueError(f"Switching off the finding {unknown[0]!r}: there are {', '.join(RULES)}.")
    silent |= _off_by_environment()
    evidence = source if isinstance(source, Evidence) else evidence_of(source, rank, session)
    found: dict[str, list[Finding]] = {}
    for name, rule in RULES.items():
        if name not in silent and _can_judge(rule, evidence):
            try:
                found[name] = list(rule.judge(rule, evidence))
            except Exception as error:
                # One rule's fault must not cost the table.
                evidence.failed[name] = f"{type(error).__name__}: {error}"
                warn_once(f"The rule {name!r} of the findings failed: {evidence.failed[name]}. It is left out.")
    least_s = LEAST_SHARE * (evidence.whole_s - evidence.start_up_s)
    kept = [_with_gain(finding, evidence) for finding in _each_once(found)]
    kept = [one for one in kept if one.cost_s is None or one.cost_s >= least_s or one.rule == "throttled"]

    def weight(finding: Finding) -> float:
        # The warm-up of a short run is weighted as in a run of a minute, where the others cost more.
        is_start = finding.remedy == RULES["warm-up"].remedy
        return (finding.cost_s or 0.0) * (min(evidence.whole_s / SHORT_S, 1.0) if is_start else 1.0)

    # Sorting keeps the order of the table. Growing memory and throttling may have no cost in time; they come after the
    # most costly finding.
    kept.sort(key=lambda one: (not one.is_first, -weight(one)))
    timed = [finding for finding in kept if finding.is_first or finding.cost_s is not None]
    untimed = [finding for finding in kept if finding not in timed]
    lost = sum(finding.is_first for finding in timed)
    return [*timed[: lost + 1], *untimed, *timed[lost + 1 :]][:MOST]


def _can_judge(rule: Rule, evidence: Evidence) -> bool:
    if rule.needs == "steps":
        return evidence.step_node is not None and evidence.step_node.count >= rule.least
    return evidence.run is not None or not rule.needs


def _with_gain(finding: Finding, evidence: Evidence) -> Finding:
    gain_s, whole_s = finding.cost_s, evidence.whole_s
    if finding.cause != START_UP and finding.rule in ("between-epochs", "outside-steps"):
        # Their shares are of the time after the start-up.
        whole_s, _ = evidence.after_start(whole_s)
    if gain_s is None or whole_s <= 0:
        return finding
    if RULES[finding.rule].on_cpu and BATCH in finding.region and evidence.idle_s is not None:
        # While the device is busy, less work of the CPU saves nothing.
        gain_s = min(gain_s, evidence.idle_s)
    gain_s = min(max(gain_s, 0.0), whole_s)
    return replace(finding, gain_s=gain_s, gain_share=gain_s / whole_s)


def _each_once(found: dict[str, list[Finding]]) -> Iterator[Finding]:
    # Seconds are counted once, by the rule that knows most.
    def of(rule: str) -> list[Finding]:
        return found.get(rule, [])

    stalls = {step for finding in of("waits-for-data") for step in finding.steps}
    in_spikes = {finding.cause: finding.cost_s or 0.0 for finding in of("spikes")}
    pauses = [finding for finding in of("outside-steps") if not finding.cause]
    paused_s = max((finding.cost_s or 0.0 for finding in pauses), default=0.0)
    paused = {finding.region for finding in pauses if finding.anchor == "over-the-run"}
    between = next(iter(of("between-epochs")), None)
    if between is not None and (
        (between.cause == IO and stalls) or (not between.cause and (between.cost_s or 0.0) < 0.5 * paused_s)
    ):
        between = None

    def is_told(finding: Finding) -> bool:
        rule, cause, cost_s = finding.rule, finding.cause, finding.cost_s or 0.0
        is_outside = BATCH not in finding.region
        if between is not None and (between.cost_s or 0.0) >= 0.5 * cost_s and _lies_between(finding, between):
            return True
        if rule == "between-epochs":
            return finding is not between
        if rule == "spikes":
            is_compiled = cause in ("compile", "the rest of compile") and bool(of("recompilation"))
            return is_compiled or (cause in ("", IO) and bool(stalls) and stalls >= {*finding.steps})
        if rule == "outside-steps":
            return (cause == "compile" and bool(of("recompilation"))) or (cause == START_UP and bool(of("goodput")))
        if rule == "unnamed":
            return finding.region in paused and is_outside
        return rule == "dominant-region" and cost_s <= 1.25 * in_spikes.get(cause, 0.0)

    return (finding for findings in found.values() for finding in findings if not is_told(finding))


def _lies_between(finding: Finding, between: Finding) -> bool:
    # Spikes in the first steps of epochs, time in no region, and the region that fills the time between epochs.
    if finding.rule == "spikes":
        return bool(finding.steps) and set(finding.steps) <= set(between.steps)
    if finding.rule == "unnamed":
        return between.cause == "" and BATCH not in finding.region
    return finding.rule == "outside-steps" and finding.cause == between.cause


def _off_by_environment() -> set[str]:
    named = {word.strip() for word in setting("findings").split(",") if word.strip()}
    known = {word.removeprefix("-") for word in named if word.startswith("-")} & RULES.keys()
    for word in sorted(named):
        if word.removeprefix("-") not in known:
            warn_once(
                f"{ENVIRONMENT} names {word!r}, which switches off nothing: write -RULE, with one of "
                f"{', '.join(RULES)}.",
                key=f"{ENVIRONMENT} {word}",
            )
    return known
