"""The simulated worlds of the stragglers' table, a small part of them."""

from __future__ import annotations

import pytest

from benchmarks.gather_ranks import measure
from benchmarks.stragglers import training_lines, training_row, world
from deep500_timing._distributed.operation_stragglers import find_late_rank


@pytest.mark.parametrize("kind", ["uniform", "exponential", "spikes", "autocorrelated"])
@pytest.mark.parametrize("ranks", [2, 16])
def test_nobody_is_named_where_all_are_alike_and_the_late_one_where_it_is(kind, ranks):
    """A small version of the table in the benchmarks: ten worlds of each, with the seeds of the large one."""
    for seed in range(10):
        assert None is find_late_rank(world(seed, kind, 1000, ranks, 0.0)[0]).rank
    right = [find_late_rank(durations).rank == late for durations, late in (
        world(seed, kind, 1000, ranks, 1.0) for seed in range(10))]  # fmt: skip
    assert sum(right) >= 9


@pytest.mark.parametrize("ranks", [2, 3])
def test_few_operations_that_depend_on_their_neighbours(ranks):
    """Of 60 operations whose noise lasts for twenty nobody can tell who is late, and at most one world in 100 does."""
    named = [find_late_rank(world(seed, "autocorrelated", 60, ranks, 0.0)[0]).rank for seed in range(200)]
    assert sum(rank is not None for rank in named) <= 2


def test_the_table_of_trainings():
    """Ten worlds of it: the late rank and its cause are named, nobody where nobody is late, and the table says so."""
    assert {"rank": 1.0, "cause": 1.0, "wrong": 0.0, "where": 0.0} == training_row(8, 0.1, worlds=10)
    assert 0.0 == training_row(8, 0.0, worlds=10)["wrong"]
    assert "| 8 | 0.0% | 10% of a step | 100.0% | 100.0% | 0.0% | 0.0% |" in training_lines(worlds=3, rows=(8,))


def test_the_cost_of_a_report_is_measured():
    """Every rank is in the report, at once and by groups, within the bytes of a message."""
    for fan in (None, 4):
        assert 2500 >= measure(12, 50, 0.05, fan)["bytes"]
