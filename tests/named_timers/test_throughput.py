"""Rates of a training run, on a clock that moves when told to."""

from __future__ import annotations

import copy
import math
import pickle
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import RegionNotOpenError, Timer, TimingWarning
from deep500_timing.memory import MemoryUsage
from deep500_timing.testing import ManualClock
from deep500_timing.throughput import ThroughputTimer


@pytest.fixture
def lines():
    """The logged lines."""
    return []


@pytest.fixture
def make(clock, lines):
    """Makes a timer without warm-up on the manual clock."""

    def make(*args, **settings):
        settings.setdefault("start_step", 0)
        return ThroughputTimer(*args, clock=clock, logging_fn=lines.append, **settings)

    return make


def step(timer, clock, seconds, global_step=True, **stop):
    """One micro-step."""
    timer.start()
    clock.advance(seconds)
    timer.stop(global_step=global_step, **stop)


class TestRates:
    def test_average_and_current(self, make, clock):
        """The average is over all steps, the current rate of the last one."""
        timer = make(32)
        step(timer, clock, 0.1)
        step(timer, clock, 0.3)
        assert timer.avg_samples_per_sec() == pytest.approx(160.0)
        assert timer.curr_samples_per_sec() == pytest.approx(32 / 0.3)
        assert timer.total_elapsed_time == pytest.approx(0.4)

    def test_there_is_no_rate_before_a_step_was_timed(self, make, clock):
        """Before the first step, inside it, and during warm-up the rates are None."""
        timer = make(32, start_step=1)
        assert (timer.avg_samples_per_sec(), timer.curr_samples_per_sec()) == (None, None)
        timer.start()
        assert timer.avg_samples_per_sec() is None
        timer.stop(global_step=True)
        assert timer.avg_samples_per_sec() is None
        step(timer, clock, 0.5)
        assert timer.avg_samples_per_sec() == pytest.approx(64.0)

    def test_warm_up_is_not_timed(self, make, clock):
        """The first two steps are left out by default, however long they take."""
        timer = ThroughputTimer(10, clock=clock)
        for seconds in (60.0, 30.0, 1.0, 1.0):
            step(timer, clock, seconds)
        assert timer.avg_samples_per_sec() == pytest.approx(10.0)
        assert (timer.global_step_count, timer.timed_steps) == (4, 2)

    def test_a_step_of_zero_length_gives_no_infinite_rate(self, make, clock):
        """It counts in the average; alone it has no rate."""
        timer = make(10)
        step(timer, clock, 0.0)
        assert (timer.average(), timer.current()) == (None, None)
        step(timer, clock, 1.0)
        assert (timer.average(), timer.current()) == (pytest.approx(20.0), pytest.approx(10.0))
        step(timer, clock, 0.0)
        assert (timer.average(), timer.current()) == (pytest.approx(30.0), None)

    def test_a_clock_that_stands_still_gives_no_rate(self, make, clock, lines):
        """No division by zero, and the log says that there is none."""
        timer = make(10, steps_per_output=1)
        for _ in range(3):
            step(timer, clock, 0.0)
        assert (timer.average(), timer.current()) == (None, None)
        assert lines[-1] == "epoch=0/micro_step=3/global_step=3, RunningAvgSamplesPerSec=n/a, CurrSamplesPerSec=n/a"

    def test_what_lies_between_steps_is_not_counted(self, make, clock):
        """Time after a stop and before the next start belongs to no step."""
        timer = make(10)
        step(timer, clock, 1.0)
        clock.advance(100.0)
        step(timer, clock, 1.0)
        assert timer.average() == pytest.approx(10.0)

    def test_stop_without_start_does_nothing(self, make):
        """As in the original."""
        timer = make(10)
        timer.stop(global_step=True)
        assert (timer.global_step_count, timer.micro_step_count) == (0, 0)

    def test_a_second_start_begins_anew(self, make, clock):
        """A start that a data loader made at the end of an epoch is forgotten, and counted as discarded."""
        tmr = Timer(clock=clock)
        timer = ThroughputTimer(10, start_step=0, timer=tmr)
        timer.start()
        clock.advance(100.0)
        step(timer, clock, 1.0)
        assert timer.average() == pytest.approx(10.0)
        assert tmr.snapshot().get("throughput").discarded == 1

    def test_epochs_begin_their_micro_steps_anew(self, make, clock):
        """``update_epoch_count`` is for the log's numbers."""
        timer = make(10)
        step(timer, clock, 1.0)
        timer.update_epoch_count()
        assert (timer.epoch_count, timer.micro_step_count, timer.global_step_count) == (1, 0, 1)

    @given(st.lists(st.tuples(st.integers(0, 10**10), st.integers(0, 1000)), max_size=30))
    def test_rates_are_amounts_over_times(self, steps):
        """For any lengths and batch sizes, a rate is None or finite, and the sums' quotient."""
        clock = ManualClock()
        timer = ThroughputTimer(start_step=0, clock=clock)
        for length_ns, size in steps:
            timer.start()
            clock.advance_ns(length_ns)
            timer.stop(global_step=True, batch_size=size)
            for rate in (timer.average(), timer.current()):
                assert rate is None or (math.isfinite(rate) and rate >= 0.0)
        total_ns = sum(length for length, _ in steps)
        expected = sum(size for _, size in steps) / (total_ns / 1e9) if total_ns else None
        assert timer.average() == (expected if expected is None else pytest.approx(expected))


class TestAmounts:
    def test_the_batch_size_may_differ_from_step_to_step(self, make, clock):
        """A step counts the given amount."""
        timer = make(10)
        step(timer, clock, 1.0, batch_size=30)
        step(timer, clock, 1.0)
        assert (timer.average(), timer.current()) == (pytest.approx(20.0), pytest.approx(10.0))

    def test_the_attribute_may_be_changed(self, make, clock):
        """Setting ``batch_size`` serves from then on, as when a schedule raises it."""
        timer = make(10)
        step(timer, clock, 1.0)
        timer.batch_size = 20
        step(timer, clock, 1.0)
        assert timer.average() == pytest.approx(15.0)

    def test_any_unit_may_be_counted_beside(self, make, clock):
        """Tokens, images, any unit of a step."""
        timer = make(4)
        step(timer, clock, 1.0, amounts={"tokens": 2048})
        step(timer, clock, 1.0, amounts={"tokens": 1024, "images": 3})
        assert timer.average("tokens") == pytest.approx(1536.0)
        assert timer.current("images") == pytest.approx(3.0)
        assert timer.average() == pytest.approx(4.0)
        assert timer.average("bananas") is None
        step(timer, clock, 1.0)
        assert timer.current("tokens") is None

    def test_the_units_name_is_in_the_log(self, make, clock, lines):
        """A timer that counts tokens says so."""
        timer = make(1000, unit="tokens", steps_per_output=1)
        step(timer, clock, 0.5)
        assert lines == ["epoch=0/micro_step=1/global_step=1, RunningAvgTokensPerSec=2000.0, CurrTokensPerSec=2000.0"]

    def test_accumulation_counts_a_batch_per_global_step(self, make, clock):
        """As in the original, ``batch_size`` is that of the whole global step by default."""
        timer = make(32)
        for last in (False, False, False, True):
            step(timer, clock, 0.25, global_step=last)
        assert timer.average() == pytest.approx(32.0)
        assert timer.current() == pytest.approx(32.0)

    def test_accumulation_counts_micro_batches_where_asked(self, make, clock):
        """``per_micro_step`` counts the actual micro-steps, in a short last step too."""
        timer = make(8, per_micro_step=True)
        for last in (False, False, False, True, False, True):
            step(timer, clock, 0.5, global_step=last)
        assert timer.average() == pytest.approx(48 / 3.0)
        assert timer.current() == pytest.approx(16 / 1.0)

    def test_named_micro_batches_add_up(self, make, clock):
        """Batch sizes named at each micro-step are added, in place of the class's."""
        timer = make(100)
        step(timer, clock, 0.5, global_step=False, batch_size=3)
        step(timer, clock, 0.5, batch_size=4)
        assert timer.average() == pytest.approx(7.0)

    def test_an_unfinished_global_step_does_not_lower_the_average(self, make, clock):
        """Time of micro-steps counts when their global step ends, with its samples."""
        timer = make(10)
        step(timer, clock, 1.0)
        step(timer, clock, 1.0, global_step=False)
        assert timer.average() == pytest.approx(10.0)

    def test_what_the_timer_below_leaves_out_is_in_the_rate(self, clock, device):
        """Warm-up and ``keep_last`` of a timer of yours do not change a rate."""
        tmr = Timer(clock=clock, device_clock=device, keep_last=0, skip_first=20)
        timer = ThroughputTimer(1, start_step=0, timer=tmr)
        for _ in range(1000):
            clock.advance_ns(10)
            timer.start()
            device.launch(0.001)
            timer.stop(global_step=True)
        assert (1000.0, 1000) == (pytest.approx(timer.average()), timer.timed_steps)

    def test_a_used_timer_can_be_copied(self):
        """A trainer that holds one can be checkpointed; the copy counts on from where it was."""
        timer = ThroughputTimer(4, start_step=0)
        for _ in range(3):
            timer.start()
            timer.stop(global_step=True)
        timer.start()
        for again in (copy.deepcopy(timer), pickle.loads(pickle.dumps(timer))):
            assert (3, 3, False) == (again.global_step_count, again.timed_steps, again.started)
            again.start()
            again.stop(global_step=True)
            assert (4, 4) == (again.global_step_count, again.timed_steps)
        assert (3, True) == (timer.global_step_count, timer.started)

    def test_a_start_forgets_what_a_pause_has_cut_off_as_well(self, make, clock):
        """A micro-step that restarts after a pause has no part of the abandoned one."""
        timer = make(batch_size=1, start_step=0)
        timer.start()
        clock.advance(10.0)
        with timer.pause():
            clock.advance(100.0)
        clock.advance(5.0)
        timer.start()
        clock.advance(1.0)
        timer.stop(global_step=True)
        assert (1.0, 1.0, 1) == (timer.total_elapsed_time, timer.average(), timer.timed_steps)

    def test_a_start_forgets_no_earlier_micro_step(self, make, clock):
        """The global step still has the micro-steps that came to their end."""
        timer = make(batch_size=1, start_step=0)
        timer.start()
        clock.advance(2.0)
        timer.stop()
        timer.start()
        clock.advance(10.0)
        timer.start()
        clock.advance(1.0)
        timer.stop(global_step=True)
        assert (3.0, 1) == (timer.total_elapsed_time, timer.timed_steps)

    def test_data_parallel_ranks_multiply(self, make, clock):
        """Each rank processes as much."""
        timer = make(8, data_parallel_size=4)
        step(timer, clock, 1.0, amounts={"tokens": 100})
        assert (timer.average(), timer.average("tokens")) == (pytest.approx(32.0), pytest.approx(400.0))

    def test_no_batch_size_is_one(self, make, clock):
        """As in the original."""
        timer = make(None)
        step(timer, clock, 0.5)
        assert timer.average() == pytest.approx(2.0)

    @pytest.mark.parametrize("amount", [-1, math.inf, math.nan])
    def test_an_amount_that_cannot_be_is_an_error(self, make, clock, amount):
        """It names the amount, and the step goes on."""
        timer = make(10)
        timer.start()
        clock.advance(1.0)
        with pytest.raises(ValueError, match="Counting batch_size"):
            timer.stop(global_step=True, batch_size=amount)
        with pytest.raises(ValueError, match="Counting tokens"):
            timer.stop(global_step=True, amounts={"tokens": amount})
        timer.stop(global_step=True)
        assert timer.average() == pytest.approx(10.0)

    @pytest.mark.parametrize(
        "settings",
        [
            {"start_step": -1},
            {"steps_per_output": 0},
            {"data_parallel_size": 0},
            {"global_step": -1},
            {"batch_size": -1},
        ],
    )
    def test_a_setting_that_cannot_be_is_an_error(self, clock, settings):
        """It names the argument."""
        with pytest.raises(ValueError, match=next(iter(settings))):
            ThroughputTimer(clock=clock, **settings)


class TestResume:
    def test_steps_of_another_process_are_not_counted(self, make, clock, lines):
        """The log goes on with the run's numbers, the rate stands on what this process saw."""
        timer = make(10, global_step=1_000, steps_per_output=2)
        step(timer, clock, 1.0)
        step(timer, clock, 1.0)
        assert timer.average() == pytest.approx(10.0)
        assert lines == ["epoch=0/micro_step=2/global_step=1002, RunningAvgSamplesPerSec=10.0, CurrSamplesPerSec=10.0"]

    def test_warm_up_is_of_this_process(self, make, clock):
        """A resumed run compiles and fills caches again, so its first steps are left out too."""
        timer = make(10, start_step=1, global_step=1_000)
        step(timer, clock, 50.0)
        assert timer.average() is None
        step(timer, clock, 1.0)
        assert timer.average() == pytest.approx(10.0)

    def test_setting_the_count_later_changes_the_log_only(self, make, clock):
        """As an engine does that loads a checkpoint after making its timer."""
        timer = make(10)
        step(timer, clock, 1.0)
        timer.global_step_count = 500
        step(timer, clock, 1.0)
        assert (timer.global_step_count, timer.average()) == (501, pytest.approx(10.0))


class TestPause:
    def test_a_pause_inside_a_step_is_no_part_of_it(self, make, clock):
        """Evaluation and checkpointing do not lower the rate."""
        timer = make(10)
        timer.start()
        clock.advance(0.4)
        with timer.pause():
            clock.advance(60.0)
        clock.advance(0.6)
        timer.stop(global_step=True)
        assert timer.average() == pytest.approx(10.0)

    def test_steps_during_a_pause_are_not_counted(self, make, clock):
        """An evaluation loop over the same data loader starts and stops the timer in vain."""
        timer = make(10)
        step(timer, clock, 1.0)
        with timer.pause():
            step(timer, clock, 1.0)
        assert (timer.average(), timer.global_step_count) == (pytest.approx(10.0), 1)

    def test_pauses_nest(self, make, clock):
        """The outermost one counts."""
        timer = make(10)
        timer.start()
        with timer.pause():
            with timer.pause():
                clock.advance(1.0)
            clock.advance(1.0)
        clock.advance(1.0)
        timer.stop(global_step=True)
        assert timer.average() == pytest.approx(10.0)

    def test_an_exception_ends_a_pause(self, make, clock):
        """The timing goes on after a failed evaluation."""
        timer = make(10)
        timer.start()
        with pytest.raises(OSError, match="disk full"), timer.pause():
            raise OSError("disk full")
        clock.advance(1.0)
        timer.stop(global_step=True)
        assert timer.average() == pytest.approx(10.0)

    def test_a_pause_may_be_ended_by_name(self, make, clock):
        """``pause()`` and ``resume()`` serve where a block does not fit."""
        timer = make(10)
        timer.start()
        timer.pause()
        clock.advance(9.0)
        timer.resume()
        clock.advance(1.0)
        timer.stop(global_step=True)
        assert timer.average() == pytest.approx(10.0)
        with pytest.raises(RegionNotOpenError, match="not paused"):
            timer.resume()


class TestLog:
    def test_it_logs_at_multiples_of_the_interval(self, make, clock, lines):
        """After every second global step, not after micro-steps."""
        timer = make(10, steps_per_output=2)
        for last in (False, True) * 4:
            step(timer, clock, 0.5, global_step=last)
        assert [
            "epoch=0/micro_step=4/global_step=2, RunningAvgSamplesPerSec=10.0, CurrSamplesPerSec=10.0",
            "epoch=0/micro_step=8/global_step=4, RunningAvgSamplesPerSec=10.0, CurrSamplesPerSec=10.0",
        ] == lines

    def test_ranks_that_are_silent_time_all_the_same(self, make, clock, lines):
        """``report_speed=False`` is for the log."""
        timer = make(10, steps_per_output=1)
        step(timer, clock, 1.0, report_speed=False)
        assert lines == []
        assert timer.average() == pytest.approx(10.0)

    def test_nothing_is_logged_during_warm_up(self, make, clock, lines):
        """There is no rate to log."""
        timer = make(10, steps_per_output=1, start_step=1)
        step(timer, clock, 1.0)
        assert lines == []

    def test_it_logs_the_hosts_memory_where_asked(self, make, clock, lines):
        """``monitor_memory`` adds a line with memory and swap in use."""
        pytest.importorskip("psutil")
        timer = make(10, steps_per_output=1, monitor_memory=True)
        step(timer, clock, 1.0)
        assert lines[1].startswith("epoch=0/micro_step=1/global_step=1, vm %: ")
        assert ", swap %: " in lines[1]

    def test_it_logs_the_devices_memory_where_it_is_known(self, clock, lines):
        """The original's two numbers, in units of 1024³ bytes; an unknown value is not 0."""
        usage = MemoryUsage(device_allocated_bytes=3 * 2**29)

        class WithDevice(ThroughputTimer):
            memory_reader = types.SimpleNamespace(read=lambda: usage)

        timer = WithDevice(10, 0, 1, clock=clock, logging_fn=lines.append)
        step(timer, clock, 1.0)
        assert lines[0].endswith("CurrSamplesPerSec=10.0, MemAllocated=1.5GB, MaxMemAllocated=n/a")

    def test_it_prints_where_no_function_is_given(self, clock, capsys):
        """The standard output is the default."""
        timer = ThroughputTimer(10, start_step=0, steps_per_output=1, clock=clock)
        step(timer, clock, 1.0)
        assert "RunningAvgSamplesPerSec=10.0" in capsys.readouterr().out


class TestOnADevice:
    @pytest.fixture
    def timer(self, clock, device, lines):
        """A timer on a device."""
        return ThroughputTimer(10, 0, 4, logging_fn=lines.append, clock=clock, device_clock=device)

    def train(self, timer, device, *seconds):
        """Queue steps of these lengths."""
        for length in seconds:
            timer.start()
            device.launch(length)
            timer.stop(global_step=True)

    def test_steps_do_not_wait_for_the_device(self, timer, device, lines):
        """The first wait is for the first line of the log."""
        self.train(timer, device, 1.0, 1.0, 1.0)
        assert device.calls["wait"] == 0
        self.train(timer, device, 0.5)
        assert device.calls["wait"] == 1
        assert lines == [
            f"epoch=0/micro_step=4/global_step=4, RunningAvgSamplesPerSec={40 / 3.5}, CurrSamplesPerSec=20.0"
        ]

    def test_rates_are_of_the_devices_time(self, timer, device, clock):
        """The host may be far ahead."""
        self.train(timer, device, 1.0, 2.0)
        clock.advance(100.0)
        assert timer.average() == pytest.approx(20 / 3)
        assert timer.current() == pytest.approx(5.0)

    def test_long_runs_need_few_events_and_little_memory(self, clock, device):
        """Arrived times are added up without a reading."""
        timer = ThroughputTimer(10, 0, clock=clock, device_clock=device)
        for _ in range(2_000):
            self.train(timer, device, 0.001)
            device.finish()
        assert timer._core._device.events < 64
        assert len(timer._unsettled) < 32
        assert timer.average() == pytest.approx(10_000.0)

    def test_a_step_without_a_time_is_in_no_rate(self, timer, device):
        """A step inside a graph capture has no time; its samples are left out as well."""
        self.train(timer, device, 1.0)
        device.capturing = True
        self.train(timer, device, 1.0)
        device.capturing = False
        self.train(timer, device, 1.0)
        assert timer.average() == pytest.approx(10.0)
        assert (timer.timed_steps, timer.untimed_steps) == (2, 1)

    def test_a_device_that_fails_costs_the_rate_only(self, timer, device):
        """Steps with unreadable events are left out, with one warning."""
        self.train(timer, device, 1.0)
        device.fail("elapsed_ns", RuntimeError("lost"))
        with pytest.warns(TimingWarning, match="lost"):
            assert timer.average() is None
        device.fail("elapsed_ns", None)
        self.train(timer, device, 1.0)
        assert timer.average() == pytest.approx(10.0)

    def test_disabling_the_timer_leaves_steps_out(self, clock):
        """A step that was not timed in full is in no rate."""
        tmr = Timer(clock=clock)
        timer = ThroughputTimer(10, 0, timer=tmr)
        step(timer, clock, 1.0)
        timer.start()
        tmr.enabled = False
        timer.stop(global_step=True)
        tmr.enabled = True
        step(timer, clock, 1.0)
        assert (timer.average(), timer.timed_steps, timer.untimed_steps) == (pytest.approx(10.0), 2, 1)


class TestWhatDeepSpeedsTimerHas:
    def test_of_the_step_under_way(self, make, clock):
        """What its micro-steps took so far, when the last one was, and whether it was ever started."""
        timer = make(32, steps_per_output=2)
        assert not timer.initialized
        step(timer, clock, 0.1, global_step=False)
        step(timer, clock, 0.2, global_step=False)
        assert timer.initialized
        assert pytest.approx(0.3) == timer.step_elapsed_time
        assert pytest.approx(0.2) == timer.end_time - timer.start_time
        assert 0.0 == timer.total_elapsed_time
        step(timer, clock, 0.1)
        assert 0.0 == timer.step_elapsed_time
        assert not timer._is_report_boundary()
        step(timer, clock, 0.1)
        assert timer._is_report_boundary()
        assert None is timer.config

    def test_a_total_that_is_set(self, make, clock):
        """It goes on from there, as after a checkpoint; the rates know the steps of this process only."""
        timer = make(32)
        step(timer, clock, 0.5)
        timer.total_elapsed_time = 10.0
        step(timer, clock, 0.5)
        assert pytest.approx(10.5) == timer.total_elapsed_time
        assert pytest.approx(64.0) == timer.avg_samples_per_sec()
        with pytest.raises(ValueError, match="total_elapsed_time"):
            timer.total_elapsed_time = -1.0
