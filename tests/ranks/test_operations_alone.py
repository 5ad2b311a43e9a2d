"""Which rank is late, from operations alone: each condition just below and just above its bound."""

from __future__ import annotations

import numpy as np
import pytest

from deep500_timing._distributed.autocorrelation import autocorrelation_time
from deep500_timing._distributed.late import TRANSFER_SHARE, steps_of_operations
from deep500_timing.ranks import find_stragglers


def find(arrivals_ms, transfer_ms=1.0):
    """The verdict on operations, from when each rank came, of shape (operations, ranks)."""
    came = np.asarray(arrivals_ms, dtype=float)
    durations_s = (came.max(axis=1, keepdims=True) - came + transfer_ms) / 1e3
    return find_stragglers(steps_of_operations(tuple(range(came.shape[1])), durations_s, met_at="operations"))


@pytest.mark.parametrize("operations", [1, 12])
def test_a_few_operations_name_no_rank(operations):
    """A single barrier with a millisecond between its ranks is no evidence, nor are a dozen."""
    found = find([[0.0, 1.0]] * operations)
    assert ("unknown", (), False) == (found.kind, found.ranks, found.operations.enough)
    assert 0.5e-3 == pytest.approx(found.operations.waiting_s)


def test_a_rank_that_is_always_late():
    """How often it came last, by how much, and the cost."""
    came = np.random.default_rng(0).random((100, 4)) * 0.1
    came[:, 2] += 3
    found = find(came)
    assert ((2,), 1.0, 100, 100) == (found.ranks, found.last_share, found.steps, found.operations.judged)
    assert found.lateness_s == pytest.approx(3e-3, rel=0.02)
    # Without it the operation would have begun when the last of the other three came.
    expected = came[:, 2].mean() - np.delete(came, 2, axis=1).max(axis=1).mean()
    assert found.operations.cost_s == pytest.approx(expected * 1e-3, rel=0.02)
    assert found.operations.chance < 1e-6


def test_lateness_that_is_small_compared_with_the_transfer():
    """A lateness that is certain and costs little is not named."""
    came = np.random.default_rng(1).random((400, 4)) * 0.01
    came[:, 1] += 0.9 * TRANSFER_SHARE
    below = find(came)
    assert () == below.ranks
    assert below.operations.chance < 1e-6
    came[:, 1] += 0.2 * TRANSFER_SHARE
    assert (1,) == find(came).ranks


@pytest.mark.parametrize(("ranks", "below", "above"), [(2, 2.0, 8.0), (4, 1.0, 4.0), (8, 0.3, 3.0)])
def test_lateness_must_exceed_the_jitter(ranks, below, above):
    """Each operation varies by 1 ms: a rank is named if its lateness is several times that, by many ranks sooner."""
    came = np.random.default_rng(2).normal(0, 1, (400, ranks))
    late = np.arange(ranks) == 1
    assert () == find(came + below * late, transfer_ms=1e-3).ranks
    assert (1,) == find(came + above * late, transfer_ms=1e-3).ranks


@pytest.mark.parametrize("every", [2, 5])
@pytest.mark.parametrize("ranks", [2, 4])
def test_one_operation_of_each_step(ranks, every):
    """The others wait in one operation of each step, and not in those after it."""
    came = np.random.default_rng(3).random((400, ranks))
    came[::every, 1] += 50
    found = find(came)
    assert ((1,), 400) == (found.ranks, found.steps)
    if found.operations.judged < 400:
        assert found.operations.cost_s == pytest.approx(50e-3 / every, rel=0.1)


def test_one_of_twenty_operations():
    """Where only one operation in twenty is waited for, the others do not hide the late rank."""
    came = np.random.default_rng(4).random((2000, 8)) * 0.02
    came[::20, 5] += 5
    found = find(came)
    assert ((5,), 2000, 100, 1.0) == (found.ranks, found.steps, found.operations.judged, found.last_share)
    assert found.operations.cost_s == pytest.approx(5e-3 / 20, rel=0.05)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_take_turns_at_long_waits(ranks):
    """Some operations wait long, each for another rank: no rank is late."""
    came = np.random.default_rng(6).random((400, ranks))
    came[np.arange(0, 400, 4), np.arange(100) % ranks] += 50
    assert () == find(came).ranks


def test_the_costliest_of_two_late_ranks():
    """Of two late ranks, the later one comes first."""
    came = np.random.default_rng(5).random((200, 6)) * 0.1
    came[:, 0] += 2
    came[:, 4] += 5
    assert 4 == find(came).ranks[0]


@pytest.mark.parametrize("shape", [(0, 4), (5, 1), (40, 1), (0, 0)])
def test_empty_shapes(shape):
    """No operations, one rank, no ranks: unknown, and no exception."""
    steps = steps_of_operations(tuple(range(shape[1])), np.ones(shape), met_at="operations")
    assert ("unknown", ()) == (find_stragglers(steps).kind, find_stragglers(steps).ranks)


def test_ranks_that_arrive_together():
    """Without any wait no rank is late, and none is likely to be."""
    found = find(np.full((100, 3), 5.0))
    assert ("nobody", 0.0, 1.0) == (found.kind, found.operations.waiting_s, found.operations.chance)


def test_autocorrelation_time():
    """About 1 of independent values and (1 + 0.9) / (1 - 0.9) of an autoregressive series; never less than 1."""
    rng = np.random.default_rng(6)
    assert 1 <= autocorrelation_time(rng.random((4000, 8))) < 1.2
    series = rng.normal(0, 1, (4000, 8))
    for i in range(1, 4000):
        series[i] += 0.9 * series[i - 1]
    assert autocorrelation_time(series) == pytest.approx(19, rel=0.25)
    assert 1.0 == autocorrelation_time(np.ones((50, 2)))
    assert 3.0 == autocorrelation_time(np.array([[0.0], [1.0], [2.0]]))
