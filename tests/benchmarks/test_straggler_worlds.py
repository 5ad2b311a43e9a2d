"""The simulated worlds of the stragglers' table, a small part of them."""

from __future__ import annotations

import pytest

from benchmarks.straggler_worlds import NOISES
from benchmarks.stragglers import as_lines, count


@pytest.mark.parametrize("noise", list(NOISES))
def test_no_rank_is_named_where_none_is_late_and_the_right_one_where_one_is(noise):
    """A few worlds of each noise, with the seeds of the large table."""
    for ranks, worlds in ((2, 5), (8, 8), (64, 2)):
        assert 0 == count((noise, ranks, 0.0, "none", False, 0, worlds))["wrong"]
    found = count((noise, 8, 0.10, "late", False, 0, 10))
    assert (0, 0) == (found["wrong"], found["wrong cause"])
    assert found["right"] >= 9


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_operations_alone(ranks):
    """The same waits without regions: no false name, and a rank that is late by 15 % of a step is named."""
    assert 0 == count(("ar5", ranks, 0.0, "none", True, 0, 5))["wrong"]
    found = count(("ar5", ranks, 0.15, "late", True, 0, 5))
    assert (5, 0) == (found["right"], found["wrong"])


def test_the_table():
    """It has a row for each noise and a column for each number of ranks."""
    cells = [("ar5", 4, delay, kind, False, 0, 1) for delay, kind in ((0.0, "none"), (0.05, "late"))]
    lines = as_lines({cell: count(cell) for cell in cells})
    assert "| noise | 4 ranks |" in lines
    assert "| AR(1) 0.5, 3 % | 0.0 |" in lines
