"""The statistics of comparisons: against scipy's own tests, and the promises of levels."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from deep500_timing.compare import _statistics as st
from deep500_timing.compare._runs import warm_up_of

RNG = np.random.default_rng(1)
A, B = RNG.normal(0, 1, 6).tolist(), RNG.normal(0.5, 2, 5).tolist()


def test_the_paired_test_is_scipys():
    """Without a noise floor the p-value is that of the one-sample t test."""
    expected = stats.ttest_1samp(A, 0, alternative="greater").pvalue
    assert st.paired(A).slower_p == pytest.approx(expected)
    assert st.paired(A).faster_p == pytest.approx(1 - expected)


def test_welchs_test_is_scipys():
    """P-value and 90 % interval are those of Welch's test."""
    expected = stats.ttest_ind(B, A, equal_var=False, alternative="greater")
    found = st.welch(A, B)
    assert found.slower_p == pytest.approx(expected.pvalue)
    low, high = stats.ttest_ind(B, A, equal_var=False).confidence_interval(0.9)
    assert found.interval() == pytest.approx((low, high))


def test_sessions_of_one_run_are_students_t():
    """With one run a session the session test is Student's t test on the runs."""
    expected = stats.ttest_ind(B, A, alternative="greater").pvalue
    assert st.across_sessions([[a] for a in A], [[b] for b in B]).slower_p == pytest.approx(expected)


def test_one_new_session_is_judged_by_the_spread_of_the_others():
    """Many runs of one new session add no degree of freedom and do not hide the spread of sessions."""
    history = [[0.00, 0.001], [0.02, 0.021], [-0.02, -0.021]]
    assert st.across_sessions(history, [[0.03] * 50]).slower_p > 0.05
    assert st.across_sessions(history, [[0.3] * 50]).slower_p < 0.05


@pytest.mark.parametrize("most", range(3, 30))
def test_the_levels_of_all_looks_add_up(most):
    """However many pairs are allowed, the looks spend 5 % together."""
    assert sum(st.level_of_look(pairs, most) for pairs in range(1, most + 1)) == pytest.approx(st.ALPHA)


def test_holm_adjusts_and_keeps_the_order():
    """Holm's p-values, computed by hand."""
    assert st.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert st.holm([0.9, 0.6]) == [1.0, 1.0]
    assert st.holm([]) == []


def test_the_floor_adds_degrees_of_freedom():
    """Both variances are weighted by their degrees of freedom, if the experiment is not noisier than the floor."""
    assert st.pool(st.Spread(2.0, 4), st.Spread(1.0, 9)) == st.Spread((8 + 9) / 13, 13)
    assert st.pool(st.Spread(20.0, 4), st.Spread(1.0, 9)) == st.Spread(20.0, 4)
    assert st.pool(st.Spread(2.0, 4), None) == st.Spread(2.0, 4)
    assert st.pool(st.Spread(2.0, 4), st.Spread(0.0, 9)) == st.Spread(2.0, 4)


def test_the_number_of_pairs_has_the_power():
    """The smallest number of pairs has 95 % power by the noncentral t distribution, one fewer has not."""
    spread = st.Spread(0.02**2, 9)
    effect = math.log(1.05)

    def power(pairs):
        limit = stats.t.isf(st.level_of_look(pairs, pairs), pairs - 1)
        return stats.nct.sf(limit, pairs - 1, effect / math.sqrt(spread.variance / pairs))

    needed = st.pairs_needed(effect, spread)
    assert needed is not None
    assert power(needed) >= 0.95 > power(needed - 1)
    assert st.smallest_effect(spread, needed) <= effect < st.smallest_effect(spread, needed - 1)
    assert st.pairs_needed(1e-9, spread) is None


def test_identical_runs_show_no_difference():
    """Without any spread and any effect nothing is significant; without spread an effect is certain."""
    assert st.paired([0.0, 0.0, 0.0]).slower_p == 0.5
    assert st.paired([0.1, 0.1, 0.1]).slower_p < 1e-6


@pytest.mark.parametrize("slow", [5, 20, 40])
def test_warm_up_is_left_out(slow):
    """Slow first steps are left out to a batch of five, and little more."""
    steps = np.r_[np.linspace(5, 2, slow), np.random.default_rng(2).normal(1, 0.03, 200)]
    assert slow <= warm_up_of(steps) <= slow + 25


def test_at_most_half_is_warm_up():
    """A run that only becomes faster keeps its second half; a short run keeps all."""
    assert warm_up_of(np.linspace(2, 1, 100)) <= 50
    assert warm_up_of(np.linspace(2, 1, 19)) == 0
    assert warm_up_of(np.ones(100)) == 0


def test_the_warm_up_is_whites_formula():
    """The rule minimizes the squared standard error of the mean of the remaining batches, computed plainly."""
    steps = np.random.default_rng(3).exponential(1, 300)
    steps[:30] += 3
    means = steps.reshape(-1, 5).mean(axis=1)
    plain = [((means[d:] - means[d:].mean()) ** 2).sum() / (len(means) - d) ** 2 for d in range(31)]
    assert warm_up_of(steps) == 5 * int(np.argmin(plain))
