"""Runs in which nothing is wrong, a small part of those of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.healthy_runs import KINDS, count

pytestmark = pytest.mark.slow

pytest.importorskip("duckdb", reason="reads runs; part of the group `test`")


@pytest.mark.parametrize("first", [0, 100])
def test_nothing_is_found_where_nothing_is_wrong(first):
    """One run of each kind of noise, with the seeds of the benchmark: no rule speaks."""
    by_rule, said = count(range(first, first + len(KINDS)), steps=200)
    assert [] == said
    assert not by_rule


def test_ranks_that_are_late_by_turns():
    """One is last at 63 % of the steps and by 3 % of one; without it another would be, so that nothing is said."""
    _, said = count(range(40_138, 40_139))
    assert [] == said
