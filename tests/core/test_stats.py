"""The numbers of a report: TimeStats, the interval of the median, histograms, summaries that merge, trim_mean."""

from __future__ import annotations

import dataclasses
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import NoTimesError, TimeStats, trim_mean
from deep500_timing._recording.intervals import Intervals
from deep500_timing._summary.distribution import EMPTY, Distribution, RecordedTimes
from deep500_timing._summary.stats import median_confidence_ranks, stats_of

DURATIONS = st.lists(st.integers(0, 10**13), min_size=1, max_size=300)
WIDE = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 2**62)), min_size=1, max_size=200)


def array(durations):
    """Durations in ns as the timers hand them over."""
    return np.array(durations, dtype=np.int64)


class TestTimeStats:
    @given(DURATIONS)
    def test_against_the_standard_library(self, durations):
        """Mean, median, extremes and deviation are those of ``statistics``, in seconds."""
        stats = stats_of(array(durations))
        assert (min(durations) / 1e9, max(durations) / 1e9, sum(durations) / 1e9, len(durations)) == (
            stats.min,
            stats.max,
            stats.total,
            stats.count,
        )
        assert pytest.approx(statistics.fmean(durations) / 1e9, rel=1e-14) == stats.mean
        assert pytest.approx(statistics.median(durations) / 1e9, rel=1e-14) == stats.median
        deviation = statistics.stdev(durations) / 1e9 if len(durations) > 1 else 0.0
        assert pytest.approx(deviation, rel=1e-9, abs=1e-14 * stats.max) == stats.stdev

    @pytest.mark.parametrize("n", [65_535, 65_536, 65_537, 200_000])
    def test_of_many(self, n):
        """Deviations, which are summed in parts, are those of all; a part's own mean is another one."""
        durations = np.random.default_rng(n).integers(0, 10**6, n) + np.arange(n) * 100
        stats = stats_of(durations)
        expected = (durations.min(), durations.max(), durations.sum(), durations.std(ddof=1), np.median(durations))
        assert pytest.approx([value / 1e9 for value in expected], rel=1e-12) == [
            stats.min,
            stats.max,
            stats.total,
            stats.stdev,
            stats.median,
        ]

    @given(DURATIONS)
    def test_percentiles_are_numpys(self, durations):
        """Percentiles are linear between order statistics."""
        stats = stats_of(array(durations))
        expected = np.percentile(np.array(durations) / 1e9, (90, 95, 99))
        assert pytest.approx(expected.tolist(), rel=1e-12) == [stats.p90, stats.p95, stats.p99]

    @given(DURATIONS)
    def test_order(self, durations):
        """However odd the times, the numbers are in their natural order."""
        stats = stats_of(array(durations))
        ordered = [stats.min, stats.median, stats.p90, stats.p95, stats.p99, stats.max]
        assert sorted(ordered) == ordered
        if stats.median_ci is not None:
            low, high = stats.median_ci
            assert stats.min <= low <= stats.median <= high <= stats.max

    def test_of_a_single_time(self):
        """One time has no spread and no interval."""
        assert TimeStats(
            min=2.0,
            mean=2.0,
            median=2.0,
            max=2.0,
            stdev=0.0,
            count=1,
            total=2.0,
            p90=2.0,
            p95=2.0,
            p99=2.0,
            median_ci=None,
        ) == stats_of(array([2 * 10**9]))

    def test_of_nothing(self):
        """There are no statistics of no times."""
        with pytest.raises(NoTimesError, match="Statistics of no times do not exist; record a time first"):
            stats_of(array([]))

    def test_the_input_is_left_alone(self):
        """Sorting happens on a copy."""
        durations = array([3, 1, 2])
        stats_of(durations)
        assert [3, 1, 2] == durations.tolist()

    def test_frozen(self):
        """An exporter cannot change a report."""
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats_of(array([1])).mean = 5


class TestMedianInterval:
    """The interval of order statistics (l, u) holds the median when at least l and fewer than u times lie below it."""

    @staticmethod
    def coverage(n, ranks):
        """The exact probability, with how many of n lie below the median binomial with p = 1/2."""
        low, high = ranks
        return sum(math.comb(n, k) for k in range(low, high)) / 2**n

    def test_none_below_six(self):
        """Not even the widest interval of five times reaches 95 %."""
        assert [None] * 6 == [median_confidence_ranks(n) for n in range(6)]
        assert 0.95 > self.coverage(5, (1, 5))

    @pytest.mark.parametrize("n", range(6, 71))
    def test_exact_and_as_narrow_as_can_be(self, n):
        """Up to 70 times the interval reaches 95 % and the next narrower symmetric one does not."""
        low, high = median_confidence_ranks(n)
        assert n + 1 == low + high
        assert self.coverage(n, (low, high)) >= 0.95
        assert low == n // 2 or self.coverage(n, (low + 1, high - 1)) < 0.95

    def test_table(self):
        """The ranks of Le Boudec's table A.1 for a few numbers of times."""
        assert [(1, 6), (2, 9), (6, 15), (18, 33), (27, 44)] == [
            median_confidence_ranks(n) for n in (6, 10, 20, 50, 70)
        ]

    def test_the_approximation_is_that_of_the_book(self):
        """Ranks floor(n/2 - 0.98 sqrt(n)) and ceil(n/2 + 1 + 0.98 sqrt(n)), worked out by hand."""
        assert [(40, 61), (180, 221), (4902, 5099)] == [median_confidence_ranks(n) for n in (100, 400, 10_000)]

    def test_the_approximation_reaches_95_percent(self):
        """Above 70 times the interval reaches its confidence as well, checked exactly up to 2000."""
        short = []
        at_most, m = sum(math.comb(71, k) for k in range(10)), 9  # out of n, m or fewer
        for n in range(71, 2001):
            low, high = median_confidence_ranks(n)
            while m < n - high:
                m += 1
                at_most += math.comb(n, m)
            assert n - high == low - 1 == m  # Either tail holds as many ranks.
            if 2 * at_most * 20 > 2**n:
                short.append(n)
            at_most = 2 * at_most - math.comb(n, m)  # Pascal: out of n + 1
        assert [] == short

    @pytest.mark.parametrize("n", [71, 100, 1000, 10**6, 10**9])
    def test_ranks_exist(self, n):
        """The ranks are ranks, and close about the middle."""
        low, high = median_confidence_ranks(n)
        assert 1 <= low < n / 2 < high <= n
        assert abs(n + 1 - low - high) <= 1

    def test_it_holds_order_statistics(self):
        """The interval's ends are times that were measured."""
        assert (2e-9, 9e-9) == stats_of(array(range(1, 11))).median_ci


class TestDistribution:
    @given(WIDE, st.floats(0, 1))
    def test_every_quantile_is_within_one_percent(self, durations, q):
        """A quantile from bins is within 1 % of the exact one."""
        exact = np.quantile(np.sort(np.array(durations, dtype=np.float64)), q)
        assert pytest.approx(exact, rel=0.01) == Distribution.of(array(durations)).quantiles([q])[0]

    @given(WIDE)
    def test_every_order_statistic_is_within_one_percent(self, durations):
        """The same for each rank, and exactly below 128 ns."""
        ranks = range(1, len(durations) + 1)
        found = Distribution.of(array(durations)).order_statistics(ranks)
        for value, exact in zip(found, sorted(durations), strict=True):
            assert pytest.approx(exact, rel=0.01 if exact >= 128 else 0) == value


def stored(values, *, keep_last=-1, skip_first=0):
    """The intervals of these durations, as of now."""
    store = Intervals(keep_last, skip_first)
    for value in values:
        store.append(0, value)
    return store, store.digest()


class TestRecordedTimes:
    @given(st.lists(st.tuples(DURATIONS, st.booleans(), st.sampled_from([0, 1, 100])), min_size=1, max_size=6))
    def test_parts_merge_to_the_whole(self, parts):
        """However times are split among threads, kept or aggregated, the statistics are those of all."""
        stores = [stored(values, keep_last=0 if few else -1, skip_first=warm_up) for values, few, warm_up in parts]
        times = RecordedTimes(stores)
        everything = [value for values, _, warm_up in parts for value in values[warm_up:]]
        stats = times.stats()
        assert len(everything) == times.count
        assert times.skipped == sum(min(len(values), warm_up) for values, _, warm_up in parts)
        if not everything:
            assert None is stats
            return
        whole = stats_of(array(everything))
        assert (whole.min, whole.max, whole.total, whole.mean) == (stats.min, stats.max, stats.total, stats.mean)
        assert pytest.approx(whole.stdev, rel=1e-9, abs=1e-12 * whole.max) == stats.stdev
        error = stats.quantile_error
        assert (0.0 if len(times.kept_ns()) == times.count else 0.01) == error
        for name in ("median", "p90", "p95", "p99"):
            assert pytest.approx(getattr(whole, name), rel=error or 1e-12) == getattr(stats, name)
        if whole.median_ci is None:
            assert stats.median_ci is None
        else:
            assert pytest.approx(whole.median_ci, rel=error or 1e-12) == stats.median_ci
        same = Distribution.of(array(everything))
        assert (same.first_bin, same.counts) == (times.distribution.first_bin, times.distribution.counts)

    def test_of_nothing(self):
        """No times, no statistics."""
        nothing = RecordedTimes([])
        assert (0, None, EMPTY, None) == (nothing.count, nothing.stats(), nothing.distribution, nothing.trimmed_mean(0))

    def test_what_comes_later_is_not_read(self):
        """The quantiles are read when someone asks, and are still those of the moment."""
        store, digest = stored([1, 2, 30])
        stats = RecordedTimes([(store, digest)]).stats()
        store.append(0, 1000)
        assert (2e-9, 3, 0.0) == (stats.median, stats.count, stats.quantile_error)

    def test_what_is_dropped_meanwhile_is_told_within_one_percent(self):
        """A timer with ``keep_last`` may drop times before someone asks for a quantile; its error then says so."""
        store, digest = stored([1000, 2000, 3000], keep_last=0)
        early, late = (RecordedTimes([(store, digest)]).stats() for _ in range(2))
        assert (2e-6, 0.0) == (early.median, early.quantile_error)
        for _ in range(300):
            store.append(0, 5)
        assert (pytest.approx(2e-6, rel=0.01), 0.01, 3) == (late.median, late.quantile_error, late.count)
        assert (2e-6, 0.0) == (early.median, early.quantile_error)


class TestTrimMean:
    def test_cuts_at_either_end(self):
        """A fifth off each end of ten leaves the middle six."""
        assert 4.5 == trim_mean([9, 0, 1, 8, 2, 7, 3, 6, 4, 5], 0.2)
        assert 5.0 == trim_mean((x for x in (-1000.0, 5.0, 1000.0)), 0.34)

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
    def test_nothing_cut_is_the_mean(self, values):
        """With 0 it is the arithmetic mean."""
        assert pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-6) == trim_mean(values, 0.0)

    @given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 0.4999))
    def test_bounded_and_the_input_is_left_alone(self, values, share):
        """It lies between the extremes, and the data stay in their order."""
        before = list(values)
        if 2 * round(len(values) * share) >= len(values):
            with pytest.raises(ValueError, match="at each end and leaves none"):
                trim_mean(values, share)
            return
        mean = trim_mean(values, share)
        assert min(values) - 1e-6 <= mean <= max(values) + 1e-6
        assert before == values

    def test_of_nothing(self):
        """No data give 0.0, as in the contract's system."""
        assert 0.0 == trim_mean([], 0.1)

    @given(st.lists(st.integers(1, 10**12), min_size=1, max_size=60), st.sampled_from([0.0, 0.05, 0.1, 0.25]))
    def test_it_cuts_alike_whether_times_are_kept_or_not(self, values, share):
        """From the histogram as many times are cut as from the times themselves, so that both agree within 1 %."""
        kept, aggregated = RecordedTimes([stored(values)]), Distribution.of(array(values))
        assert kept.trimmed_mean(share) == pytest.approx(trim_mean(values, share) / 1e9)
        assert aggregated.trimmed_mean_ns(share) / 1e9 == pytest.approx(kept.trimmed_mean(share), rel=0.01, abs=2e-9)

    def test_two_outliers_of_fifteen_are_cut_from_both(self):
        """A tenth of 15 is rounded to 2, not down to 1."""
        values = [100] * 13 + [10**8] * 2
        kept, aggregated = RecordedTimes([stored(values)]), Distribution.of(array(values))
        assert (pytest.approx(1e-7), 100) == (kept.trimmed_mean(0.1), aggregated.trimmed_mean_ns(0.1))

    @pytest.mark.parametrize("share", [-0.1, 0.5, 1, math.nan])
    def test_a_share_that_leaves_nothing(self, share):
        """Half or more at either end is refused, as is a negative share."""
        with pytest.raises(ValueError) as caught:
            trim_mean([1.0], share)
        assert (
            f"trim_percent={share!r} must be at least 0 and below 0.5: it is the share cut off at each end, "
            "0.1 for 10 %."
        ) == str(caught.value)
