"""Which pairs are read, and when: never one that the device has not passed, and with as few questions as will do."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing import TimingWarning
from deep500_timing._recording.intervals import Intervals
from deep500_timing.devices import EventPair, EventPool
from deep500_timing.testing import ManualDeviceClock

S = 10**9


class Watched(ManualDeviceClock):
    """Counts the times that it is asked for before it has passed both events."""

    early = 0

    def elapsed_ns(self, start, end):
        """As ever."""
        self.early += max(start.recorded_ns, end.recorded_ns) > self.now_ns
        return super().elapsed_ns(start, end)


class Work:
    """Pairs of a second each on one stream."""

    def __init__(self, device):
        """On its own pool."""
        self.device = device
        self.pool = EventPool(device)
        self.sink = Intervals(-1, 0)
        self.launched = 0

    def launch(self, number):
        """So many more."""
        for _ in range(number):
            pair = EventPair("a")
            self.pool.begin(pair)
            self.device.launch(1)
            self.pool.end(pair, self.sink, self.launched * S, self.launched * S)
            self.launched += 1

    @property
    def counts(self):
        """How many were read, are pending and failed."""
        return self.sink.count, self.pool.pending().get(id(self.sink), 0), self.sink.failed


class TestNeverTooEarly:
    @given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 45)), max_size=6))
    @settings(max_examples=40)
    def test_a_reader_gets_what_the_device_has_passed(self, steps):
        """All of it and nothing else, for any pause between two looks; no time is asked for that is not there."""
        device = Watched()
        work, ends_s = Work(device), []
        for number, pause_s in steps:
            for _ in range(number):
                ends_s.append(max([device.now_ns // S, *ends_s[-1:]]) + 1)
            work.launch(number)
            device.advance(pause_s)
            work.pool.collect(wait=False)
            passed = sum(end_s * S <= device.now_ns for end_s in ends_s)
            assert (passed, len(ends_s) - passed, 0) == work.counts
        assert 0 == device.early

    def test_a_reader_asks_by_halves(self):
        """For the last pair first: of sixteen, one answer or five tell how many the device has passed."""
        found = []
        for passed in range(17):
            work = Work(device := Watched())
            work.launch(16)
            device.advance(passed)
            asked = device.calls["is_done"]
            work.pool.collect(wait=False)
            found.append((work.counts, device.early, device.calls["is_done"] - asked))
        assert [((n, 16 - n, 0), 0, 5 if n < 16 else 1) for n in range(17)] == found

    def test_the_end_of_a_region_reads_up_to_the_middle(self):
        """If the device has passed that one; it is not asked about any behind it, nor are those read."""
        found = []
        for passed in range(18):
            work = Work(device := Watched())
            work.launch(16)
            device.advance(passed)
            work.launch(1)
            found.append((work.sink.count, device.early))
        assert [(0, 0)] * 9 + [(9, 0)] * 9 == found


def test_a_yes_in_the_middle_of_a_backlog_serves_for_all_before_it():
    """One question, and a few of the pairs are read at the end of each region that finds no free event."""
    work = Work(device := ManualDeviceClock())
    work.launch(100)
    device.finish()
    asked = device.calls["is_done"]
    while work.sink.count < 48:
        work.launch(1)
    assert (48, 1) == (work.sink.count, device.calls["is_done"] - asked)


def test_what_is_known_to_be_done_is_read_once():
    """The device has passed the first half of a backlog and no more: that is read, with any work behind it."""
    work = Work(device := Watched())
    work.launch(40)
    device.advance(21)
    work.launch(60)
    assert (21, 79, 0, 0) == (*work.counts, device.early)


def test_a_pair_that_is_ended_twice(device):
    """Its second end has no start, and fails."""
    work = Work(device)
    pair = EventPair("a")
    work.pool.begin(pair)
    for _ in range(2):
        work.pool.end(pair, work.sink, 0, 0)
    work.pool.collect(wait=True)
    assert (1, 0, 1) == work.counts


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_child_that_is_forked_while_another_thread_reads():
    """It reads its own launches, though in the parent someone else was about to."""

    class Slow(ManualDeviceClock):
        def is_done(self, event):
            if threading.get_ident() == reader.ident:
                reading.set()
                go_on.wait()
            return super().is_done(event)

    reading, go_on = threading.Event(), threading.Event()
    work = Work(device := Slow())
    reader = threading.Thread(target=work.pool.collect, kwargs={"wait": False})
    work.launch(1)
    reader.start()
    reading.wait()
    child = os.fork()
    if child == 0:
        try:
            work.pool.abandon()
            work.launch(3)
            device.finish()
            work.pool.collect(wait=False)
        finally:
            os._exit(work.sink.count)
    go_on.set()
    reader.join()
    assert 3 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class TestADeviceThatDoesNotSay:
    @pytest.fixture
    def work(self, device):
        """One pair on its way."""
        work = Work(device)
        work.launch(1)
        return work

    @staticmethod
    def refused(work, times):
        """The device refuses to answer so many readers; how many pairs have failed after each."""
        failed = []
        for method in ("is_done", "elapsed_ns"):
            work.device.fail(method, RuntimeError("not permitted"))
        for _ in range(times):
            work.pool.collect(wait=False)
            failed.append(work.sink.failed)
        for method in ("is_done", "elapsed_ns"):
            work.device.fail(method, None)
        return failed

    @pytest.mark.filterwarnings("ignore::deep500_timing.TimingWarning")
    def test_the_sixteenth_time_is_the_last(self, work):
        """Until then the pair may be one of a capture that no one told of."""
        assert [0] * 15 + [1] == self.refused(work, 16)

    def test_an_answer_in_between_begins_the_count_anew(self, work):
        """Whether yes or no: the device does answer."""
        with pytest.warns(TimingWarning, match="its times stay pending"):
            assert [0] * 15 == self.refused(work, 15)
        work.pool.collect(wait=False)
        assert [0] * 15 == self.refused(work, 15)
        work.device.finish()
        work.pool.collect(wait=False)
        assert (1, 0, 0) == work.counts


@pytest.mark.parametrize("ask", ["collect_for", "collect"])
def test_who_interrupts_a_reader_does_not_read(ask):
    """A signal's handler during the reading of its own thread comes back at once; waiting it would wait for itself."""

    class Interrupted(ManualDeviceClock):
        def is_done(self, event):
            if handlers:
                handlers.pop()()
            return super().is_done(event)

    work = Work(device := Interrupted())
    work.launch(3)
    device.advance(1)
    handlers = [
        {"collect": lambda: work.pool.collect(wait=True), "collect_for": lambda: work.pool.collect_for(work.sink)}[ask]
    ]
    work.pool.collect(wait=False)
    assert ([], 0, (1, 2, 0)) == (handlers, device.calls["wait"], work.counts)


def test_a_device_that_was_never_read_is_uncertain_of_nothing(device):
    """A pool has no place of a time yet that could be off."""
    work = Work(device)
    work.launch(1)
    assert 0 == work.pool.uncertainty_ns
