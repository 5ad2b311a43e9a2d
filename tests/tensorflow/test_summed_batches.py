"""When tf.data's sums are read, and what one reading gives; with made sums and a manual clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing.testing import ManualClock
from deep500_timing_tensorflow import _data
from deep500_timing_tensorflow._data import Fetched, SummedBatches
from deep500_timing_tensorflow._fit import CallbackOptions, FitTimer
from deep500_timing_tensorflow._regions import EpochTotals, Execution

SAMPLES, BYTES = 8, 160


class Sums:
    """The sums of a pipeline, and the number of their readings."""

    works = True

    def __init__(self):
        self.now = Fetched(0, 0.0, 0, 0)
        self.readings = 0

    def fetched(self):
        """The elements handed out."""
        self.readings += 1
        return self.now

    def samples_in(self, size):
        """A sample has twenty bytes."""
        return size // (BYTES // SAMPLES)


class Model:
    """The model and its data."""


class Fit:
    """A fit of executions of given lengths and waits, in milliseconds."""

    def __init__(self, several=1):
        self.clock = ManualClock()
        self.timer = Timer(clock=self.clock)
        self.regions = FitTimer(CallbackOptions(self.timer), Model())
        self.sums = Sums()
        self.batches = SummedBatches(self.regions, several, self.sums)
        self.batches.times_io = True
        self.sums.readings = 0
        self.several = several
        self.spans = []

    def begin(self, *, steady=True):
        """Begin an execution."""
        execution = self.regions.execution = Execution()
        if not steady:
            self.batches.settle()  # Its train function is another one.
        execution.began_ns = self.timer.now_ns()
        return execution

    def hand_out(self, wait_ms, size=BYTES, several=1):
        """The data hands out batches."""
        batches, wait_us, total, whole = self.sums.now
        self.sums.now = Fetched(batches + several, wait_us + 1e3 * wait_ms, total + several * size, whole + several)

    def execute(self, times=1, *, took_ms=1.0, wait_ms=0.01, steady=True, expected=None):
        """Run executions, and return the number of batches that they counted."""
        counted = 0
        for _ in range(times):
            execution = self.begin(steady=steady if expected is None else expected)
            self.clock.advance(took_ms / 1e3)
            self.hand_out(wait_ms, several=self.several)
            execution.took_ns = self.timer.now_ns() - execution.began_ns
            execution.steady = steady
            self.regions.execution = None
            self.batches.execution_ended(execution)
            self.spans.append((execution.began_ns, self.timer.now_ns()))
            counted += execution.steps
        return counted

    def after_the_first(self):
        """Leave the executions at the begin of a fit behind."""
        self.execute(_data._FIRST_ONES)
        self.timer.reset()
        self.regions.totals = EpochTotals()
        self.sums.readings = 0
        self.spans.clear()
        return self

    def waits_ms(self, key="IO"):
        """The intervals of a region."""
        return [1e3 * seconds for seconds in self.timer.get_time(key)] if self.timer.intervals(key).size else []

    @property
    def throughput(self):
        """The epoch's."""
        return self.regions.totals.throughput(self.timer.now_ns())


def test_first_executions_of_a_fit_are_read_one_by_one():
    """A short fit has a wait for each batch."""
    fit = Fit()
    fit.execute(_data._FIRST_ONES)
    assert _data._FIRST_ONES == fit.sums.readings
    assert pytest.approx([0.01] * _data._FIRST_ONES) == fit.waits_ms()


def test_short_steps_share_a_reading_and_have_no_waits_of_their_own():
    """Steps of 1 ms are read in groups of 50: count, total and mean are exact."""
    fit = Fit().after_the_first()
    assert 150 == fit.execute(75, wait_ms=0.0) + fit.execute(75, wait_ms=0.02)
    fit.batches.settle()
    assert 3 == fit.sums.readings
    stats = fit.timer.get_time_stats("IO")
    assert (150, pytest.approx(1.5e-3), pytest.approx(1e-5)) == (stats.count, stats.total, stats.mean)
    for (began_ns, ended_ns), (start_ns, end_ns) in zip(fit.spans, fit.timer.intervals("IO").tolist(), strict=True):
        assert began_ns == start_ns <= end_ns <= ended_ns
    assert pytest.approx(1e-5) == fit.regions.totals.logs("", fit.timer.now_ns())["IO"]


def test_unread_executions_are_settled():
    """The end of an epoch leaves nothing out, and settling twice adds nothing."""
    fit = Fit().after_the_first()
    fit.execute(125)
    assert pytest.approx(1.0) == sum(fit.waits_ms())
    fit.batches.settle()
    fit.batches.settle()
    assert pytest.approx([0.01] * 125) == fit.waits_ms()
    assert 3 == fit.sums.readings
    assert (125 * SAMPLES, 125 * SAMPLES) == (fit.throughput.samples, fit.throughput.epoch_samples)


def test_long_steps_are_read_one_by_one():
    """A reading is a hundredth of a step of 10 ms, so each has its own wait."""
    fit = Fit().after_the_first()
    fit.execute(5, took_ms=10.0)
    assert pytest.approx([0.01] * 5) == fit.waits_ms()


def test_stall_of_a_single_batch_has_its_own_wait():
    """A stall among short steps is read at once, and its wait is placed in its batch."""
    fit = Fit().after_the_first()
    fit.execute(60)
    fit.execute(5)
    fit.execute(took_ms=40.0, wait_ms=39.0)
    assert 2 == fit.sums.readings
    assert pytest.approx([0.01] * 65 + [39.0]) == fit.waits_ms()
    assert fit.spans[-1][0] == fit.timer.intervals("IO")[-1][0]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=12), st.integers(1, 3))
def test_each_execution_has_one_interval_and_the_sum_is_true(executions, several):
    """For any lengths and waits each execution has one interval at its begin, in order, and all add up."""
    fit = Fit(several)
    for tenths, share in executions:
        fit.execute(took_ms=tenths, wait_ms=share * tenths)
    fit.batches.settle()
    assert [began_ns for began_ns, _ in fit.spans] == [start_ns for start_ns, _ in fit.timer.intervals("IO").tolist()]
    assert pytest.approx(fit.sums.now.wait_us / 1e3, abs=1e-6 * len(executions)) == sum(fit.waits_ms())


def test_batches_that_wait_are_read_one_by_one():
    """Where the wait is longer than a reading, each batch has its own, until that is over."""
    fit = Fit().after_the_first()
    fit.execute(60)
    fit.timer.reset()
    fit.execute(took_ms=12.0, wait_ms=11.0)
    fit.execute(3, took_ms=2.0, wait_ms=1.0)
    assert pytest.approx([11.0, 1.0, 1.0, 1.0], abs=0.1) == fit.waits_ms()[-4:]
    readings = fit.sums.readings
    fit.execute(took_ms=1.0, wait_ms=0.0)
    fit.execute(6)
    assert 1 == fit.sums.readings - readings


def test_several_steps_of_an_execution_are_counted_from_the_data():
    """With several batches in an execution each is read, however short: only the data knows their number."""
    fit = Fit(several=4).after_the_first()
    assert 12 == fit.execute(3)
    assert 3 == fit.sums.readings


def test_executions_that_trace_are_read_alone():
    """Their samples are kept out of the steady state, those before and after them are not."""
    fit = Fit().after_the_first()
    fit.execute(3)
    fit.execute(steady=False, took_ms=50.0)
    fit.execute(4)
    fit.batches.settle()
    assert (7 * SAMPLES, 8 * SAMPLES) == (fit.throughput.samples, fit.throughput.epoch_samples)
    assert pytest.approx(0.08) == sum(fit.waits_ms())


def test_samples_of_an_unexpected_trace_are_of_no_state():
    """Samples that were read together with an unexpected trace count for the epoch; the steady ones are unknown."""
    fit = Fit().after_the_first()
    fit.execute(3)
    fit.execute(steady=False, expected=True)
    assert (None, 4 * SAMPLES) == (fit.throughput.samples, fit.throughput.epoch_samples)


def test_sums_of_data_that_was_used_before_are_read_first():
    """Elements handed out before the first execution does not belong to the fit."""
    fit = Fit()
    fit.sums.now = Fetched(3, 1e6, 3 * BYTES, 3)
    fit.batches = SummedBatches(fit.regions, 1, fit.sums)
    fit.execute()
    fit.batches.settle()
    assert (2, SAMPLES) == (fit.sums.readings, fit.throughput.epoch_samples)


def test_exception_loses_no_unread_waits():
    """A fit that is aborted between two executions has the waits and samples of the ones that are over."""
    fit = Fit().after_the_first()
    fit.execute(25)
    fit.batches.abort()
    fit.batches.settle()
    assert pytest.approx([0.01] * 25) == fit.waits_ms()
    assert (25 * SAMPLES, 1) == (fit.throughput.epoch_samples, fit.sums.readings)


@pytest.mark.parametrize("executions", [0, 60])
def test_exception_inside_an_execution_keeps_its_wait(executions):
    """The batch that failed was waited for too, as on the other backends, but nothing was trained on it."""
    fit = Fit().after_the_first()
    fit.execute(executions)
    failed = fit.begin()
    fit.clock.advance(0.033)
    fit.hand_out(32.0)
    fit.clock.advance(3600)  # Until the callback is used again.
    fit.batches.abort()
    assert pytest.approx([0.01] * executions + [32]) == fit.waits_ms()
    assert failed.began_ns == fit.timer.intervals("IO")[-1][0]
    assert executions * SAMPLES == fit.throughput.epoch_samples


def test_exception_before_any_batch_was_handed_out():
    """An exception in the trace of the first step leaves no IO."""
    fit = Fit()
    fit.begin(steady=False)
    fit.batches.abort()
    assert [] == fit.waits_ms()
