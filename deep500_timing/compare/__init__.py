"""Comparing runs: is B slower than A, by how much, in which region, and can the answer be trusted?

::

    from deep500_timing.compare import compare, draw

    result = compare("runs/ab-20260101-120000/A-*", "runs/ab-20260101-120000/B-*")
    print(draw(result))

The run is the unit: steps of one run are not independent. Runs of one session share that session's bias, so
``deep500-timing ab`` runs both sides in turn. ``docs/compare.md`` has the rules.
"""

from __future__ import annotations

from deep500_timing.compare._compare import Comparison, Effect, Floor, compare, find_floor, floor_of, store_floor
from deep500_timing.compare._runs import NotComparableError, RunTimes, read_run
from deep500_timing.compare._text import draw

__all__ = [
    "Comparison",
    "Effect",
    "Floor",
    "NotComparableError",
    "RunTimes",
    "compare",
    "draw",
    "find_floor",
    "floor_of",
    "read_run",
    "store_floor",
]
