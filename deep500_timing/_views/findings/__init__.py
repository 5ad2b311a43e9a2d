"""What is odd about a run, in sentences: facts with their numbers, the most costly first.

``find(run)`` gives the findings; the first is the verdict. The rules, their thresholds and what each stands on are in
``docs/findings.md``.
"""

from __future__ import annotations

from deep500_timing._views.findings._evidence import Evidence, evidence_of
from deep500_timing._views.findings._find import find, verdict_if_none, verdict_of_run
from deep500_timing._views.findings._finding import Finding

__all__ = ["Evidence", "Finding", "evidence_of", "find", "verdict_if_none", "verdict_of_run"]
