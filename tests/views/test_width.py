"""Lines of findings fit the terminal."""

from __future__ import annotations

import pytest

from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.table import _finding, plain


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_long_remedy_is_broken(width: int) -> None:
    """The sentence and its remedy are broken between words, and no line is wider than the terminal."""
    remedy = "cache compilation; leave the first steps out of comparisons"
    finding = Finding("warm-up", "33 % of the run is warm-up", why="36 steps", remedy=remedy, gain_share=0.33)
    lines = plain(list(_finding(finding, 1, 5, width))).splitlines()
    assert max(map(len, lines)) <= width
    assert " ".join(" ".join(lines).split()).endswith(remedy)
