"""SynchronizedWallClockTimer on the host's clock and on a device."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import types
import warnings
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import CPUGPUTimer, RegionNotOpenError, RegionOpenError, Timer, TimeType, TimingWarning
from deep500_timing.devices import lazy_device
from deep500_timing.memory import MemoryUsage
from deep500_timing.testing import InMemoryExporter, ManualClock, ManualDeviceClock
from deep500_timing.wallclock import (
    BACKWARD_REDUCE_GLOBAL_TIMER,
    FORWARD_GLOBAL_TIMER,
    FORWARD_MICRO_TIMER,
    NoopTimer,
    SynchronizedWallClockTimer,
)


@pytest.fixture
def lines():
    """The logged lines."""
    return []


@pytest.fixture
def timers(clock, lines):
    """A group on the host's clock."""
    return SynchronizedWallClockTimer(clock=clock, logging_fn=lines.append)


@pytest.fixture
def device_timers(clock, device, lines):
    """A group on a device."""
    return SynchronizedWallClockTimer(clock=clock, device_clock=device, logging_fn=lines.append)


def spend(timer, clock, *seconds, **stop):
    """Time some intervals."""
    for length in seconds:
        timer.start()
        clock.advance(length)
        timer.stop(**stop)


class TestOnTheHost:
    def test_elapsed_is_the_sum_in_milliseconds(self, timers, clock):
        """``elapsed`` is the sum of the times since the last reset, in ms."""
        spend(timers("fwd"), clock, 0.010, 0.020)
        assert timers("fwd").elapsed(reset=False) == pytest.approx(30.0)
        assert timers("fwd").elapsed() == pytest.approx(30.0)
        assert timers("fwd").elapsed() == 0.0

    def test_elapsed_of_a_running_timer_reads_and_goes_on(self, timers, clock):
        """A timer that runs may be asked, with and without a reset, and runs on."""
        timer = timers("fwd")
        timer.start()
        clock.advance(0.010)
        assert timer.elapsed(reset=False) == pytest.approx(10.0)
        clock.advance(0.005)
        assert timer.elapsed(reset=True) == pytest.approx(15.0)
        assert timer.started_
        clock.advance(0.002)
        timer.stop()
        assert timer.elapsed() == pytest.approx(2.0)

    def test_mean_leaves_out_a_tenth_at_either_end(self, timers, clock):
        """The mean of ten times is that of the middle eight."""
        spend(timers("fwd"), clock, 1.0, *[0.010] * 8, 0.0)
        assert timers("fwd").mean() == pytest.approx(10.0)

    def test_mean_of_nothing_is_zero(self, timers):
        """A timer that was never started has the mean 0."""
        assert timers("fwd").mean() == 0.0

    def test_stop_with_reset_keeps_this_time_alone(self, timers, clock):
        """``stop(reset=True)`` forgets earlier times."""
        spend(timers("fwd"), clock, 0.010)
        spend(timers("fwd"), clock, 0.020, reset=True)
        assert timers("fwd").elapsed() == pytest.approx(20.0)

    def test_recorded_times_outlive_a_reset_of_the_sum(self, timers, clock):
        """``stop(record=True)`` keeps a time for the mean when a log resets the timer."""
        spend(timers("fwd"), clock, 0.010, record=True)
        timers.log(["fwd"])
        spend(timers("fwd"), clock, 0.020, record=True)
        timers.log(["fwd"])
        spend(timers("fwd"), clock, 0.500)
        assert timers("fwd").mean() == pytest.approx(15.0)

    def test_start_twice_names_timer_and_remedy(self, timers):
        """Starting a timer that runs is an error, and the timer runs on."""
        timers("fwd").start()
        with pytest.raises(RegionOpenError, match=r"timer 'fwd'.*running already.*Stop it first.*reset\(\)"):
            timers("fwd").start()
        assert timers("fwd").started_

    def test_stop_without_start_names_timer_and_remedy(self, timers):
        """Stopping a timer that does not run is an error."""
        with pytest.raises(RegionNotOpenError, match=r"timer 'fwd'.*not running.*Start it first"):
            timers("fwd").stop()

    def test_reset_forgets_the_start_as_well(self, timers, clock):
        """``reset`` of a timer that runs stops it, and nothing is left."""
        spend(timers("fwd"), clock, 0.010, record=True)
        timers("fwd").start()
        timers("fwd").reset()
        assert not timers("fwd").started_
        assert (timers("fwd").elapsed(), timers("fwd").mean()) == (0.0, 0.0)

    def test_a_timer_belongs_to_no_thread(self, timers, clock, in_thread):
        """It may be started on one thread and stopped on another, as backward passes are."""
        timers("bwd").start()
        clock.advance(0.010)
        in_thread(timers("bwd").stop)
        assert timers("bwd").elapsed() == pytest.approx(10.0)

    def test_a_thread_that_ends_takes_no_timer_along(self, timers, clock, in_thread):
        """A timer that was made and started on a thread that has ended goes on."""
        in_thread(lambda: timers("bwd").start())
        clock.advance(0.010)
        timers("bwd").stop()
        assert timers("bwd").elapsed() == pytest.approx(10.0)

    def test_regions_of_the_same_name_are_their_own(self, clock):
        """A region of the timer below may be open together with a named timer of its name; reports add them up."""
        tmr = Timer(clock=clock)
        group = SynchronizedWallClockTimer(tmr)
        with tmr.region("fwd"):
            spend(group("fwd"), clock, 0.010)
        assert group("fwd").elapsed() == pytest.approx(10.0)
        assert tmr.get_time_stats("fwd").count == 2

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_process_times_on_its_own(self, timers, clock):
        """The child starts with nothing open, and its times stand in its own snapshots."""
        timers("fwd").start()
        child = os.fork()
        if child == 0:
            spend(timers("fwd"), clock, 0.010)
            count = timers.timer.snapshot().get("fwd").stats.count
            os._exit(0 if count == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert timers("fwd").started_

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_process_has_none_of_its_parents_times(self, timers, clock):
        """The parent reports the times that it had not read yet."""
        spend(timers("fwd"), clock, 0.010, 0.020)
        child = os.fork()
        if child == 0:
            spend(timers("fwd"), clock, 0.005)
            elapsed = timers("fwd").elapsed()
            os._exit(0 if elapsed == pytest.approx(5.0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert timers("fwd").elapsed() == pytest.approx(30.0)

    def test_starting_while_the_timer_below_is_off_does_nothing(self, timers, clock):
        """A start on a disabled timer opens nothing, on the host and with every setting."""
        for group in (timers, SynchronizedWallClockTimer(clock=clock, reentrant=True)):
            group.timer.enabled = False
            group("fwd").start()
            assert not group("fwd").started_
            group.timer.enabled = True
            spend(group("fwd"), clock, 0.010)
            assert group("fwd").elapsed() == pytest.approx(10.0)

    def test_reentrant_timers_time_the_outermost_pair(self, clock):
        """Nested starts are counted where that was asked for."""
        timers = SynchronizedWallClockTimer(clock=clock, reentrant=True)
        timer = timers("bwd")
        for step in (timer.start, timer.start, timer.stop, timer.stop):
            step()
            clock.advance(0.010)
        assert timer.elapsed() == pytest.approx(30.0)
        with pytest.raises(RegionNotOpenError):
            timer.stop()

    def test_disabling_forgives_what_was_open(self, timers, clock):
        """Switching the group's timer off and on costs the time that was open, and no error."""
        timers("fwd").start()
        timers.timer.enabled = False
        timers("fwd").stop()
        timers.timer.enabled = True
        timers("fwd").stop()
        spend(timers("fwd"), clock, 0.010)
        assert timers("fwd").elapsed() == pytest.approx(10.0)

    def test_what_was_read_of_a_dropped_stretch_is_taken_off_no_other(self, timers, clock):
        """A timer that was read while it ran, and then switched off, times the next stretch from its own start."""
        timer = timers("fwd")
        timer.start()
        clock.advance(0.010)
        assert timer.elapsed() == pytest.approx(10.0)
        timers.timer.enabled = False
        clock.advance(1.0)
        timers.timer.enabled = True
        timer.start()
        clock.advance(0.005)
        assert timer.elapsed() == pytest.approx(5.0)
        timers.timer.enabled = False
        timers.timer.enabled = True
        clock.advance(1.0)
        spend(timer, clock, 0.003)
        assert timer.elapsed() == pytest.approx(3.0)

    def test_a_start_in_the_nanosecond_of_the_last_end_is_running_time(self, timers, clock):
        """Between two stretches there need be no time at all."""
        timer = timers("fwd")
        spend(timer, clock, 0.010)
        timer.start()
        clock.advance(0.005)
        assert timer.elapsed() == pytest.approx(15.0)

    def test_means_stand_on_a_bounded_number_and_sums_on_all(self, timers, clock):
        """A timer without resets does not grow for ever."""
        timer = timers("fwd")
        for _ in range(70_000):
            timer.start()
            clock.advance_ns(1_000)
            timer.stop()
        assert timer.elapsed(reset=False) == pytest.approx(70.0)
        assert len(timer.read().durations_ns) == 65_536

    @given(st.lists(st.integers(0, 10**9), max_size=40))
    def test_sum_and_mean_hold_for_any_times(self, lengths):
        """Sum and mean are right for any times, zero included."""
        clock = ManualClock()
        timer = SynchronizedWallClockTimer(clock=clock)("any")
        for length in lengths:
            timer.start()
            clock.advance_ns(length)
            timer.stop()
        cut = round(len(lengths) * 0.1)
        middle = sorted(lengths)[cut : len(lengths) - cut]
        assert timer.mean() == pytest.approx(sum(middle) / len(middle) / 1e6 if middle else 0.0)
        assert timer.elapsed() == pytest.approx(sum(lengths) / 1e6)


def of_region(timer):
    """The statistics of all of a named timer's times on the host, in its region."""
    return timer._timer.snapshot().get(timer.name).stats


class TestReadFromAnotherThread:
    """One thread trains, another reads: the first meets no error, and every time is in one answer."""

    def train_and_read(self, read, stops=3000):
        """What went wrong in either thread, and how much the training thread timed."""
        group = SynchronizedWallClockTimer()
        timer = group("fwd")
        faults = []
        done = threading.Event()

        def train():
            try:
                for _ in range(stops):
                    timer.start()
                    timer.stop()
            except Exception as error:
                faults.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=train)
        thread.start()
        while not done.is_set():
            read(group)
        thread.join()
        read(group)
        assert faults == []
        assert not timer.started_
        pairs = group.timer.intervals("fwd")
        return timer, int((pairs[:, 1] - pairs[:, 0]).sum()) if len(pairs) == stops else None

    def test_elapsed_adds_up(self, switching):
        """The reads add up to the timed total, to the nanosecond, with running intervals split."""
        got_ns = []
        timer, _ = self.train_and_read(lambda group: got_ns.append(group("fwd").read(reset=True).total_ns))
        assert of_region(timer).total == pytest.approx(sum(got_ns) / 1e9, abs=1e-9)
        assert of_region(timer).count == 3000

    def test_means_can_be_had(self, switching):
        """A mean uses a copy that no thread adds to."""
        means = []
        self.train_and_read(lambda group: means.append((group("fwd").mean(), group.get_mean(["fwd"])["fwd"])))
        assert all(mean >= 0.0 for pair in means for mean in pair)

    def test_no_mean_is_negative_where_a_reader_comes_between_a_stop_and_its_clock(self):
        """The reader counts up to 10 ns, the stop was at 8: the sum is corrected, the mean has no time of -2 ns."""
        clock = ManualClock()
        clock.now_ns = iter([0, 10, 8]).__next__
        timer = SynchronizedWallClockTimer(clock=clock)("fwd")
        timer.start()
        assert timer.elapsed() * 1e6 == pytest.approx(10.0)
        timer.stop()
        assert timer.mean() == 0.0
        assert timer.read().total_ns == -2

    @pytest.mark.parametrize("rounds", [1, 3])
    def test_no_time_is_twice_where_another_begins_between_two_looks(self, timers, clock, monkeypatch, rounds):
        """A reader has counted an interval that runs; it ends and others begin when the next one has read the queue."""
        timer = timers("fwd")
        timer.start()
        clock.advance(0.010)
        got_ns = [timer.read(reset=True).total_ns]
        count = timer._count_running

        def go_on_and_count():
            for _ in range(rounds):
                clock.advance(0.005)
                timer.stop()
                timer.start()
                count()
            clock.advance(0.003)
            count()

        with monkeypatch.context() as patches:
            patches.setattr(timer, "_count_running", go_on_and_count)
            got_ns.append(timer.read(reset=True).total_ns)
        timer.stop()
        got_ns.append(timer.read(reset=True).total_ns)
        assert round(1e9 * of_region(timer).total) == sum(got_ns) == 13_000_000 + 5_000_000 * rounds

    def test_the_lines_of_a_log_have_every_time(self, switching):
        """A stop during a log is in that line or in the next."""
        lines = []

        def read(group):
            group._logging_fn = lines.append
            group.log(["fwd"], normalizer=1e-6)  # in ns, so that rounding loses nothing

        timer, _ = self.train_and_read(read)
        logged_ns = sum(float(line.rpartition(": ")[2]) for line in lines)
        assert logged_ns == pytest.approx(of_region(timer).total * 1e9, abs=0.01 * len(lines))

    def test_a_running_timer_is_read_without_being_stopped(self, timers, clock, in_thread):
        """Another thread sees the time so far, and the interval stays whole in the snapshot."""
        timer = timers("fwd")
        timer.start()
        clock.advance(0.010)
        read_ms = []
        in_thread(lambda: read_ms.append(timer.elapsed()))
        clock.advance(0.005)
        timer.stop()
        assert read_ms == [pytest.approx(10.0)]
        assert timer.elapsed() == pytest.approx(5.0)
        assert timers.timer.get_time("fwd") == [pytest.approx(0.015)]

    def test_on_a_device_another_threads_running_timer_is_left_alone(self, device_timers, device, in_thread):
        """No event is recorded on the reader's stream; the time comes whole with its stop."""
        timer = device_timers("fwd")
        timer.start()
        device.launch(0.010)
        recorded = device.calls["record"]
        read_ms = []
        in_thread(lambda: read_ms.append(timer.elapsed()))
        assert (recorded, [0.0]) == (device.calls["record"], read_ms)
        device.launch(0.005)
        timer.stop()
        assert timer.elapsed() == pytest.approx(15.0)

    def test_a_finalizer_amid_the_adding_up_costs_nothing(self, timers, clock):
        """A reader on the same thread between two lines of the addition leaves each time counted once."""
        timer = timers("fwd")
        spend(timer, clock, 0.010, 0.020)
        inner = []

        class Entering(deque):
            def popleft(self):
                interval = super().popleft()
                inner.append(timer.read().count)
                return interval

        timer._fresh = Entering(timer._fresh)
        assert timer.elapsed(reset=False) == pytest.approx(30.0)
        assert len(inner) == 2
        assert timer.read().count == 2

    def test_an_interrupt_amid_the_adding_up_counts_no_time_twice(self, timers, clock):
        """A time that is taken to be added up is not taken again."""
        timer = timers("fwd")
        spend(timer, clock, 0.010, 0.020)

        class Interrupting(deque):
            def popleft(self):
                timer._fresh = deque(self)
                raise KeyboardInterrupt

        timer._fresh = Interrupting(timer._fresh)
        with pytest.raises(KeyboardInterrupt):
            timer.elapsed()
        assert timer.elapsed() == pytest.approx(30.0)


class TestCopies:
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda group: pickle.loads(pickle.dumps(group))])
    def test_a_used_group_can_be_copied(self, copied):
        """An object that holds a group can be checkpointed: the copy has its settings and has timed nothing."""
        group = SynchronizedWallClockTimer(Timer(keep_last=7), reentrant=True)
        group("fwd").start()
        group("fwd").stop()
        again = copied(group)
        assert list(again.timers) == ["fwd"]
        again("fwd").start()
        again("fwd").start()
        again("fwd").stop()
        again("fwd").stop()
        assert again("fwd").read().count == 1
        assert again.timer.snapshot().get("fwd").stats.count == 1
        assert again.timer is not group.timer
        assert again.timer is again("fwd")._timer
        assert group("fwd").read().count == 1


class TestNames:
    def test_the_name_of_a_time_type_is_that_region(self, clock):
        """A timer called "BATCH" stands in the row of ``TimeType.BATCH``."""
        tmr = Timer(clock=clock)
        spend(SynchronizedWallClockTimer(tmr)("BATCH"), clock, 0.010)
        tmr.record(TimeType.BATCH, 0, 5_000_000)
        (region,) = tmr.snapshot()
        assert ("BATCH", 2) == (region.name, region.stats.count)
        assert tmr.get_time_stats(TimeType.BATCH).total == pytest.approx(0.015)

    def test_two_groups_over_one_timer_time_the_same_name_apart(self, clock):
        """Each may run while the other does; reports add them up."""
        tmr = Timer(clock=clock)
        one, other = SynchronizedWallClockTimer(tmr), SynchronizedWallClockTimer(tmr)
        one("fwd").start()
        clock.advance(0.010)
        other("fwd").start()
        clock.advance(0.005)
        one("fwd").stop()
        other("fwd").stop()
        assert (15.0, 5.0) == (pytest.approx(one("fwd").elapsed()), pytest.approx(other("fwd").elapsed()))
        assert tmr.snapshot().get("fwd").stats.count == 2
        assert tmr.get_time("fwd") == [pytest.approx(0.015), pytest.approx(0.005)]

    def test_groups_that_come_and_go_use_the_same_regions(self, clock):
        """A new group reuses the regions of a dropped one, so their number does not grow."""
        tmr = Timer(clock=clock)
        for _ in range(20):
            spend(SynchronizedWallClockTimer(tmr)("fwd"), clock, 0.010)
            gc.collect()
        assert len(tmr._regions_of("fwd")) <= 2
        assert tmr.get_time_stats("fwd").count == 20


class TestGroup:
    def test_names_are_those_of_the_original(self):
        """The standard names are DeepSpeed's."""
        assert (FORWARD_MICRO_TIMER, FORWARD_GLOBAL_TIMER) == ("fwd_microstep", "fwd")
        assert BACKWARD_REDUCE_GLOBAL_TIMER == "bwd_allreduce"

    def test_trim_mean_stands_beside_them(self):
        """``trim_mean`` is where the original's is, and nothing else is made up."""
        from deep500_timing import trim_mean, wallclock

        assert wallclock.trim_mean is trim_mean
        assert not hasattr(wallclock, "untrimmed_mean")
        assert all(hasattr(wallclock, name) for name in wallclock.__all__)

    def test_get_timers_has_those_that_were_named(self, timers):
        """A timer is made when it is first named, once."""
        first = timers("a")
        assert timers.get_timers() == {"a": first}
        assert timers("a") is first
        assert first.name_ == "a"

    def test_get_mean_is_in_milliseconds_and_resets(self, timers, clock):
        """``get_mean`` has the unit of ``mean``, divides by the normalizer, skips unknown names, and resets."""
        spend(timers("fwd"), clock, 0.010, 0.030)
        assert timers.get_mean(["fwd", "never"], normalizer=2.0, reset=False) == {"fwd": pytest.approx(10.0)}
        assert timers.get_mean(["fwd"]) == {"fwd": pytest.approx(20.0)}
        assert timers.get_mean(["fwd"]) == {"fwd": 0.0}

    def test_get_mean_lets_a_running_timer_run(self, timers, clock):
        """A reset by ``get_mean`` does not stop a timer."""
        timers("fwd").start()
        clock.advance(0.010)
        assert timers.get_mean(["fwd"]) == {"fwd": pytest.approx(10.0)}
        clock.advance(0.001)
        timers("fwd").stop()
        assert timers("fwd").elapsed() == pytest.approx(1.0)

    def test_log_is_one_line_in_milliseconds(self, timers, clock, lines):
        """``log`` names the rank and each timer that exists, and resets."""
        spend(timers("fwd"), clock, 0.010)
        spend(timers("bwd"), clock, 0.020)
        timers.log(["fwd", "never", "bwd"], normalizer=2.0)
        assert lines == ["[Rank 0] time (ms) | fwd: 5.00 | bwd: 10.00"]
        assert timers("fwd").elapsed() == 0.0

    def test_log_without_reset_keeps_the_times(self, timers, clock):
        """``reset=False`` leaves the sums alone."""
        spend(timers("fwd"), clock, 0.010)
        timers.log(["fwd"], reset=False)
        assert timers("fwd").elapsed() == pytest.approx(10.0)

    def test_log_prints_where_no_function_is_given(self, clock, capsys):
        """The standard output is the default."""
        timers = SynchronizedWallClockTimer(clock=clock)
        spend(timers("fwd"), clock, 0.010)
        timers.log(["fwd"])
        assert capsys.readouterr().out == "[Rank 0] time (ms) | fwd: 10.00\n"

    @pytest.mark.parametrize(
        ("ranks", "logged"), [(None, False), ([0], False), ([3], True), ([0, 3], True), ([-1], True)]
    )
    def test_log_is_for_the_ranks_that_are_named(self, timers, clock, lines, monkeypatch, ranks, logged):
        """Other ranks are silent, and reset all the same."""
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "4")
        spend(timers("fwd"), clock, 0.010)
        timers.log(["fwd"], ranks=ranks)
        assert lines == (["[Rank 3] time (ms) | fwd: 10.00"] if logged else [])
        assert timers("fwd").elapsed() == 0.0

    @pytest.mark.parametrize("normalizer", [0.0, -1.0, float("nan")])
    def test_a_normalizer_must_be_positive(self, timers, normalizer):
        """Dividing by nothing is an error that says so, and no time is lost."""
        with pytest.raises(ValueError, match="normalizer"):
            timers.log(["fwd"], normalizer=normalizer)
        with pytest.raises(ValueError, match="normalizer"):
            timers.get_mean(["fwd"], normalizer=normalizer)

    def test_memory_breakdown_adds_the_memory(self, timers, clock, lines):
        """``memory_breakdown=True`` adds to the line what ``memory_usage`` says."""
        pytest.importorskip("psutil")
        spend(timers("fwd"), clock, 0.010)
        timers.log(["fwd"], memory_breakdown=True)
        assert lines[0].startswith("[Rank 0] time (ms) | fwd: 10.00 | host_rss: ")
        assert " | host_used: " in lines[0]

    def test_the_times_stand_in_a_timer_of_yours(self, clock, timers):
        """Named timers are regions: they are in snapshots, and exporters take them."""
        mine = Timer(clock=clock)
        group = SynchronizedWallClockTimer(mine)
        spend(group("fwd"), clock, 0.010, 0.030)
        group("bwd").start()
        exporter = InMemoryExporter()
        mine.export(exporter)
        group("fwd").reset()
        assert exporter.exported[0][0].get("fwd").stats.total == pytest.approx(0.040)
        assert exporter.exported[0][0].get("bwd").running == 1
        assert mine.get_time_stats("fwd").count == 2

    def test_a_timer_and_a_clock_exclude_each_other(self, clock):
        """A timer has clocks already."""
        with pytest.raises(ValueError, match="Leave one out"):
            SynchronizedWallClockTimer(Timer(), clock=clock)

    def test_memory_is_read_at_each_stop_where_asked(self, clock):
        """The memory read at a stop is in the timer's row, from a given reader or with ``memory=True`` the class's."""
        usage = MemoryUsage(host_rss_bytes=3 << 30)
        reader = types.SimpleNamespace(read=lambda: usage)
        of_class = type("Group", (SynchronizedWallClockTimer,), {"memory_reader": reader})
        for group in (SynchronizedWallClockTimer(clock=clock, memory=reader), of_class(clock=clock, memory=True)):
            spend(group("fwd"), clock, 0.010, 0.020)
            memory = group.timer.snapshot().get("fwd").memory
            assert (2, usage, 3 << 30) == (memory.samples, memory.last, memory.max_host_rss_bytes)

    def test_a_reset_of_the_timer_below_harms_nothing(self, timers, clock):
        """``timer.reset()`` empties the snapshot; named timers go on."""
        spend(timers("fwd"), clock, 0.010)
        timers.timer.reset()
        spend(timers("fwd"), clock, 0.020)
        assert timers.timer.get_time("fwd") == [pytest.approx(0.020)]
        assert timers("fwd").elapsed() == pytest.approx(30.0)


class TestOnADevice:
    def run(self, timer, device, *seconds):
        """Queue work of these lengths, each timed."""
        for length in seconds:
            timer.start()
            device.launch(length)
            timer.stop()

    def test_times_are_the_devices(self, device_timers, device, clock):
        """The time is that between events, independent of the host's clock."""
        self.run(device_timers("fwd"), device, 0.010, 0.020)
        clock.advance(5.0)
        assert device_timers("fwd").elapsed(reset=False) == pytest.approx(30.0)
        assert device_timers("fwd").mean() == pytest.approx(15.0)

    def test_nothing_waits_until_a_value_is_read(self, device_timers, device):
        """Starting, stopping and resetting queue events, and do not wait for them."""
        self.run(device_timers("fwd"), device, *[0.010] * 20)
        device_timers("fwd").reset()
        self.run(device_timers("fwd"), device, 0.010)
        assert device.calls["wait"] == 0
        device_timers("fwd").elapsed()
        assert device.calls["wait"] == 1

    def test_reading_waits_for_the_events_concerned_only(self, device_timers, device):
        """Asking for one timer leaves the device busy with later work."""
        self.run(device_timers("fwd"), device, 0.010)
        self.run(device_timers("bwd"), device, 0.500)
        assert device_timers("fwd").elapsed() == pytest.approx(10.0)
        assert device.now_ns == 10_000_000
        assert device_timers.timer.snapshot().get("bwd", "GPU").pending == 1

    def test_a_reset_does_not_count_what_is_on_its_way(self, device_timers, device):
        """Times that were stopped before a reset never enter a sum after it, though they arrive later."""
        self.run(device_timers("fwd"), device, 0.010, 0.020)
        device_timers("fwd").reset()
        self.run(device_timers("fwd"), device, 0.003)
        assert device_timers("fwd").elapsed() == pytest.approx(3.0)
        assert device_timers.timer.get_time("fwd", gpu=True) == pytest.approx([0.010, 0.020, 0.003])

    def test_elapsed_of_a_running_timer(self, device_timers, device):
        """A timer that runs on the device may be asked, and runs on."""
        timer = device_timers("fwd")
        timer.start()
        device.launch(0.010)
        assert timer.elapsed(reset=False) == pytest.approx(10.0)
        device.launch(0.005)
        timer.stop()
        assert timer.elapsed() == pytest.approx(15.0)

    def test_recorded_times_do_not_wait(self, device_timers, device):
        """``stop(record=True)`` does not wait either; the mean does."""
        timer = device_timers("fwd")
        for length in (0.010, 0.030):
            timer.start()
            device.launch(length)
            timer.stop(record=True)
        assert device.calls["wait"] == 0
        assert timer.elapsed() == pytest.approx(40.0)
        assert timer.mean() == pytest.approx(20.0)

    def test_ranks_that_do_not_log_do_not_wait(self, device_timers, device, monkeypatch):
        """Logging elsewhere costs this rank a reset."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        self.run(device_timers("fwd"), device, 0.010)
        device_timers.log(["fwd"])
        assert device.calls["wait"] == 0
        assert device_timers("fwd").elapsed() == 0.0

    def test_ranks_that_do_not_log_split_a_running_timer(self, device_timers, device, monkeypatch):
        """A timer that runs during a log on another rank restarts there without a wait; reports have both parts."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        timer = device_timers("fwd")
        timer.start()
        device.launch(0.010)
        device_timers.log(["fwd"])
        device.launch(0.005)
        timer.stop()
        assert device.calls["wait"] == 0
        assert timer.elapsed() == pytest.approx(5.0)
        assert device_timers.timer.get_time("fwd", gpu=True) == pytest.approx([0.010, 0.005])

    def test_a_time_is_placed_where_the_device_can_have_been(self, device_timers, device, clock):
        """Work that was issued late in a wait for the device lies at the end of that wait on the host's clock."""
        timer = device_timers("fwd")
        device.launch(1.0)
        timer.start()
        device.launch(0.010)
        clock.advance(2.0)
        timer.stop()
        timer.elapsed()
        ((start_ns, end_ns),) = device_timers.timer.intervals("fwd", gpu=True).tolist()
        assert clock.now_ns() - 10_000_000 <= start_ns <= clock.now_ns()
        assert end_ns - start_ns == 10_000_000

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
    @pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
    def test_a_forked_process_has_none_of_its_parents_times(self, device_timers, device):
        """The child starts from nothing with new events; the parent keeps the times on their way."""
        self.run(device_timers("fwd"), device, 0.020)
        device_timers("fwd").elapsed(reset=False)
        self.run(device_timers("fwd"), device, 0.010)
        child = os.fork()
        if child == 0:
            self.run(device_timers("fwd"), device, 0.005)
            os._exit(0 if device_timers("fwd").elapsed() == pytest.approx(5.0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert device_timers("fwd").elapsed() == pytest.approx(30.0)

    def test_events_are_pooled(self, device_timers, device):
        """A million regions need a handful of events."""
        for _ in range(2_000):
            self.run(device_timers("fwd"), device, 0.001)
            device.finish()
        assert device_timers.timer.device.events < 64
        assert device_timers("fwd").elapsed() == pytest.approx(2_000.0)

    def test_a_reset_of_the_timer_below_loses_nothing_that_was_on_its_way(self, device_timers, device, lines):
        """Times arrive at the named timer although the timer below was reset meanwhile."""
        self.run(device_timers("fwd"), device, 0.010)
        device_timers.timer.reset()
        self.run(device_timers("fwd"), device, 0.005)
        device_timers.log(["fwd"])
        assert lines == ["[Rank 0] time (ms) | fwd: 15.00"]

    def test_it_reads_as_nothing_before_the_first_stop(self, device_timers, device):
        """A timer of a device that was never stopped is asked in vain, and waits for nothing."""
        assert device_timers("fwd").elapsed() == 0.0
        assert device.calls["wait"] == 0

    @pytest.mark.parametrize(("keep_last", "skip_first"), [(None, 0), (0, 0), (0, 5), (10, 50), (0, 200), (0, 999)])
    def test_what_the_timer_below_leaves_out_is_not_left_out_here(self, device, clock, keep_last, skip_first):
        """Sums and means of named timers do not depend on warm-up or on the bounds of the timer below."""
        tmr = CPUGPUTimer(clock=clock, device_clock=device, keep_last=keep_last, skip_first=skip_first)
        timer = SynchronizedWallClockTimer(tmr)("fwd")
        for number in range(1000):
            clock.advance_ns(10)
            timer.start()
            device.launch(0.001 if number < 700 else 0.003)
            timer.stop()
        assert (1.5, 1600.0) == (pytest.approx(timer.mean()), pytest.approx(timer.elapsed()))
        assert tmr.snapshot().get("fwd", "GPU").stats.skipped == skip_first

    @pytest.mark.parametrize("keep_last", [0, 5, 1000, None])
    def test_sums_are_exact_however_few_are_kept(self, device, clock, keep_last):
        """A timer of yours that keeps few intervals gives the same sums, all arriving at once or one by one."""
        group = SynchronizedWallClockTimer(CPUGPUTimer(clock=clock, device_clock=device, keep_last=keep_last))
        expected = 0
        for number in range(1, 1_001):
            self.run(group("fwd"), device, number * 1e-6)
            expected += number
            if number % 7 == 0 and number < 500:
                device.finish()
        assert group("fwd").elapsed() == pytest.approx(expected * 1e-3)
        self.run(group("fwd"), device, 0.005)
        assert group("fwd").elapsed() == pytest.approx(5.0)

    def test_what_was_captured_is_said(self, device_timers, device, lines):
        """A region inside a graph capture has no time; the log says how many of how many."""
        self.run(device_timers("fwd"), device, 0.010)
        device.capturing = True
        self.run(device_timers("fwd"), device, 0.010)
        device.capturing = False
        device_timers.log(["fwd"])
        assert lines == ["[Rank 0] time (ms) | fwd: 10.00 (1 of 2 not timed)"]

    def test_a_device_that_fails_costs_the_times_and_a_warning(self, device_timers, device, lines):
        """Reading an event that fails is said once, counted, and no error."""
        self.run(device_timers("fwd"), device, 0.010, 0.010)
        device.fail("elapsed_ns", RuntimeError("lost"))
        with pytest.warns(TimingWarning, match="lost"):
            device_timers.log(["fwd"], reset=False)
        assert lines == ["[Rank 0] time (ms) | fwd: 0.00 (2 of 2 not timed)"]
        device.fail("elapsed_ns", None)
        self.run(device_timers("fwd"), device, 0.010)
        assert device_timers("fwd").elapsed() == pytest.approx(10.0)

    def test_a_forgotten_start_gives_its_event_back(self, device_timers, device):
        """Resetting a timer that runs does not cost an event: the next timer has it."""
        for number in range(50):
            timer = device_timers(f"fwd {number}")
            timer.start()
            timer.reset()
        assert device_timers.timer.device.events <= 2

    def test_disabling_while_running_gives_the_event_back(self, device_timers, device):
        """So does switching the timer off."""
        timer = device_timers("fwd")
        for _ in range(50):
            timer.start()
            device_timers.timer.enabled = False
            device_timers.timer.enabled = True
        assert device_timers.timer.device.events <= 2

    def test_a_forgotten_start_is_counted_on_both_clocks(self, device_timers):
        """A reset of a timer that runs is one stretch discarded, on the host and on the device."""
        device_timers("fwd").start()
        device_timers("fwd").reset()
        device_timers("fwd").reset()
        snapshot = device_timers.timer.snapshot()
        assert (1, 1) == (snapshot.get("fwd").discarded, snapshot.get("fwd", "GPU").discarded)

    def test_a_log_elsewhere_starts_nothing(self, device_timers, device, monkeypatch):
        """A timer that is stopped stays so over a log of another rank."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        self.run(device_timers("fwd"), device, 0.010)
        device_timers.log(["fwd"])
        assert not device_timers("fwd").started_

    def test_a_log_elsewhere_leaves_that_threads_running_timer_alone(
        self, device_timers, device, monkeypatch, in_thread
    ):
        """Its events lie on that thread's stream, and its time comes whole with its stop."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        timer = device_timers("fwd")
        timer.start()
        device.launch(0.010)
        in_thread(device_timers.log, ["fwd"])
        device.launch(0.005)
        timer.stop()
        assert timer.elapsed() == pytest.approx(15.0)

    def test_streams_may_change_inside(self, device_timers, device):
        """A region that ends on another stream is timed to the end there."""
        timer = device_timers("fwd")
        timer.start()
        device.use_stream("stream 1")
        device.launch(0.010)
        timer.stop()
        assert timer.elapsed() == pytest.approx(10.0)

    def test_a_timer_with_a_device_of_its_own_serves(self, clock, device):
        """A CPUGPUTimer handed in is timed on its device, CPU and GPU times apart."""
        mine = CPUGPUTimer(clock=clock, device_clock=device)
        group = SynchronizedWallClockTimer(mine)
        group("fwd").start()
        clock.advance(0.001)
        device.launch(0.010)
        group("fwd").stop()
        assert group("fwd").elapsed() == pytest.approx(10.0)
        assert mine.get_time("fwd") == [pytest.approx(0.001)]


class TestOnADeviceThatIsLookedForLate:
    @pytest.fixture
    def searches(self):
        """How often the device was looked for."""
        return []

    @pytest.fixture
    def make(self, clock, device, searches):
        """Makes a group over such a device; a text stands for none."""

        def make(found=device, **settings):
            late = lazy_device(lambda: searches.append(1) or found, **settings)
            return SynchronizedWallClockTimer(CPUGPUTimer(clock=clock, device_clock=late))

        return make

    def test_it_is_found_at_the_first_start(self, make, device, searches):
        """Making a timer searches nothing; its first start does, once, and its times are the device's from then on."""
        timer = make()("fwd")
        assert ([], True) == (searches, timer.use_host_timer)
        TestOnADevice().run(timer, device, 0.010, 0.020)
        assert ([1], False) == (searches, timer.use_host_timer)
        assert timer.elapsed() == pytest.approx(30.0)

    def test_without_one_the_hosts_clock_serves(self, make, clock, searches):
        """A search in vain costs no time that was stopped, and is not made again."""
        timer = make("there is none")("fwd")
        spend(timer, clock, 0.010, 0.020)
        assert ([1], True) == (searches, timer.use_host_timer)
        assert timer.elapsed() == pytest.approx(30.0)

    def test_one_that_is_not_for_named_timers_is_left_alone(self, make, clock, searches):
        """A device where a time costs more than two events is not looked for."""
        timer = make(for_named_timers=False)("fwd")
        spend(timer, clock, 0.010)
        assert ([], True) == (searches, timer.use_host_timer)
        assert timer.elapsed() == pytest.approx(10.0)


class TestNoop:
    def test_a_script_runs_unchanged_with_timing_off(self, capsys):
        """Every call of a script works, times are 0, and nothing is printed."""
        timers = NoopTimer()
        timers("fwd").start()
        timers("fwd").start()
        timers("fwd").stop(reset=True, record=True)
        timers("fwd").reset()
        timers.log(["fwd"], normalizer=2.0, reset=False, memory_breakdown=True, ranks=[0])
        assert (timers("fwd").elapsed(reset=False), timers("fwd").mean()) == (0, 0)
        assert timers.get_timers() == {}
        assert timers.get_mean(["fwd"], normalizer=1.0, reset=True) == {}
        assert timers.memory_usage() == ""
        assert capsys.readouterr().out == ""

    def test_it_has_the_same_face(self):
        """The no-op group and timers offer every method of the real ones."""

        def public(kind):
            return {name for name in vars(kind) if not name.startswith("_")}

        assert public(SynchronizedWallClockTimer) - {"Timer", "memory_reader"} <= public(NoopTimer)
        assert public(SynchronizedWallClockTimer.Timer) <= public(NoopTimer.Timer)


def test_no_time_is_lost_without_psutil(clock, monkeypatch):
    """Without psutil a line with memory says that it is unknown, once by a warning, and the times stand."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    lines = []
    timers = SynchronizedWallClockTimer(clock=clock, logging_fn=lines.append)
    spend(timers("fwd"), clock, 0.010)
    with pytest.warns(TimingWarning, match=r"requires psutil; pip install 'deep500-timing\[memory\]'"):
        timers.log(["fwd"], memory_breakdown=True, reset=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timers.log(["fwd"], memory_breakdown=True)
    assert lines == ["[Rank 0] time (ms) | fwd: 10.00 | memory: n/a"] * 2


def test_device_and_host_groups_do_not_mix(clock):
    """Two groups on one device share its events and nothing else."""
    device = ManualDeviceClock()
    one = SynchronizedWallClockTimer(device_clock=device)
    two = SynchronizedWallClockTimer(device_clock=device)
    for group, length in ((one, 0.010), (two, 0.020)):
        group("fwd").start()
        device.launch(length)
        group("fwd").stop()
    assert one("fwd").elapsed() == pytest.approx(10.0)
    assert two("fwd").elapsed() == pytest.approx(20.0)


class TestWhatDeepSpeedsTimersHave:
    def test_on_the_host(self, timers, clock):
        """The times one by one in s, as records in ms, and when it was last started and stopped."""
        timer = timers("fwd")
        assert (0.0, 0.0, [], None) == (timer.start_time, timer.end_time, timer.event_timers, timer.elapsed_records)
        spend(timer, clock, 0.010, 0.020)
        assert timer.use_host_timer
        assert None is timer.start_event
        assert [0.010, 0.020] == pytest.approx(timer.event_timers)
        assert [10.0, 20.0] == pytest.approx(timer.elapsed_records)
        assert pytest.approx(30.0) == timer._get_elapsed_msec()
        assert pytest.approx(0.020) == timer.end_time - timer.start_time
        assert clock.now_ns() / 1e9 == timer.end_time
        timer.reset()
        assert ([], None) == (timer.event_timers, timer.elapsed_records)

    def test_on_a_device(self, device_timers, device):
        """The times are the device's, each to be asked for; it has no host times, and its events are a pool's."""
        timer = device_timers("fwd")
        timer.start()
        device.launch(0.005)
        timer.stop()
        device.advance(1.0)
        assert not timer.use_host_timer
        assert [5.0] == pytest.approx([event.get_elapsed_msec() for event in timer.event_timers])
        assert [5.0] == pytest.approx(timer.elapsed_records)
        assert (0.0, 0.0, None) == (timer.start_time, timer.end_time, timer.start_event)
