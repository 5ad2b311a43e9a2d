"""What merges across ranks and subtracts between two moments: distributions and differences of snapshots."""

from __future__ import annotations

import pickle
import struct
import zlib
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import NoTimesError, Timer
from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary import distribution as _histogram
from deep500_timing._summary.distribution import EMPTY, Distribution, RecordedTimes, merge
from deep500_timing.exporters import JsonLinesExporter, read_json_lines

MS = 1_000_000
durations = st.lists(st.integers(0, 2**40), max_size=60)


def distribution_of(values):
    """The distribution of durations in ns."""
    return Distribution.of(np.array(values, dtype=np.int64))


def exact(distribution):
    """What depends on no order and no rounding."""
    return distribution.count, distribution.total_ns, distribution.first_bin, distribution.counts


@given(st.dictionaries(st.integers(0, BIN_COUNT - 1), st.integers(1, 2**62), max_size=200))
def test_a_packed_histogram_is_the_histogram(counts):
    """Unpacking gives the bins and counts that were packed."""
    bins = sorted(counts)
    text = _histogram.pack(bins, [counts[bin_] for bin_ in bins])
    assert text.isascii()
    found, numbers = _histogram.unpack(text)
    assert (bins, [counts[bin_] for bin_ in bins]) == (found.tolist(), numbers.tolist())


def test_a_packed_histogram_is_short():
    """A thousand times with a spread of 5 % need fewer than 200 characters."""
    times_ns = np.random.default_rng(1).lognormal(np.log(2e6), 0.05, 1000).astype(np.int64)
    assert len(Distribution.of(times_ns).to_dict()["bins"]) < 200


def encoded(form, *numbers):
    """The text of little-endian numbers."""
    return b64encode(zlib.compress(struct.pack(form, *numbers))).decode()


@pytest.mark.parametrize(
    "text",
    ["", "?", "AA==x", "AQAB", "AP//AQ==", encoded("<HB", 7, 1), encoded("<2HQ", 7, 8, 1), encoded("<HQ", 0xFFFF, 1)],
)
def test_what_is_no_packed_histogram_is_refused(text):
    """The error for an invalid text shows the text."""
    with pytest.raises(ValueError, match="Reading a packed histogram from"):
        _histogram.unpack(text)


@given(st.lists(durations, max_size=6))
def test_merging_is_exact_in_any_order(parts):
    """The merged distribution is that of all times together, in any order and grouping."""
    whole = distribution_of([value for part in parts for value in part])
    each = [distribution_of(part) for part in parts]
    for merged in (merge(each), merge(reversed(each)), merge([merge(each[:3]), merge(each[3:])])):
        assert exact(whole) == exact(merged)
        assert (whole.min_ns, whole.max_ns) == (merged.min_ns, merged.max_ns)
        assert whole.m2_ns2 == pytest.approx(merged.m2_ns2, rel=1e-6, abs=1.0)


@given(durations, durations)
def test_what_came_since_is_exact(before, after):
    """Count, total and histogram of a difference are those of the later times alone; extremes are within 1 %."""
    found = distribution_of(before + after).since(distribution_of(before))
    expected = distribution_of(after)
    if not before or after:
        assert exact(expected) == exact(found)
    if after:
        assert expected.min_ns == pytest.approx(found.min_ns, rel=0.01, abs=1)
        assert expected.max_ns == pytest.approx(found.max_ns, rel=0.01, abs=1)
        scale = sum(value * value for value in before + after) + 1.0
        assert expected.m2_ns2 == pytest.approx(found.m2_ns2, rel=1e-6, abs=1e-9 * scale)
    else:
        assert 0 == found.count


def test_one_cumulative_sum_serves_all_quantiles(monkeypatch):
    """Several quantiles read the bins once and sum them once."""
    one = distribution_of(range(1000))
    calls = []
    used = one.used_bins()
    monkeypatch.setattr(Distribution, "used_bins", lambda _: calls.append(1) or used)
    assert 3 == len(one.quantiles([0.5, 0.9, 0.99]))
    assert [1] == calls


class TestSnapshots:
    @pytest.mark.parametrize("keep_last", [None, 0, 5])
    def test_a_difference_holds_what_came_since(self, clock, keep_last):
        """Region by region, for any number kept; a region in which nothing came is left out."""
        tmr = Timer(clock=clock, keep_last=keep_last)

        def spend(key, *times_ms):
            for time_ms in times_ms:
                with tmr.region(key):
                    clock.advance_ns(time_ms * MS)

        spend("a", *range(1, 1001))
        spend("quiet", 5)
        first = tmr.snapshot()
        spend("a", *range(400, 600))
        spend("new", 7)
        second = tmr.snapshot()
        spend("a", 2000)
        third = tmr.snapshot()

        found = second.since(first)
        assert ["a", "new"] == [region.name for region in found]
        a = found.get("a").stats
        assert (200, 99.9) == (a.count, pytest.approx(a.total, abs=1e-12))
        assert a.mean == pytest.approx(0.4995)
        assert a.stdev == pytest.approx(0.05788, rel=1e-3)
        for name, expected in (("median", 0.4995), ("min", 0.4), ("max", 0.599), ("p90", 0.579)):
            assert getattr(a, name) == pytest.approx(expected, rel=0.01), name
        assert 0.01 == a.quantile_error
        assert second.get("new") == found.get("new")
        assert first.unix_time_s == found.since_unix_time_s
        assert None is second.since_unix_time_s is second.since(None).since_unix_time_s

        alone = third.since(second).get("a").stats
        assert (1, 2.0, 2.0) == (alone.count, alone.total, alone.max)

    def test_counters_are_differences_and_states_are_not(self, clock):
        """What only grows is subtracted; running regions are as they are now."""
        tmr = Timer(clock=clock, skip_first=1)
        for _ in range(3):
            with pytest.raises(KeyError), tmr.region("a"):
                raise KeyError
        tmr.start("open")
        first = tmr.snapshot()
        with pytest.raises(KeyError), tmr.region("a"):
            raise KeyError
        tmr.start("b")
        tmr.discard("b")
        found = tmr.snapshot().since(first)
        assert {"a": (1, 0, 0), "b": (0, 1, 0), "open": (0, 0, 1)} == {
            region.name: (region.failed, region.discarded, region.running) for region in found
        }

    def test_after_a_reset_everything_is_new(self, clock):
        """Nothing is subtracted from times that came after a reset."""
        tmr = Timer(clock=clock)
        for _ in range(5):
            tmr.record("a", 0, MS)
        first = tmr.snapshot()
        tmr.reset()
        tmr.record("a", 0, 3 * MS)
        assert tmr.snapshot().since(first).get("a") == tmr.snapshot().get("a")
        tmr.record("a", 0, 3 * MS)
        for _ in range(9):
            tmr.record("a", 0, 4 * MS)
        assert tmr.snapshot().since(first).get("a") == tmr.snapshot().get("a")

    def test_after_a_reset_counters_are_new_as_well(self, clock):
        """Fewer failures than before are those since the reset, after any other calls."""
        tmr = Timer(clock=clock)

        def fail(times):
            for _ in range(times):
                with pytest.raises(KeyError), tmr.region("a"):
                    raise KeyError

        fail(3)
        tmr.record("a", 0, MS)
        first = tmr.snapshot()
        tmr.reset()
        fail(1)
        tmr.start("a")
        found = tmr.snapshot().since(first).get("a")
        assert (1, 1, None, None) == (found.failed, found.running, found.stats, found.distribution)

    def test_warm_up_tells_a_reset_where_no_counter_does(self, clock):
        """Fewer times left out than before were left out since: what failed is not a difference then either."""
        tmr = Timer(clock=clock, skip_first=1)

        def fail(times):
            for _ in range(times):
                with pytest.raises(KeyError), tmr.region("a"):
                    raise KeyError

        for _ in range(2):
            tmr.record("a", 0, MS)
        fail(1)
        first = tmr.snapshot()
        tmr.reset()
        fail(3)
        assert 3 == tmr.snapshot().since(first).get("a").failed

    def test_warm_up_of_a_thread_that_came_since(self, clock, in_thread):
        """Another thread's first times are left out as well, and told in the difference."""
        tmr = Timer(clock=clock, skip_first=2)

        def record():
            for _ in range(3):
                tmr.record("a", 0, MS)

        record()
        first = tmr.snapshot()
        in_thread(record)
        stats = tmr.snapshot().since(first).get("a").stats
        assert (1, 2) == (stats.count, stats.skipped)

    def test_a_region_that_had_no_time_before_has_all_it_has(self, clock):
        """A region that was only open at the first moment is whole at the second."""
        tmr = Timer(clock=clock)
        tmr.start("a")
        first = tmr.snapshot()
        clock.advance_ns(MS)
        tmr.end("a")
        second = tmr.snapshot()
        assert second.get("a") == second.since(first).get("a")

    def test_only_a_counter_has_no_times(self, clock):
        """A failure since is a row without statistics and without a distribution."""
        tmr = Timer(clock=clock)
        tmr.record("a", 0, MS)
        first = tmr.snapshot()
        with pytest.raises(KeyError), tmr.region("a"):
            raise KeyError
        found = tmr.snapshot().since(first).get("a")
        assert (1, None, None) == (found.failed, found.stats, found.distribution)

    @pytest.mark.parametrize("number", [3, 60])
    def test_warm_up_since_a_moment_before_any_time(self, clock, number):
        """Times that are left out as warm-up are counted where no time was known before."""
        tmr = Timer(clock=clock, skip_first=2)
        tmr.start("a")
        first = tmr.snapshot()
        clock.advance_ns(MS)
        tmr.end("a")
        for _ in range(number - 1):
            tmr.record("a", 0, MS)
        stats = tmr.snapshot().since(first).get("a").stats
        assert (number - 2, 2) == (stats.count, stats.skipped)

    def test_warm_up_is_a_difference_too(self, clock):
        """Times that ``skip_first`` left out before are not told again."""
        tmr = Timer(clock=clock, skip_first=2)
        for _ in range(3):
            tmr.record("a", 0, MS)
        first = tmr.snapshot()
        tmr.record("a", 0, MS)
        assert (2, 0) == (first.get("a").stats.skipped, tmr.snapshot().since(first).get("a").stats.skipped)

    def test_it_is_plain_data(self, clock, tmp_path):
        """A difference can be pickled, written and read back, and subtracted from after that."""
        tmr = Timer(clock=clock)
        tmr.record("a", 0, MS)
        first = tmr.snapshot()
        tmr.record("a", 0, 3 * MS)
        exporter = JsonLinesExporter(tmp_path / "times.jsonl", strict=True)
        found = tmr.snapshot().since(first)
        exporter.export(found)
        exporter.export(first)
        (again, _), (first_again, _) = read_json_lines(tmp_path / "times.jsonl")
        assert found == again == pickle.loads(pickle.dumps(found))
        assert (1, 0.003) == (found.get("a").stats.count, found.get("a").stats.total)
        later = tmr.snapshot()
        assert later.since(first).regions == later.since(first_again).regions

    def test_nothing_recorded_has_no_distribution(self, clock):
        """None, as the statistics, and an empty one merges with anything."""
        tmr = Timer(clock=clock)
        tmr.start("a")
        assert None is tmr.snapshot().get("a").distribution
        tmr.end("a")
        some = tmr.snapshot().get("a").distribution
        assert some == merge([EMPTY, some])
        assert None is EMPTY.stats()


def test_a_distribution_tells_its_bins():
    """Which bins are not empty, and how often each was hit, as another rank's columns take them."""
    bins, counts = distribution_of([3, 3, 100, 128, 129, 130]).used_bins()
    assert ([3, 100, 128, 129], [2, 1, 2, 1]) == (bins.tolist(), counts.tolist())


def test_nothing_merged_is_nothing():
    """Merging no parts, or parts without times, gives the empty distribution."""
    assert EMPTY == merge([]) == merge([EMPTY, EMPTY]) == RecordedTimes([]).distribution == distribution_of([])


def test_a_new_extreme_is_exact_and_an_old_one_is_the_middle_of_its_bin():
    """Where a difference has the shortest and longest time of all they are known to the nanosecond."""
    before = distribution_of([1_000_003, 2_000_003])
    new = distribution_of([1_000_003, 2_000_003, 500_001, 4_000_007]).since(before)
    assert (500_001, 4_000_007) == (new.min_ns, new.max_ns)
    within = distribution_of([1_000_003, 2_000_003, 1_200_001, 1_700_007]).since(before)
    # Bins are 1/64 of 2**20 wide there: 16384.
    low, high = 1_200_001 // 16384 * 16384, 1_700_007 // 16384 * 16384
    assert (low + 8191, high + 8191) == (within.min_ns, within.max_ns)


def test_an_empty_distribution_has_no_quantile_and_no_mean():
    """Both raise an error; neither is zero."""
    with pytest.raises(NoTimesError, match="quantile of an empty distribution does not exist; record a time first"):
        EMPTY.quantiles([0.5])
    with pytest.raises(NoTimesError, match="mean of an empty"):
        EMPTY.trimmed_mean_ns(0.1)
