"""The calls of a training script: start, end, region, discard, reset, record, and reading the times."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import deep500_timing
from deep500_timing import CPUGPUTimer, HostClock, RegionMismatchError, Timer, TimeType
from deep500_timing.testing import ManualClock
from deep500_timing.timer import call_directly

S = 1_000_000_000


class TestStartAndEnd:
    def test_a_region_takes_what_the_clock_says(self, tmr, clock):
        """The time of a region is the clock's between its start and its end, in seconds."""
        tmr.start(TimeType.BATCH)
        clock.advance(0.5)
        tmr.end(TimeType.BATCH)
        assert [0.5] == tmr.get_time(TimeType.BATCH)

    @pytest.mark.parametrize("key", list(TimeType))
    def test_every_time_type_is_a_key(self, tmr, clock, key):
        """Each predefined key has its own times."""
        tmr.start(key)
        clock.advance(1)
        tmr.end(key)
        assert {key.name: 1} == {region.name: region.stats.count for region in tmr.snapshot()}

    def test_the_name_of_a_time_type_is_that_time_type(self, tmr, clock):
        """A region may be started as ``"BATCH"`` and ended and read as ``TimeType.BATCH``, and the reverse."""
        tmr.start("BATCH")
        clock.advance(1)
        tmr.end(TimeType.BATCH)
        tmr.start(TimeType.BATCH)
        clock.advance(2)
        tmr.end("BATCH")
        assert [1.0, 2.0] == tmr.get_time("BATCH") == tmr.get_time(TimeType.BATCH)
        assert tmr.region("BATCH") is tmr.region(TimeType.BATCH)
        assert ["BATCH"] == [region.name for region in tmr.snapshot()]

    def test_a_string_names_a_region_of_the_users_own(self, tmr, clock):
        """Equal strings are one key, whether they are the same object or not."""
        tmr.start("load")
        clock.advance(1)
        tmr.end(f"{'load'}"[:2] + "ad")
        assert [1.0] == tmr.get_time("load")

    def test_lower_case_is_another_name(self, tmr):
        """Only the exact name of a ``TimeType`` stands for it."""
        tmr.start("batch")
        tmr.start(TimeType.BATCH)
        tmr.end("batch")
        assert ([0.0], []) == (tmr.get_time("batch"), tmr.get_time(TimeType.BATCH))

    def test_regions_nest(self, tmr, clock):
        """An outer region takes the time of its inner ones as well."""
        tmr.start(TimeType.EPOCH)
        for _ in range(3):
            clock.advance(1)
            tmr.start(TimeType.BATCH)
            clock.advance(2)
            tmr.end(TimeType.BATCH)
        tmr.end(TimeType.EPOCH)
        assert ([9.0], [2.0] * 3) == (tmr.get_time(TimeType.EPOCH), tmr.get_time(TimeType.BATCH))

    def test_regions_overlap(self, tmr, clock):
        """Regions of different keys need not end in the order in which they began."""
        tmr.start("a")
        clock.advance(1)
        tmr.start("b")
        clock.advance(2)
        tmr.end("a")
        clock.advance(4)
        tmr.end("b")
        assert ([3.0], [6.0]) == (tmr.get_time("a"), tmr.get_time("b"))

    def test_many_keys(self, tmr, clock):
        """Regions far more than any table of recent keys holds are kept apart."""
        for i in range(300):
            tmr.start(f"region {i}")
        for i in range(300):
            clock.advance_ns(S)
            tmr.end(f"region {i}")
        assert [[float(i + 1)] for i in range(300)] == [tmr.get_time(f"region {i}") for i in range(300)]

    def test_keys_that_come_and_go(self, tmr, clock):
        """Names made again for each call, with memory that serves again at once, never meet another's region."""
        for i in range(5000):
            key = f"region {i % 50}"
            tmr.start(key)
            clock.advance_ns(i % 50)
            tmr.end(key)
            del key
        for i in range(50):
            assert [i / 1e9] * 100 == tmr.get_time(f"region {i}")

    def test_the_system_clock(self):
        """Without a clock of the user's own, times come from the one behind ``time.perf_counter_ns``."""
        tmr = Timer()
        before = HostClock.now_ns()
        tmr.start("a")
        between = tmr.now_ns()
        tmr.end("a")
        ((start_ns, end_ns),) = tmr.intervals("a").tolist()
        readings = [before, start_ns, between, end_ns, HostClock.now_ns()]
        assert sorted(readings) == readings
        assert repr(HostClock()) == "HostClock()"

    def test_a_users_clock_is_the_timers_clock(self, tmr, clock):
        """``now_ns`` answers with the clock that the timer was given."""
        clock.advance(3)
        assert clock.now_ns() == tmr.now_ns()


class TestRegion:
    def test_with_times_the_block(self, tmr, clock):
        """A ``with`` block is a region."""
        with tmr.region(TimeType.FORWARD):
            clock.advance(0.25)
        assert [0.25] == tmr.get_time(TimeType.FORWARD)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_an_exception_closes_the_region_and_counts_as_failed(self, tmr, clock, error):
        """At any end of the block, the region is closed, not kept, and counted; the exception goes on."""
        with pytest.raises(error), tmr.region("a"):
            clock.advance(1)
            raise error
        with tmr.region("a"):
            clock.advance(2)
        times = tmr.snapshot().get("a")
        assert ([2.0], 1, 0, 0) == (tmr.get_time("a"), times.failed, times.running, times.discarded)

    def test_the_handle_is_the_same_each_time(self, tmr):
        """A thread gets one handle for each key."""
        assert tmr.region("a") is tmr.region("a")
        assert tmr.region("a") is not tmr.region("b")

    def test_a_handle_can_be_used_for_ever(self, tmr, clock):
        """``start`` and ``end`` of a handle do the same as the timer's."""
        region = tmr.region("a")
        for seconds in (1, 2, 3):
            region.start()
            clock.advance(seconds)
            region.end()
        with region as entered:
            clock.advance(4)
        assert entered is region
        assert [1.0, 2.0, 3.0, 4.0] == tmr.get_time("a")

    def test_handle_and_key_are_one_region(self, tmr, clock):
        """A region started through its handle can be ended by its key, and the reverse."""
        region = tmr.region("a")
        region.start()
        clock.advance(1)
        tmr.end("a")
        tmr.start("a")
        clock.advance(2)
        region.end()
        assert [1.0, 2.0] == tmr.get_time("a")

    def test_fail_closes_without_keeping(self, tmr):
        """``fail`` counts an open region as failed, does nothing to one that is closed, and tells which it was."""
        region = tmr.region("a")
        was_open = [tmr.fail("a")]
        region.start()
        was_open += [tmr.fail("a"), tmr.fail("a")]
        assert [False, True, False] == was_open
        assert ([], 1) == (tmr.get_time("a"), tmr.snapshot().get("a").failed)

    def test_repr_says_what_it_is(self, tmr):
        """A handle shows name, state and how much it has recorded."""
        region = tmr.region("a")
        region.start()
        assert "<region 'a', open, 0 intervals>" == repr(region)
        region.end()
        assert "<region 'a', closed, 1 intervals>" == repr(region)

    def test_a_key_serves_a_handle(self, tmr):
        """A handle knows its key."""
        assert (TimeType.BATCH, "a") == (tmr.region("BATCH").key, tmr.region("a").key)


class TestDiscard:
    def test_a_with_block_may_be_forgotten_from_inside(self, tmr, clock):
        """The end of the block is no error then, nor is the next block left out."""
        for seconds in (1, 2):
            with tmr.region("a"):
                clock.advance(seconds)
                if seconds == 1:
                    tmr.discard("a")
        assert ([2.0], 1) == (tmr.get_time("a"), tmr.snapshot().get("a").discarded)

    def test_an_open_region_is_forgotten_and_counted(self, tmr, clock):
        """``discard`` closes without keeping, and says whether there was anything to forget."""
        tmr.start("a")
        clock.advance(1)
        assert (True, False) == (tmr.discard("a"), tmr.discard("a"))
        tmr.start("a")
        clock.advance(2)
        tmr.end("a")
        assert ([2.0], 1) == (tmr.get_time("a"), tmr.snapshot().get("a").discarded)

    def test_other_regions_go_on(self, tmr, clock):
        """Discarding one region leaves the others open."""
        tmr.start("a")
        tmr.start("b")
        tmr.discard("a")
        clock.advance(1)
        tmr.end("b")
        assert [1.0] == tmr.get_time("b")

    def test_discard_of_an_unknown_key(self, tmr):
        """Nothing is there to forget, and no region appears in reports."""
        assert tmr.discard("a") is False
        assert () == tmr.snapshot().regions


class TestReset:
    def test_finished_times_and_counts_are_forgotten(self, tmr, clock):
        """After ``reset`` the timer reports nothing of what had ended."""
        with tmr.region("a"):
            clock.advance(1)
        tmr.start("a")
        tmr.discard("a")
        tmr.reset()
        assert ([], ()) == (tmr.get_time("a"), tmr.snapshot().regions)

    def test_open_regions_stay_open(self, tmr, clock):
        """A region that spans a ``reset`` is kept when it ends."""
        tmr.start("a")
        clock.advance(1)
        tmr.reset()
        clock.advance(1)
        tmr.end("a")
        assert [2.0] == tmr.get_time("a")

    def test_a_handle_survives(self, tmr, clock):
        """A handle from before ``reset`` records into later reports."""
        region = tmr.region("a")
        with region:
            clock.advance(1)
        tmr.reset()
        with region:
            clock.advance(2)
        assert [2.0] == tmr.get_time("a")


class TestRecord:
    def test_an_interval_measured_elsewhere_is_kept(self, tmr):
        """``record`` keeps start and end as they are given."""
        tmr.record("a", 5, 5 + S)
        tmr.record("BATCH", 0, 0)
        assert ([1.0], [[5, 5 + S]], [0.0]) == (
            tmr.get_time("a"),
            tmr.intervals("a").tolist(),
            tmr.get_time(TimeType.BATCH),
        )

    def test_an_open_region_of_the_key_goes_on(self, tmr, clock):
        """``record`` neither opens nor closes anything."""
        tmr.start("a")
        tmr.record("a", 0, S)
        clock.advance(2)
        tmr.end("a")
        assert [1.0, 2.0] == tmr.get_time("a")

    def test_a_disabled_timer_keeps_nothing(self, clock):
        """``record`` does nothing while the timer is disabled."""
        tmr = Timer(clock=clock, enabled=False)
        tmr.record("a", 0, S)
        assert [] == tmr.get_time("a")

    @given(st.lists(st.tuples(st.integers(-(2**60), 2**60), st.integers(0, 2**60)), max_size=200))
    def test_intervals_come_back_as_they_went_in(self, pairs):
        """Starts and ends come back exactly, in order, as int64 of shape (n, 2)."""
        tmr = Timer()
        expected = [[start, start + length] for start, length in pairs]
        for start, end in expected:
            tmr.record("a", start, end)
        kept = tmr.intervals("a")
        assert (np.int64, (len(pairs), 2), expected) == (kept.dtype, kept.shape, kept.tolist())


class TestReading:
    def test_an_unused_region_has_no_times(self, tmr):
        """``get_time`` of an unused key is an empty list, and asking creates no region."""
        assert [] == tmr.get_time("never")
        assert (0, 2) == tmr.intervals("never").shape
        assert () == tmr.snapshot().regions

    def test_times_are_a_copy(self, tmr):
        """What ``get_time`` hands out is the caller's own."""
        tmr.record("a", 0, S)
        tmr.get_time("a").append(7.0)
        tmr.intervals("a")[:] = 9
        assert [1.0] == tmr.get_time("a")

    def test_more_than_a_block(self, tmr, clock):
        """Times beyond any internal block come back whole and in order."""
        expected = [float(i % 17) for i in range(5000)]
        for seconds in expected:
            tmr.start("a")
            clock.advance(seconds)
            tmr.end("a")
        assert expected == tmr.get_time("a")

    def test_statistics(self, tmr):
        """``get_time_stats`` gives the contract's five numbers, in seconds, and more."""
        for seconds in (1, 2, 3, 10):
            tmr.record("a", 0, seconds * S)
        stats = tmr.get_time_stats("a")
        assert (1.0, 4.0, 2.5, 10.0, 4, 16.0) == (
            stats.min,
            stats.mean,
            stats.median,
            stats.max,
            stats.count,
            stats.total,
        )
        assert pytest.approx(4.08248290463863) == stats.stdev

    def test_reading_while_regions_are_open(self, tmr):
        """Open regions are counted as running and disturb nothing."""
        tmr.start("a")
        tmr.start(TimeType.BATCH)
        tmr.record("b", 0, S)
        snapshot = tmr.snapshot()
        assert [("BATCH", 1, None), ("a", 1, None)] == [
            (region.name, region.running, region.stats) for region in snapshot if region.running
        ]
        assert 1 == snapshot.get("b").stats.count

    def test_repr_counts_intervals(self, tmr):
        """A timer shows how much it has recorded and whether it is on."""
        tmr.record("a", 0, S)
        assert f"<{type(tmr).__name__}: 1 intervals>" == repr(tmr)
        tmr.enabled = False
        assert f"<{type(tmr).__name__}: 1 intervals, disabled>" == repr(tmr)

    def test_complete_all_is_allowed(self, tmr):
        """``complete_all`` returns at once where there is nothing to wait for."""
        assert tmr.complete_all() is None


def test_the_negative_time_of_a_bad_clock_counts_as_zero():
    """A clock of the user's own that runs backwards gives no negative times and statistics, folded or not."""
    for keep_last in (None, 0):
        clock = ManualClock()
        tmr = Timer(clock=clock, keep_last=keep_last)
        for _ in range(300):
            tmr.start("a")
            clock.advance_ns(-5)
            tmr.end("a")
        stats = tmr.get_time_stats("a")
        assert (300, 0.0, 0.0, 0.0) == (stats.count, stats.min, stats.max, stats.total)
        assert not any(tmr.get_time("a"))


def test_convenience_methods_print_and_save(tmr, tmp_path):
    """The table goes to any object with ``write``, and to a new file; an existing one is left as it is."""
    tmr.record("load", 0, S)
    tmr.start("open one")
    printed = io.StringIO()
    tmr.print_all_time_stats(file=printed)
    assert "load" in printed.getvalue()
    path = tmp_path / "times.txt"
    tmr.save_all_time_stats(path)
    written = path.read_text()
    assert "load" in written
    assert tmp_path / "times-2.txt" == Path(tmr.save_all_time_stats(path))
    assert written == path.read_text()


def test_compiled_says_which_form_runs():
    """``compiled`` is true exactly when the hot path is an extension module."""
    from deep500_timing import timer as _timer
    from deep500_timing._recording import intervals as _intervals
    from deep500_timing._recording import recorder as _recorder

    for module in (_intervals, _recorder, _timer):
        assert deep500_timing.compiled is not str(module.__file__).endswith(".py")


class TestOneClass:
    def test_both_names_stand_for_it(self):
        """``CPUGPUTimer`` is the name that users know; it is the same class."""
        assert Timer is CPUGPUTimer

    def test_gpu_is_known_without_a_device(self, clock):
        """A timer without a device takes ``gpu`` everywhere, and gives CPU times."""
        tmr = Timer(clock=clock)
        tmr.start("a", gpu=True)
        clock.advance(0.5)
        tmr.end("a", gpu=True)
        with tmr.region("a", gpu=True):
            clock.advance(0.25)
        tmr.timed("a", gpu=True)(lambda: clock.advance(1.0))()
        assert [None] == list(tmr.iterate([None], "io", gpu=True))
        assert [0.5, 0.25, 1.0] == tmr.get_time("a")
        assert [] == tmr.get_time("a", gpu=True)

    def test_a_region_that_was_begun_with_the_device_ends_with_it(self, clock):
        """The same ``gpu`` is asked for at start and end, device or not."""
        tmr = Timer(clock=clock)
        tmr.start("a", gpu=True)
        with pytest.raises(RegionMismatchError):
            tmr.end("a")
        tmr.end("a", gpu=True)
        assert 1 == len(tmr.get_time("a"))

    def test_a_subclass_that_is_called_directly_is_the_same(self, clock):
        """The fast path of an adapter's class changes neither its results nor what it overrides."""

        @call_directly
        class Plain(Timer):
            __slots__ = ()

        @call_directly
        class Own(Timer):
            def start(self, key, gpu=False):
                super().start(f"own {key}", gpu)

        tmr, own = Plain(clock=clock), Own(clock=clock)
        for timer in (tmr, own):
            timer.start("a")
        clock.advance(0.5)
        tmr.end("a")
        own.end("own a")
        with tmr.region("a"):
            clock.advance(0.25)
        assert [0.5, 0.25] == tmr.get_time("a")
        assert [0.5] == own.get_time("own a")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("way", ["start/end", "handle", "with", "timed", "iterate"])
def test_the_system_clock_by_each_way(way, gpu):
    """On the system's own clock, each interval lies between two readings of it, whichever way it is taken."""
    tmr = Timer()
    before = HostClock.now_ns()
    if way == "start/end":
        tmr.start("a", gpu)
        tmr.end("a", gpu)
    elif way == "handle":
        tmr.region("a", gpu).start()
        tmr.region("a", gpu).end()
    elif way == "with":
        with tmr.region("a", gpu):
            pass
    elif way == "timed":
        tmr.timed("a", gpu)(lambda: None)()
    else:
        assert [1] == list(tmr.iterate([1], "a", gpu))
    after = HostClock.now_ns()
    ((start, end),) = tmr.intervals("a").tolist()
    assert before <= start <= end <= after
