"""Findings: facts about a run in sentences, with their numbers, the most costly first.

``find(run)`` gives the findings; the first is the diagnosis. ``docs/findings.md`` has the rules and their thresholds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH
from deep500_timing._base.settings import setting
from deep500_timing._base.warn import warn_once
from deep500_timing._views.findings import _data, _devices, _machine, _ranks, _steps, _whole
from deep500_timing._views.findings._account import AFTER, START_UP, account_of, notes_of, summary_of, verdict
from deep500_timing._views.findings._evidence import Evidence, evidence_of
from deep500_timing._views.findings._finding import START, Finding, Rule
from deep500_timing._views.findings._machine import cause_of_waiting, disturbance, why_late

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Tree
    from deep500_timing.runs import Run

__all__ = [
    "AFTER",
    "RULES",
    "START_UP",
    "Evidence",
    "Finding",
    "account_of",
    "disturbance",
    "evidence_of",
    "find",
    "notes_of",
    "summary_of",
    "verdict",
    "why_late",
]

ENVIRONMENT = "DEEP500_TIMING_FINDINGS"
MOST = 5
"""Findings that are shown."""
LEAST_SHARE = 0.01
"""The share of the training loop that a finding must cost."""
SHORT_S = 60.0
"""A shorter run is a trial."""
_RULES = (*_machine.RULES, *_ranks.RULES, *_data.RULES, *_devices.RULES, *_steps.RULES, *_whole.RULES)
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
    least_s = LEAST_SHARE * evidence.loop_of(evidence.whole_s)[0]
    kept = [
        one
        for of_rule in found.values()
        for one in of_rule
        if (one.cost_s is None or one.cost_s >= least_s or one.rule == "throttled")
        # Seconds are counted once, by the rule that knows most. It may itself yield to a third one, which tells both.
        and not any(holds(one, o) for rule, holds in RULES[one.rule].yields_to.items() for o in found.get(rule, ()))
    ]
    kept = [_with_gain(_without_waiting(one, evidence), evidence) for one in _each_line_once(kept)]

    def weight(finding: Finding) -> float:
        # The start and the end of a short run are weighted as in a run of a minute, where the others cost more.
        share = min(evidence.whole_s / SHORT_S, 1.0) if finding.kind in (START, START_UP, AFTER) else 1.0
        return (finding.cost_s or 0.0) * share

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


def _each_line_once(findings: list[Finding]) -> list[Finding]:
    # One line of the program in several regions is one cause: it costs what all of them do, and stands at the largest.
    by_line: dict[str, list[Finding]] = {}
    for one in findings:
        by_line.setdefault(one.place or f" {len(by_line)}", []).append(one)
    return [
        replace(max(same, key=lambda one: one.cost_s or 0.0), cost_s=sum(one.cost_s or 0.0 for one in same))
        if len(same) > 1
        else same[0]
        for same in by_line.values()
    ]


def _without_waiting(finding: Finding, evidence: Evidence) -> Finding:
    # A region's share of the seconds in which the thread waited for a processor is the machine's, not the region's.
    whole = evidence.processor
    if not RULES[finding.rule].on_cpu or finding.cost_s is None or whole is None or not cause_of_waiting(evidence):
        return finding
    return replace(finding, cost_s=finding.cost_s * (1 - whole.waited))


def _with_gain(finding: Finding, evidence: Evidence) -> Finding:
    gain_s, whole_s = finding.cost_s, evidence.whole_s
    if finding.kind in (START_UP, AFTER):
        return finding  # A program must start, and end.
    if not RULES[finding.rule].of_run:
        # A longer run has no longer start.
        whole_s, _ = evidence.loop_of(whole_s)
    if gain_s is None or whole_s <= 0:
        return finding
    if RULES[finding.rule].on_cpu and BATCH in finding.region and evidence.idle_s is not None:
        # While the device is busy, less work of the CPU saves nothing; a region less saves its work there as well.
        of = evidence.tree.at(finding.region) if finding.rule == "dominant-region" else None
        gain_s = min(gain_s, evidence.idle_s + (of.gpu.total_s if of is not None and of.gpu is not None else 0.0))
    gain_s = min(max(gain_s, 0.0), whole_s)
    return replace(finding, gain_s=gain_s, gain_share=gain_s / whole_s)


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
