"""Asks every rule, and puts the answers in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing._views.findings._finding import Finding
    from deep500_timing._views.tree import Tree
    from deep500_timing.runs import Run

MOST = 5
"""Findings that are shown."""


def find(
    source: Run | Tree, *, rank: int | None = None, session: int | None = None, off: Iterable[str] = ()
) -> list[Finding]:
    """What stands out, the most costly first; what was lost comes before all.

    Args:
        source: A run, or a tree alone, of which only some rules can speak.
        rank: Whose steps to look at; the lowest rank's if None. Rules about ranks look at all.
        session: Of this start of the run only; all if None.
        off: Names of rules that are not to be asked, beside those that ``DEEP500_TIMING_FINDINGS`` names
            (``-spikes,-drift``).
    """
    del source, rank, session, off
    return []


def verdict_if_none(tree: Tree) -> str:
    """What to say where nothing stands out."""
    del tree
    return "Nothing stands out."
