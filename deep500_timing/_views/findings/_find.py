"""Asks every rule, and puts the answers in order."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from deep500_timing._base.warn import warn_once
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._data import waits_for_data
from deep500_timing._views.findings._devices import copies, cpu_waits_for_gpu, launch_bound, throttled
from deep500_timing._views.findings._evidence import Evidence, evidence_of, name_of, percent
from deep500_timing._views.findings._memory import memory_grows
from deep500_timing._views.findings._ranks import exposed_communication, imbalance, late_rank
from deep500_timing._views.findings._steps import drift, spikes, warm_up
from deep500_timing._views.findings._whole import lost, unnamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deep500_timing._views.findings._finding import Finding
    from deep500_timing._views.tree import Tree
    from deep500_timing.runs import Run

ENVIRONMENT = "DEEP500_TIMING_FINDINGS"
RULES: dict[str, Callable[[Evidence], Iterator[Finding]]] = {
    "lost": lost,
    "waits-for-data": waits_for_data,
    "late-rank": late_rank,
    "imbalance": imbalance,
    "exposed-communication": exposed_communication,
    "launch-bound": launch_bound,
    "cpu-waits-for-gpu": cpu_waits_for_gpu,
    "copies": copies,
    "throttled": throttled,
    "memory-grows": memory_grows,
    "spikes": spikes,
    "drift": drift,
    "warm-up": warm_up,
    "unnamed": unnamed,
}
"""Every rule, by its name."""


def find(
    source: Run | Tree | Evidence, *, rank: int | None = None, session: int | None = None, off: Iterable[str] = ()
) -> list[Finding]:
    """What stands out, the most costly first; what was lost comes before all.

    Args:
        source: A run, or a tree alone, of which only some rules can speak; or the evidence of either.
        rank: Whose steps to look at; the lowest rank's if None. Rules about ranks look at all.
        session: Of this start of the run only; all if None.
        off: Names of rules that are not to be asked, beside those that ``DEEP500_TIMING_FINDINGS`` names
            (``-spikes,-drift``).

    Raises:
        ValueError: No rule has such a name.
    """
    silent = set(off)
    unknown = sorted(silent - RULES.keys())
    if unknown:
        raise ValueError(f"Switching off the finding {unknown[0]!r}: there are {', '.join(RULES)}.")
    silent |= _off_by_environment()
    evidence = source if isinstance(source, Evidence) else evidence_of(source, rank, session)
    found: list[Finding] = []
    for name, rule in RULES.items():
        if name not in silent:
            found += rule(evidence)
    late = {finding.rank for finding in found if finding.rule == "late-rank"}
    # Who is late for its work is said once, with the evidence of the collectives.
    found = [finding for finding in found if finding.rule != "imbalance" or finding.rank not in late]
    places = {name: place for place, name in enumerate(RULES)}
    found.sort(key=lambda finding: (not finding.is_first, -(finding.cost_s or 0.0), places[finding.rule]))
    return found[: at_least.MOST]


def _off_by_environment() -> set[str]:
    named = {word.strip() for word in os.environ.get(ENVIRONMENT, "").split(",") if word.strip()}
    known = {word.removeprefix("-") for word in named if word.startswith("-")} & RULES.keys()
    for word in sorted(named):
        if word.removeprefix("-") not in known:
            warn_once(
                f"{ENVIRONMENT} names {word!r}, which switches off nothing: write -RULE, with one of "
                f"{', '.join(RULES)}.",
                key=f"{ENVIRONMENT} {word}",
            )
    return known


def verdict_if_none(tree: Tree) -> str:
    """What to say where nothing stands out: where a step goes. Empty where there is too little to say it."""
    step = next((node for node in tree.named("BATCH") if node.total_s), None)
    if step is None or step.count < at_least.LEAST_STEPS or not step.total_s:
        return ""
    inside = [child for child in step.children if child.share is not None and not child.is_rest]
    largest = inside[:2]
    spread = ""
    if step.median_s and step.p95_s is not None:
        spread = _spread(step.p95_s / step.median_s - 1)
    if not largest:
        return f"Nothing stands out{f': {spread}' if spread else ''}."
    share = percent(sum(child.share or 0.0 for child in largest))
    names = " and ".join(name_of(child.name) for child in largest)
    verb = "is" if len(largest) == 1 else "are"
    return f"Nothing stands out: {share} of BATCH {verb} {names}{f', {spread}' if spread else ''}."


def verdict_of_run(tree: Tree) -> str:
    """What to say of a run where nothing stands out, or why no rule can speak."""
    said = verdict_if_none(tree)
    if said:
        return said
    steps = sum(node.count for node in tree.named("BATCH"))
    if not tree.roots:
        return "Nothing is recorded yet."
    if not steps:
        return "No rule speaks. Those about steps need regions named BATCH."
    return f"No rule speaks: of {steps} step{'s' if steps > 1 else ''}, where most need {at_least.LEAST_STEPS}."


def _spread(over: float) -> str:
    if over < 0.005:
        return ""
    if over < 1:
        return f"95 % of the steps are within {percent(over)} of the median"
    return f"one step in 20 takes {over + 1:.1f} × the median or more"
