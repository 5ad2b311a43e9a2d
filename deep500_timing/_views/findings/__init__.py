"""Findings: facts about a run in sentences, with their numbers, the most costly first.

``find(run)`` gives the findings; the first is the diagnosis. ``docs/findings.md`` has the rules and their thresholds.
"""

from __future__ import annotations

from deep500_timing._views.findings._account import CALM, account_of, start_note, steps_per_s, summary_of, verdict
from deep500_timing._views.findings._evidence import FIRST_STEP, Evidence, evidence_of
from deep500_timing._views.findings._find import RULES, find
from deep500_timing._views.findings._finding import Finding

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
    "steps_per_s",
    "summary_of",
    "verdict",
]
