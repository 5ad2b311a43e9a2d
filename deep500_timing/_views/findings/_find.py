"""Asks every rule, and sorts the answers."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH, IO
from deep500_timing._base.settings import setting
from deep500_timing._base.warn import warn_once
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._data import waits_for_data
from deep500_timing._views.findings._devices import copies, cpu_waits_for_gpu, launch_bound, throttled
from deep500_timing._views.findings._evidence import Evidence, evidence_of
from deep500_timing._views.findings._goodput import low_goodput
from deep500_timing._views.findings._memory import memory_grows
from deep500_timing._views.findings._ranks import exposed_communication, imbalance, late_rank, waits_for_ranks
from deep500_timing._views.findings._steps import drift, level_shift, spikes, warm_up
from deep500_timing._views.findings._whole import dominant_region, lost, outside_steps, unnamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deep500_timing._summary.tree import Tree
    from deep500_timing._views.findings._finding import Finding
    from deep500_timing.runs import Run

ENVIRONMENT = "DEEP500_TIMING_FINDINGS"
RULES: dict[str, Callable[[Evidence], Iterator[Finding]]] = {
    "lost": lost,
    "late-rank": late_rank,
    "waits-for-data": waits_for_data,
    "imbalance": imbalance,
    "waits-for-ranks": waits_for_ranks,
    "exposed-communication": exposed_communication,
    "launch-bound": launch_bound,
    "cpu-waits-for-gpu": cpu_waits_for_gpu,
    "copies": copies,
    "throttled": throttled,
    "memory-grows": memory_grows,
    "spikes": spikes,
    "level-shift": level_shift,
    "drift": drift,
    "warm-up": warm_up,
    "goodput": low_goodput,
    "outside-steps": outside_steps,
    "dominant-region": dominant_region,
    "unnamed": unnamed,
}
"""Every rule, by its name."""
REMEDIES = {
    "lost": "the end of the report says what is missing",
    "waits-for-data": "more workers (num_workers), prefetch, pin_memory",
    "imbalance": "give each rank the same amount of work",
    "exposed-communication": "overlap it with the backward pass, larger buckets, fewer bytes",
    "launch-bound": "larger batches, CUDA graphs, torch.compile",
    "cpu-waits-for-gpu": "look for .item(), .cpu(), print of a tensor",
    "copies": "pin_memory=True and non_blocking=True",
    "throttled": "cooling, power limit",
    "memory-grows": "keep numbers, not tensors: loss.item(), .detach()",
    "drift": "look for lists that grow",
    "warm-up": "cache compilation; leave the first steps out of comparisons",
    "goodput": "save checkpoints at the interval that the command names; start faster",
    "outside-steps": "do it less often, or in the background",
    "dominant-region": "time its parts as regions",
    "unnamed": "time its parts as regions",
}
"""What usually helps, by rule; ``docs/findings.md`` says more."""


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
        if name not in silent:
            try:
                found[name] = list(rule(evidence))
            except Exception as error:
                # One rule's fault must not cost the table.
                evidence.failed[name] = f"{type(error).__name__}: {error}"
                warn_once(f"The rule {name!r} of the findings failed: {evidence.failed[name]}. It is left out.")
    places = {name: place for place, name in enumerate(RULES)}
    kept = [replace(finding, remedy=finding.remedy or REMEDIES.get(finding.rule, "")) for finding in _each_once(found)]
    kept.sort(key=lambda finding: (not finding.is_first, -(finding.cost_s or 0.0), places[finding.rule]))
    # Growing memory and throttling may have no cost in time; they come after the most costly finding.
    timed = [finding for finding in kept if finding.is_first or finding.cost_s is not None]
    untimed = [finding for finding in kept if finding not in timed]
    lost = sum(finding.is_first for finding in timed)
    return [*timed[: lost + 1], *untimed, *timed[lost + 1 :]][: at_least.MOST]


def _each_once(found: dict[str, list[Finding]]) -> Iterator[Finding]:
    # The same seconds are told once, by the rule that knows most.
    late = {finding.rank for finding in found.get("late-rank", ())}
    stalls = {step for finding in found.get("waits-for-data", ()) for step in finding.steps}
    pauses = {finding.region for finding in found.get("outside-steps", ()) if finding.anchor == "over-the-run"}
    for findings in found.values():
        for finding in findings:
            if finding.rule == "imbalance" and finding.rank in late:
                continue
            if finding.rule == "spikes" and finding.cause == IO and stalls and stalls >= set(finding.steps):
                continue
            if finding.rule == "unnamed" and finding.region in pauses and BATCH not in finding.region:
                continue
            yield finding


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
