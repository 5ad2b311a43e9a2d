"""Aggregates that go on from one reader to the next are those of all intervals at once."""

from __future__ import annotations

import os
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from deep500_timing import Timer
from deep500_timing._summary.distribution import Distribution
from deep500_timing.testing import InMemoryExporter

NAMES = st.sampled_from(["a", "b"])
DURATIONS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 2**50)), min_size=1)
MANY = st.sampled_from([1, 1, 1, 40, 700])


def same(expected, distribution):
    """Whether a distribution is that of these durations in ns, in all that is exact."""
    found = Distribution.of(np.array(expected, dtype=np.int64))
    exact = ("count", "total_ns", "first_bin", "counts")
    assert [getattr(found, name) for name in exact] == [getattr(distribution, name) for name in exact]
    return found


def fork_and(work):
    """Do it in a forked child, and see that it raised nothing."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


class Histories(RuleBasedStateMachine):
    """A timer, some threads, exporters that come and go, and for each name and thread the durations since the reset."""

    @initialize(keep_last=st.sampled_from([None, 0, 3, 500]), skip_first=st.sampled_from([0, 0, 1, 50]))
    def begin(self, keep_last, skip_first):
        """Make a timer and three threads that live on."""
        self.timer = Timer(keep_last=keep_last, skip_first=skip_first)
        self.skip_first = skip_first
        self.threads = [ThreadPoolExecutor(1) for _ in range(3)]
        self.recorded = {}
        self.exporters = []
        """Each exporter, and by name its reports so far."""

    def teardown(self):
        """End the threads."""
        for thread in getattr(self, "threads", ()):
            thread.shutdown()

    def counted(self, name):
        """The basis of the statistics."""
        parts = [own[self.skip_first :] for (key, _), own in self.recorded.items() if key == name]
        return [duration for part in parts for duration in part]

    @rule(name=NAMES, thread=st.integers(0, 2), durations=DURATIONS, times=MANY)
    def record(self, name, thread, durations, times):
        """Record on one of the threads."""
        several = durations * times

        def work():
            for duration in several:
                self.timer.record(name, 7, 7 + duration)

        self.threads[thread].submit(work).result()
        self.recorded.setdefault((name, thread), []).extend(several)

    @rule()
    def look(self):
        """A snapshot has the aggregates of all, and its quantiles are as near as they say."""
        snapshot = self.timer.snapshot()
        for name in "ab":
            counted, times = self.counted(name), snapshot.get(name)
            if not counted:
                assert times is None or times.stats is None
                continue
            whole = same(counted, times.distribution)
            assert (whole.min_ns, whole.max_ns) == (times.distribution.min_ns, times.distribution.max_ns)
            assert whole.m2_ns2 == pytest.approx(times.distribution.m2_ns2, rel=1e-9, abs=1e-9 * whole.max_ns**2)
            error = times.stats.quantile_error
            assert np.median(counted) / 1e9 == pytest.approx(times.stats.median, rel=error or 1e-12, abs=1e-15)
            assert times.stats == self.timer.get_time_stats(name)

    @rule()
    def come(self):
        """Another exporter, with a first report that is of the whole."""
        self.exporters.append((InMemoryExporter(), {}))

    @rule(which=st.integers(0, 3))
    def go(self, which):
        """One of the exporters is not used any more."""
        if which < len(self.exporters):
            del self.exporters[which]

    @rule(which=st.integers(0, 3))
    def report(self, which):
        """A report holds exactly what came since the exporter's last, or since the reset."""
        for exporter, told in self.exporters[which : which + 2]:
            self.timer.export(exporter)
            snapshot, _ = exporter.exported[-1]
            for name in "ab":
                counted = self.counted(name)
                new = list(counted)
                if told.get(name) is not None:
                    for duration in told[name]:
                        new.remove(duration)
                times = snapshot.get(name)
                if new:
                    same(new, times.distribution)
                    assert sum(new) / 1e9 == times.stats.total
                else:
                    assert times is None or times.stats is None
                told[name] = counted

    @rule()
    def reset(self):
        """Forget all. A report after it cannot be told from a first one if nothing was there before."""
        self.timer.reset()
        self.recorded = {}
        for exporter, told in self.exporters:
            self.timer.export(exporter)
            told.clear()

    @rule(durations=DURATIONS)
    def fork(self, durations):
        """A child begins with nothing, and its times are all that it knows and reports."""
        if not hasattr(os, "fork"):
            return

        def in_child():
            assert () == self.timer.snapshot().regions
            for duration in durations:
                self.timer.record("a", 7, 7 + duration)
            counted = durations[self.skip_first :]
            if counted:
                same(counted, self.timer.snapshot().get("a").distribution)
                for exporter, _ in self.exporters:
                    self.timer.export(exporter)
                    same(counted, exporter.exported[-1][0].get("a").distribution)

        fork_and(in_child)


Histories.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=25)
TestHistories = Histories.TestCase


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")
@pytest.mark.parametrize("skip_first", [0, 1])
@pytest.mark.parametrize("enters_first", [False, True])
def test_a_child_of_a_process_with_threads_keeps_its_times_together(skip_first, enters_first):
    """Python clears the storage of the threads that a child has not, on the child's own thread, which does not end."""
    timer = Timer(skip_first=skip_first)
    if enters_first:
        timer.record("a", 0, 1)

    def in_child():
        for duration in range(4):
            timer.record("a", 0, duration)
        assert [4] == [store.count for store in timer._stores("a", False)]
        assert 4 - skip_first == timer.get_time_stats("a").count

    with ThreadPoolExecutor(1) as thread:
        thread.submit(timer.record, "a", 0, 1).result()
        fork_and(in_child)
