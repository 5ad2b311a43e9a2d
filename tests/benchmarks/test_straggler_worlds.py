"""The simulated worlds of the stragglers' table, a small part of them."""

from __future__ import annotations

import pytest

from benchmarks.stragglers import world
from deep500_timing._ranks.stragglers import find_late_rank


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
