"""The kept intervals: 16 bytes each, or the last N of them and exact aggregates of all."""

from __future__ import annotations

import gc
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing._recording.intervals import BIN_COUNT, Intervals
from deep500_timing._summary.distribution import bin_bounds, bin_of

S = 1_000_000_000
# As long as a week: sums of thousands of them fit into 64 bits, as a run's do.
DURATIONS = st.one_of(st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 6 * 10**14))


def fill(tmr, durations, key="a"):
    """Record intervals of those durations, one after the other."""
    now = 0
    for duration in durations:
        tmr.record(key, now, now + duration)
        now += duration


@pytest.mark.parametrize("way", ["start/end", "record"])
def test_a_kept_interval_weighs_16_bytes(way):
    """Start and duration, and no more than one percent on top."""
    number = 100_000

    def weight():
        tmr = Timer()

        def pairs(n):
            for _ in range(n):
                if way == "record":
                    tmr.record("a", 1 << 40, 1 << 41)
                else:
                    tmr.start("a")
                    tmr.end("a")

        pairs(10)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            pairs(number)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        return (after - before) / number

    # What other threads of the test run allocate meanwhile is counted too, and only ever adds.
    assert min(weight() for _ in range(3)) <= 16 * 1.01


@pytest.mark.parametrize("keep_last", [0, 1, 5, 63, 64, 65, 127, 128, 129, 1000, 5000])
@pytest.mark.parametrize("number", [0, 1, 5, 127, 128, 129, 1000, 3000])
def test_the_last_n_are_kept(keep_last, number):
    """Exactly the newest intervals come back, while the statistics stand on all."""
    tmr = Timer(keep_last=keep_last)
    durations = [1 + (i * 7919) % 1000 for i in range(number)]
    fill(tmr, durations)
    expected = durations[-keep_last:] if keep_last else []
    assert [duration / 1e9 for duration in expected] == tmr.get_time("a")
    if number:
        stats = tmr.get_time_stats("a")
        assert (number, sum(durations) / 1e9, min(durations) / 1e9, max(durations) / 1e9) == (
            stats.count,
            stats.total,
            stats.min,
            stats.max,
        )


@given(st.lists(DURATIONS, min_size=1, max_size=600), st.integers(0, 200), st.integers(0, 300))
# Lists that are drawn are seldom long enough to be aggregated beyond the warm-up.
@example([1 + (i * 7919) % 1000 for i in range(600)], 10, 100)
@example([1000 - i for i in range(600)], 0, 300)
def test_aggregates_are_exact_for_the_whole_run(durations, keep_last, skip_first):
    """Count, total, extremes and mean are those of every interval; the deviation to twelve digits."""
    tmr = Timer(keep_last=keep_last, skip_first=skip_first)
    fill(tmr, durations)
    counted = durations[skip_first:]
    times = tmr.snapshot().get("a")
    if not counted:
        assert times.stats is None
        return
    stats = times.stats
    assert (
        len(counted),
        min(skip_first, len(durations)),
        sum(counted) / 1e9,
        min(counted) / 1e9,
        max(counted) / 1e9,
        sum(counted) / len(counted) / 1e9,
    ) == (stats.count, stats.skipped, stats.total, stats.min, stats.max, stats.mean)
    if len(counted) > 1:
        mean = Fraction(sum(counted), len(counted))
        variance = sum((duration - mean) ** 2 for duration in counted) / (len(counted) - 1)
        # What two doubles of this size can differ by, the spread being small next to them.
        assert pytest.approx(float(variance) ** 0.5, rel=1e-9, abs=1e-7 * float(mean)) == stats.stdev * 1e9
    else:
        assert 0.0 == stats.stdev


def rows_of(parts, width):
    """The integers of each interval, from bytes."""
    return list(zip(*[iter(memoryview(b"".join(parts)).cast("q").tolist())] * width, strict=True))


def duration_of(number):
    """The length in ns of the so manyth interval, of every size up to two days."""
    return number * number * 7919 % 2 ** (number % 48)


@given(
    st.sampled_from([-1, 0, 1, 40, 300]),
    st.sampled_from([0, 1, 100]),
    st.lists(st.one_of(st.integers(1, 400), st.sampled_from(["attach", "log", "detach", "look"])), max_size=12),
    st.booleans(),
)
def test_what_is_kept_and_what_is_aggregated_are_all(keep_last, skip_first, steps, on_device):
    """After any reading of a log: the oldest are in the aggregates, the rest as they came, and the log loses none."""
    intervals = Intervals(keep_last, skip_first, on_device=on_device)
    pairs = []
    logged, taken, before = False, 0, 0
    for step in [*steps, "log", "look"]:
        if isinstance(step, int):
            for _ in range(step):
                start = 3 * len(pairs)
                on_host = (start - 2, start - 1) if on_device else ()
                pairs.append((start, start + duration_of(len(pairs)), *on_host))
                intervals.append(*pairs[-1])
        elif step == "attach":
            intervals.attach()
            if not logged:
                logged, taken, before = True, 0, intervals.kept()[1]
        elif step == "detach":
            intervals.detach()
            logged = False
        elif step == "log":
            aggregated = intervals.kept()[1]
            found, recorded, lost = intervals.since(taken)
            first = max(taken, aggregated)
            assert [number for pair in pairs[first:] for number in pair] == memoryview(found).cast("q").tolist()
            assert (len(pairs), max(aggregated - taken, 0)) == (recorded, lost)
            if logged:
                taken = recorded
                intervals.took(taken)
        else:
            parts, aggregated = intervals.kept()
            assert pairs[aggregated:] == rows_of(parts, intervals.width)
            assert len(pairs) == intervals.count
            lengths = [end - start for start, end, *_ in pairs[skip_first:]]
            recorded, *moments, m2, first_bin, counts = intervals.digest()[:7]
            assert len(pairs) == recorded
            assert [sum(lengths), min(lengths, default=0), max(lengths, default=0)] == moments
            mean = sum(lengths) / max(len(lengths), 1)
            assert pytest.approx(sum((length - mean) ** 2 for length in lengths)) == m2
            expected = np.bincount(bin_of(np.array(lengths, dtype=np.int64)))
            assert expected[first_bin:].tolist() == np.frombuffer(counts, dtype=np.int64).tolist()
            assert 0 == expected[:first_bin].sum()
            if keep_last < 0:
                assert 0 == aggregated
            elif logged:
                assert aggregated <= max(before, taken)


def test_to_attach_a_log_again_changes_nothing():
    """Its read intervals are released as before."""
    intervals = Intervals(0, 0)
    for _ in range(2):
        intervals.attach()
        for number in range(512):
            intervals.append(number, number)
        if not intervals.kept()[1]:
            intervals.took(512)
    assert 512 == intervals.kept()[1]


@pytest.mark.parametrize("keep_last", [0, 7, 200])
def test_no_more_is_kept_than_a_buffer_beside(keep_last):
    """Of any number of intervals all but the newest, and what fills a buffer, are aggregated."""
    intervals = Intervals(keep_last, 0)
    most = 0
    for number in range(3000):
        intervals.append(number, 2 * number)
        most = max(most, sum(map(len, intervals.kept()[0])) // 16)
    assert keep_last <= most <= keep_last + 256


@given(st.lists(DURATIONS, min_size=1, max_size=1000))
def test_percentiles_are_within_one_percent(durations):
    """Of folded intervals, every percentile is within 1 % of the exact one, and the extremes bound it."""
    tmr = Timer(keep_last=0)
    fill(tmr, durations)
    stats = tmr.get_time_stats("a")
    expected = np.percentile(np.array(durations), (50, 90, 95, 99)) / 1e9
    for exact, found in zip(expected, (stats.median, stats.p90, stats.p95, stats.p99), strict=True):
        if stats.quantile_error:
            # The nanosecond that is the resolution of a bin's middle, next to the percentage.
            assert pytest.approx(exact, rel=stats.quantile_error, abs=1e-15) == found
        else:
            assert pytest.approx(exact, rel=1e-12) == found
        assert stats.min <= found <= stats.max


@given(st.integers(1, 4), st.lists(DURATIONS, min_size=1, max_size=400), st.integers(0, 60))
def test_skip_first_is_for_each_thread(threads, durations, skip_first):
    """Each thread's first intervals are warm-up, and left out for each."""
    import threading

    tmr = Timer(skip_first=skip_first, keep_last=3)
    together = threading.Barrier(threads)

    def worker():
        together.wait()
        fill(tmr, durations)
        together.wait()

    running = [threading.Thread(target=worker) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    counted = durations[skip_first:] * threads
    stats = tmr.snapshot().get("a").stats
    if not counted:
        assert stats is None
    else:
        assert (len(counted), sum(counted) / 1e9, threads * min(skip_first, len(durations))) == (
            stats.count,
            stats.total,
            stats.skipped,
        )


def test_skip_first_is_for_each_of_threads_in_a_row(in_thread):
    """A thread that begins as another has ended warms up again, though it may record where that one did."""
    tmr = Timer(skip_first=3)
    for _ in range(8):
        in_thread(lambda: fill(tmr, [S] * 10))
    stats = tmr.get_time_stats("a")
    assert (56, 24) == (stats.count, stats.skipped)


def test_skip_first_leaves_the_times_themselves():
    """Warm-up is left out of the statistics; ``get_time`` shows every interval that is kept."""
    tmr = Timer(skip_first=2)
    fill(tmr, [9 * S, 8 * S, S, 3 * S])
    stats = tmr.get_time_stats("a")
    assert ([9.0, 8.0, 1.0, 3.0], 2, 2.0, 2) == (tmr.get_time("a"), stats.count, stats.mean, stats.skipped)


def test_statistics_say_how_exact_their_percentiles_are():
    """From the times themselves 0, from the histogram 1 %."""
    tmr = Timer(keep_last=0)
    fill(tmr, [5])
    assert 0.0 == tmr.get_time_stats("a").quantile_error
    fill(tmr, [5] * 1000)
    assert 0.01 == tmr.get_time_stats("a").quantile_error


def powers_of_two():
    """Every power of two that fits, and its neighbours."""
    values = {0, 2**63 - 1}
    for exponent in range(63):
        values |= {2**exponent - 1, 2**exponent, 2**exponent + 1}
    return sorted(values)


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=50))
@example(powers_of_two())
def test_both_binnings_agree(values):
    """The scalar arithmetic of the hot path and numpy's put each duration into one bin, which holds it."""
    store = Intervals(0, 0)
    for value in values:
        store.append(0, value)
    bins = bin_of(np.array(values, dtype=np.int64))
    assert store.digest()[5:7] == (bins.min(), np.bincount(bins - bins.min()).tobytes())
    for value, (low, width) in zip(values, map(bin_bounds, bins.tolist()), strict=True):
        assert low <= value < low + width


def test_bins_cover_everything_without_gap_or_overlap():
    """Each bin begins where the one before ends, and the last ends with the largest duration."""
    bounds = [bin_bounds(index) for index in range(BIN_COUNT)]
    assert 0 == bounds[0][0]
    assert [low + width for low, width in bounds[:-1]] == [low for low, _ in bounds[1:]]
    assert 2**63 == sum(bounds[-1])
    for low, width in bounds:
        assert (width - 1) / 2 <= 0.008 * low or width == 1


@pytest.mark.slow
def test_a_million_regions_in_a_bounded_timer():
    """The count is exact and the blocks are as many as for a thousand."""
    tmr = Timer(keep_last=100)
    fill(tmr, range(1000))
    blocks = len(tmr._stores("a", False)[0].kept()[0])
    fill(tmr, [7] * 999_000)
    stats = tmr.get_time_stats("a")
    assert (1_000_000, 7e-9, 9.99e-7) == (stats.count, stats.median, stats.max)
    assert blocks == len(tmr._stores("a", False)[0].kept()[0])
