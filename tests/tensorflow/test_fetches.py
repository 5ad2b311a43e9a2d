"""When the sums that tf.data adds up are read, and what one reading says; with made sums and a clock that is moved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing.testing import ManualClock
from deep500_timing_tensorflow import _fetches
from deep500_timing_tensorflow._data_tensorflow import Fetched
from deep500_timing_tensorflow._epoch_totals import EpochTotals
from deep500_timing_tensorflow._fetches import SummedFetches
from deep500_timing_tensorflow._open_regions import OpenRegions

MS = 1_000_000
SAMPLES, BYTES = 8, 160


class Sums:
    """The sums of a pipeline, and how often they were read."""

    works = is_untouched = True

    def __init__(self):
        self.now = Fetched(0, 0.0, 0, 0)
        self.readings = 0

    def fetched(self):
        """What was handed out."""
        self.readings += 1
        return self.now

    def samples_in(self, size):
        """As if a sample had twenty bytes."""
        return size // (BYTES // SAMPLES)


class Fit:
    """A fit of executions whose lengths and waits are told, in milliseconds."""

    def __init__(self, several=1):
        self.clock = ManualClock()
        self.timer = Timer(clock=self.clock)
        self.regions = OpenRegions(self.timer)
        self.totals = EpochTotals(0)
        self.sums = Sums()
        self.fetches = SummedFetches(self, several, self.sums)
        self.fetches.times_io = True
        self.several = several

    def execute(self, times=1, *, took_ms=1.0, wait_ms=0.01, steady=True, size=BYTES):
        """Run executions that take their data and so long; how many batches they counted."""
        counted = 0
        for _ in range(times):
            self.fetches.execution_begins(not steady)
            began_ns = self.timer.now_ns()
            self.clock.advance(took_ms / 1e3)
            batches, wait_us, total, whole = self.sums.now
            several = self.several
            self.sums.now = Fetched(batches + several, wait_us + 1e3 * wait_ms, total + several * size, whole + several)
            counted += self.fetches.execution_ended(began_ns, self.timer.now_ns() - began_ns, steady)
        return counted

    def after_the_first(self):
        """The executions at the begin of a fit are over, and their waits forgotten."""
        self.execute(_fetches._FIRST_ONES)
        self.timer.reset()
        self.totals = EpochTotals(0)
        self.sums.readings = 0
        return self

    def waits_ms(self):
        """The intervals of IO."""
        return [1e3 * seconds for seconds in self.timer.get_time("IO")] if self.timer.intervals("IO").size else []


def test_first_executions_of_a_fit_are_read_one_by_one():
    """As many readings as executions, and none before the first: a short fit has a wait for each batch."""
    fit = Fit()
    fit.execute(_fetches._FIRST_ONES)
    assert _fetches._FIRST_ONES == fit.sums.readings
    assert pytest.approx([0.01] * _fetches._FIRST_ONES) == fit.waits_ms()


def test_short_steps_share_a_reading():
    """Of steps of a millisecond fifty are read at once; IO has an interval in each of the steps, of its own length."""
    fit = Fit()
    began_ns = fit.timer.now_ns()
    steps = _fetches._FIRST_ONES + 150
    assert steps == fit.execute(steps)
    assert _fetches._FIRST_ONES + 3 == fit.sums.readings
    assert pytest.approx([0.01] * steps) == fit.waits_ms()
    for step, (start_ns, end_ns) in enumerate(fit.timer.intervals("IO").tolist()):
        assert began_ns + step * MS <= start_ns <= end_ns <= began_ns + (step + 1) * MS
    stats = fit.timer.get_time_stats("IO")
    assert (steps, pytest.approx(1e-5), pytest.approx(1e-5)) == (stats.count, stats.median, stats.mean)


def test_what_is_not_read_yet_is_settled():
    """At the end of an epoch nothing is left out, and a second settling has nothing to do."""
    fit = Fit().after_the_first()
    fit.execute(125)
    assert pytest.approx(1.0) == sum(fit.waits_ms())
    fit.fetches.settle()
    fit.fetches.settle()
    assert pytest.approx([0.01] * 125) == fit.waits_ms()
    assert 3 == fit.sums.readings
    throughput = fit.totals.throughput()
    assert (125 * SAMPLES, 125 * SAMPLES) == (throughput.samples, throughput.epoch_samples)
    assert pytest.approx(1.25e-3 / 125) == fit.totals.logs("")["IO"]


def test_long_steps_are_read_one_by_one():
    """Beside longer steps a reading is nothing, so each has its own wait."""
    fit = Fit().after_the_first()
    fit.execute(5, took_ms=50.0)
    assert pytest.approx([0.01] * 5) == fit.waits_ms()


def test_stall_of_a_single_batch_is_read_at_once_and_lies_in_it():
    """A batch that waits long among short ones is looked at by itself, and its wait is placed in it."""
    fit = Fit().after_the_first()
    fit.execute(5)
    began_ns = fit.timer.now_ns()
    fit.execute(took_ms=4.0, wait_ms=3.0)
    assert 1 == fit.sums.readings
    assert pytest.approx([0.01] * 5 + [3.0]) == fit.waits_ms()
    assert began_ns == fit.timer.intervals("IO")[-1][0]


def test_stall_that_is_read_with_many_short_waits_fills_its_batch_alone():
    """Waits before a stall that are longer than usual and do not fit into its batch are those of the batches before."""
    fit = Fit().after_the_first()
    fit.execute(40, wait_ms=0.08)
    fit.execute(took_ms=4.0, wait_ms=3.9)
    waits_ms = fit.waits_ms()
    assert pytest.approx([(40 * 0.08 + 3.9 - 4.0) / 40] * 40 + [4.0], abs=1e-4) == waits_ms
    assert pytest.approx(40 * 0.08 + 3.9) == sum(waits_ms)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(1, 3),
)
def test_waits_lie_in_their_executions_and_add_up(executions, several):
    """Whatever the lengths and waits, IO has an interval in each execution, none is longer, and the sum is true."""
    fit, spans = Fit(several), []
    for tenths, share in executions:
        began_ns = fit.timer.now_ns()
        fit.execute(took_ms=tenths / 10, wait_ms=share * tenths / 10)
        spans.append((began_ns, fit.timer.now_ns()))
    fit.fetches.settle()
    found = fit.timer.intervals("IO").tolist()
    assert len(spans) == len(found)
    for (began_ns, ended_ns), (start_ns, end_ns) in zip(spans, found, strict=True):
        assert began_ns == start_ns
        assert end_ns <= ended_ns + len(spans)  # The sums are rounded to the nanosecond at each reading.
    assert pytest.approx(fit.sums.now.wait_us / 1e3, abs=1e-6 * len(spans)) == sum(fit.waits_ms())


def test_who_waits_for_data_is_read_at_each_batch():
    """Where a batch is waited for longer than a reading takes, each batch has its own wait, until that is over."""
    fit = Fit().after_the_first()
    fit.execute(took_ms=2.5, wait_ms=1.5)
    fit.execute(3, took_ms=2.0, wait_ms=1.0)
    assert pytest.approx([1.5, 1.0, 1.0, 1.0]) == fit.waits_ms()
    fit.execute(took_ms=1.0, wait_ms=0.0)
    fit.execute(6)
    assert 5 == fit.sums.readings


def test_several_steps_of_an_execution_are_counted_from_the_data():
    """With several batches in an execution each is read, however short: only the data knows how many there were."""
    fit = Fit(several=4).after_the_first()
    assert 12 == fit.execute(3)
    assert 3 == fit.sums.readings


def test_executions_that_trace_are_read_by_themselves():
    """Their samples are kept out of the steady state, those before and after them are not."""
    fit = Fit().after_the_first()
    fit.execute(3)
    fit.execute(steady=False, took_ms=50.0)
    fit.execute(4)
    fit.fetches.settle()
    throughput = fit.totals.throughput()
    assert (7 * SAMPLES, 8 * SAMPLES) == (throughput.samples, throughput.epoch_samples)
    assert pytest.approx([0.01] * 8) == fit.waits_ms()


def test_samples_of_a_trace_that_nobody_expected_are_of_no_state():
    """What was read together with a trace that came unannounced is the epoch's, and whose else is not known."""
    fit = Fit().after_the_first()
    fit.execute(3)
    began_ns = fit.timer.now_ns()
    fit.sums.now = Fetched(
        fit.sums.now.batches + 1, fit.sums.now.wait_us, fit.sums.now.bytes + BYTES, fit.sums.now.whole + 1
    )
    fit.fetches.execution_begins(False)
    fit.fetches.execution_ended(began_ns, MS, False)
    throughput = fit.totals.throughput()
    assert (None, 4 * SAMPLES) == (throughput.samples, throughput.epoch_samples)


def test_sums_of_data_that_was_used_before_are_read_first():
    """What was handed out before the first execution is none of the fit's."""
    fit = Fit()
    fit.sums.is_untouched = False
    fit.fetches = SummedFetches(fit, 1, fit.sums)
    fit.sums.now = Fetched(3, 1e6, 3 * BYTES, 3)
    fit.execute()
    fit.fetches.settle()
    assert (2, SAMPLES) == (fit.sums.readings, fit.totals.throughput().epoch_samples)


def test_exception_tells_what_was_not_read():
    """A fit that is broken off between two executions has the waits and samples of those that are over."""
    fit = Fit().after_the_first()
    fit.execute(25)
    fit.fetches.broken_off()
    fit.fetches.settle()
    assert pytest.approx([0.01] * 25) == fit.waits_ms()
    assert (25 * SAMPLES, 1) == (fit.totals.throughput().epoch_samples, fit.sums.readings)


@pytest.mark.parametrize(("executions", "began_ms"), [(0, 1.0), (25, 0.0)])
def test_exception_inside_an_execution_tells_its_wait(executions, began_ms):
    """The batch that failed was waited for too, as on the other backends, but nothing was trained on it."""
    fit = Fit().after_the_first()
    since_ns = fit.timer.now_ns()
    fit.execute(executions)
    fit.fetches.execution_begins(False)
    fit.clock.advance(0.033)
    before = fit.sums.now
    fit.sums.now = Fetched(before.batches + 1, before.wait_us + 32e3, before.bytes + BYTES, before.whole + 1)
    fit.fetches.broken_off()
    assert pytest.approx([0.01] * executions + [32]) == fit.waits_ms()
    assert since_ns + began_ms * MS == fit.timer.intervals("IO")[0][0]
    assert executions * SAMPLES == fit.totals.throughput().epoch_samples


def test_exception_before_any_batch_was_handed_out():
    """What fails while the first step is traced was waited for nothing, and IO is not there."""
    fit = Fit()
    fit.fetches.execution_begins(True)
    fit.fetches.broken_off()
    assert [] == fit.waits_ms()
