"""The history of runs: where it changed, and nothing where it did not."""

from __future__ import annotations

import numpy as np
import pytest

from deep500_timing.compare import NotComparableError
from deep500_timing.compare._series import _best_split, change_points, history


def noise(count, seed=0, spread=0.01):
    """A series without a change."""
    return np.random.default_rng(seed).normal(0, spread, count)


def test_each_change_is_found_where_it_is():
    """Two steps of 5 % in 60 points."""
    series = noise(60)
    series[20:] += 0.05
    series[45:] += 0.05
    assert [index for index, _ in change_points(series)] == [20, 45]


def test_an_outlier_is_no_change():
    """One slow run does not divide a history."""
    series = noise(40)
    series[20] += 0.5
    assert change_points(series) == []


def test_false_alarms_stay_at_their_level():
    """60 series without a change: at most 7 alarms at 5 % (the 99 % bound of the binomial distribution)."""
    assert sum(bool(change_points(noise(24, seed))) for seed in range(60)) <= 7


def test_the_statistic_is_the_plain_formula():
    """The energy distance of every split, computed by double sums."""
    series = noise(14, 5)

    def energy(a, b):
        def mean(x, y):
            return np.abs(np.subtract.outer(x, y))

        n, m = len(a), len(b)
        inside = mean(a, a).sum() / (n * (n - 1)) + mean(b, b).sum() / (m * (m - 1))
        return n * m / (n + m) * (2 * mean(a, b).mean() - inside)

    plain = {at: energy(series[:at], series[at:]) for at in range(3, 12)}
    best, at = _best_split(np.abs(np.subtract.outer(series, series)))
    assert best == pytest.approx(max(plain.values()))
    assert at == max(plain, key=plain.get)


def test_equal_values_have_no_change():
    """A series without any spread."""
    assert change_points([1.0] * 20) == []


def test_the_run_and_its_region_are_named(times):
    """From the eighth session on FORWARD takes 10 % longer."""
    runs = []
    for day in range(14):
        forward = 0.02 * (1 + 0.001 * (day % 3)) * (1.1 if day >= 8 else 1)
        runs.append(times(forward + 0.03, 1000 * day, session=f"day {day}", FORWARD=forward, BACKWARD=0.03))
    levels, unit = history(runs)
    assert (unit, len(levels), levels[1].first.name, levels[1].region) == ("session", 2, "run-8000", "FORWARD")
    with pytest.raises(NotComparableError, match="a change shows from 8 on"):
        history(runs[:7])


@pytest.mark.parametrize("count", [7, 8])
def test_the_least_number_of_points(count):
    """A large change in the middle is significant in eight points, and can be in no fewer."""
    series = noise(count)
    series[count // 2 :] += 1
    assert len(change_points(series)) == (count == 8)
