"""Which rank is late: false alarms, power, and each condition just below and just above its bound."""

from __future__ import annotations

import numpy as np
import pytest

from deep500_timing._distributed import operation_stragglers as stragglers
from deep500_timing._distributed.operation_stragglers import autocorrelation_time, binomial_tail, find_late_rank


def _durations(arrivals_ms, transfer_ms=1.0):
    came = np.asarray(arrivals_ms, dtype=float)
    return (came.max(axis=1, keepdims=True) - came + transfer_ms) * 1e6


def test_one_operation_names_nobody():
    """A single barrier with a millisecond between its ranks is no evidence, nor are a dozen."""
    one = find_late_rank(_durations([[0.0, 1.0]]))
    assert (None, False, 1) == (one.rank, one.enough, one.operations)
    few = find_late_rank(_durations([[0.0, 1.0]] * 12))
    assert (None, False) == (few.rank, few.enough)
    assert 0.5e-3 == pytest.approx(few.waiting_s)


def test_a_rank_that_is_always_late():
    """What is said of it: how often it came last, by how much, and what that cost."""
    rng = np.random.default_rng(0)
    came = rng.random((100, 4)) * 0.1
    came[:, 2] += 3
    found = find_late_rank(_durations(came))
    assert (2, 1.0, 100, 100) == (found.rank, found.last_share, found.operations, found.judged)
    assert found.lateness_s == pytest.approx(3e-3, rel=0.02)
    # Without it the operation would have begun when the last of the other three came.
    expected = came[:, 2].mean() - np.delete(came, 2, axis=1).max(axis=1).mean()
    assert found.cost_s == pytest.approx(expected * 1e-3)
    assert found.chance < 1e-6


def test_lateness_that_is_small_beside_the_transfer():
    """A tenth of a quarter of the transfer is certain and does not matter; above the quarter it is named."""
    rng = np.random.default_rng(1)
    came = rng.random((400, 4)) * 0.01
    came[:, 1] += 0.9 * stragglers.TRANSFER_SHARE
    below = find_late_rank(_durations(came))
    assert None is below.rank
    assert below.chance < 1e-6
    came[:, 1] += 0.2 * stragglers.TRANSFER_SHARE
    assert 1 == find_late_rank(_durations(came)).rank


def test_lateness_that_is_small_beside_the_jitter():
    """With a transfer of next to nothing it is the jitter that lateness must stand out from."""
    rng = np.random.default_rng(2)
    came = rng.normal(0, 1, (4000, 8))
    came[:, 3] += 0.3
    below = find_late_rank(_durations(came, transfer_ms=1e-3))
    assert None is below.rank
    assert below.chance < 1e-6
    came[:, 3] += 0.6
    assert 3 == find_late_rank(_durations(came, transfer_ms=1e-3)).rank


def test_a_rank_that_is_late_now_and_then():
    """One that comes 50 ms late in a fifth of the operations is not late typically, and costs all the same."""
    rng = np.random.default_rng(3)
    came = rng.random((400, 4))
    came[::5, 1] += 50
    found = find_late_rank(_durations(came))
    assert 1 == found.rank
    assert found.cost_s == pytest.approx(0.2 * 50e-3, rel=0.1)


def test_the_first_of_many_operations_in_a_step():
    """Where only one operation of each step is waited for, the others do not hide who is late in it."""
    rng = np.random.default_rng(4)
    came = rng.random((2000, 8)) * 0.02
    came[::20, 5] += 5
    found = find_late_rank(_durations(came))
    assert (5, 2000, 1.0) == (found.rank, found.operations, found.last_share)
    # Of the 100 that begin a step so many as hold four fifths of all waiting, that of the others included.
    assert 80 <= found.judged <= 100
    assert found.cost_s == pytest.approx(5e-3 * found.judged / 2000, rel=0.05)


def test_the_costliest_of_two_late_ranks():
    """Of two ranks that are late by their nature, the one that the others wait for is named."""
    rng = np.random.default_rng(5)
    came = rng.random((200, 6)) * 0.1
    came[:, 0] += 2
    came[:, 4] += 5
    assert 4 == find_late_rank(_durations(came)).rank


def test_shapes_of_nothing():
    """No operations, one rank, no ranks: nobody is named, and nothing raised."""
    for durations in (np.empty((0, 4)), np.ones((5, 1)), [], [[]]):
        found = find_late_rank(durations)
        assert (None, False, 1.0) == (found.rank, found.enough, found.chance)


def test_ranks_that_arrive_together():
    """Equal times share their place, so that nobody comes last more often than another."""
    found = find_late_rank(np.full((100, 3), 5.0))
    assert (None, 0.0, 1.0) == (found.rank, found.waiting_s, found.chance)


def test_autocorrelation_time():
    """About 1 of independent values and (1 + 0.9) / (1 - 0.9) of an autoregressive series; never less than 1."""
    rng = np.random.default_rng(6)
    independent = autocorrelation_time(rng.random((4000, 8)))
    assert 1 <= independent < 1.2
    series = rng.normal(0, 1, (4000, 8))
    for i in range(1, 4000):
        series[i] += 0.9 * series[i - 1]
    assert autocorrelation_time(series) == pytest.approx(19, rel=0.25)
    assert 1.0 == autocorrelation_time(np.ones((50, 2)))
    assert 3.0 == autocorrelation_time(np.array([[0.0], [1.0], [2.0]]))


def test_binomial_tail():
    """The sum of the probabilities, exactly, from none to all."""
    assert 1.0 == binomial_tail(10, 0, 0.5)
    assert binomial_tail(10, 10, 0.5) == pytest.approx(2**-10)
    assert binomial_tail(10, 8.9, 0.5) == pytest.approx((45 + 10 + 1) / 1024)
    assert binomial_tail(1000, 60, 1 / 64) < 1e-15
