"""Times on a device: exact, never waited for, bounded in events, and counted when they are missing."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing import CPUGPUTimer, TimingWarning
from deep500_timing.devices import EventPool, pool_of
from deep500_timing.testing import ManualClock, ManualDeviceClock


@pytest.fixture
def tmr(clock, device):
    """A timer for it."""
    return CPUGPUTimer(clock=clock, device_clock=device)


def test_a_log_is_waited_for_on_both_clocks(clock, device):
    """From when it is attached it loses nothing, of regions that came before and since; and holds up none after."""
    tmr = CPUGPUTimer(clock=clock, device_clock=device, keep_last=0)

    def work(number, *keys):
        for key in number * keys:
            with tmr.region(key, gpu=True):
                device.launch(1e-6)
            device.finish()
        tmr.complete_all()

    def stores(key):
        (region,) = tmr._regions_of(key)
        return region._intervals, region._device_store()

    work(1, "before")
    tmr._attach_log()
    work(300, "before", "since")
    assert [(301, 0), (301, 0), (300, 0), (300, 0)] == [
        store.since(0)[1:] for key in ("before", "since") for store in stores(key)
    ]
    assert 601 == sum(region._intervals.count for region in tmr._regions())
    tmr._detach_log()
    work(300, "before", "since")
    for key in ("before", "since"):
        for store in stores(key):
            assert store.kept()[1] > 300


def on_device(tmr, key="a"):
    """A snapshot's values of a region on the device."""
    return tmr.snapshot().get(key, "GPU")


def work(tmr, device, seconds, key="a"):
    """Time work of that length."""
    tmr.start(key, gpu=True)
    device.launch(seconds)
    tmr.end(key, gpu=True)


class TestTimes:
    def test_exact(self, tmr, device, clock):
        """The device's time is that of the work between the marks, the host's that of handing it over."""
        for seconds in (1, 2, 0.5):
            tmr.start("a", gpu=True)
            device.launch(seconds)
            clock.advance(0.001)
            tmr.end("a", gpu=True)
        assert ([1.0, 2.0, 0.5], [0.001] * 3) == (tmr.get_time("a", gpu=True), tmr.get_time("a"))
        stats = tmr.get_time_stats("a", gpu=True)
        assert (3, 3.5, 1.0) == (stats.count, stats.total, stats.median)

    def test_each_way_to_time(self, tmr, device):
        """Handles time on the device as well, and know their key."""
        region = tmr.region("a", gpu=True)
        with region as entered:
            device.launch(1)
        region.start()
        device.launch(2)
        region.end()
        assert (True, True, "a") == (entered is region, region is tmr.region("a", gpu=True), region.key)
        assert [1.0, 2.0] == tmr.get_time("a", gpu=True)

    def test_intervals_stand_where_they_began_on_the_host(self, tmr, device, clock):
        """A device's interval has the host's start and the device's length."""
        clock.advance(3)
        start_ns = clock.now_ns()
        work(tmr, device, 2)
        assert [[start_ns, start_ns + 2 * 10**9]] == tmr.intervals("a", gpu=True).tolist()

    def test_nested_and_overlapping(self, tmr, device):
        """Regions of different keys have their own marks."""
        tmr.start("outer", gpu=True)
        device.launch(1)
        tmr.start("inner", gpu=True)
        device.launch(2)
        tmr.end("outer", gpu=True)
        device.launch(4)
        tmr.end("inner", gpu=True)
        assert ([3.0], [6.0]) == (tmr.get_time("outer", gpu=True), tmr.get_time("inner", gpu=True))

    def test_without_gpu_the_device_is_left_alone(self, tmr, device):
        """A region without ``gpu`` asks nothing of the device."""
        with tmr.region("a"):
            tmr.start("b")
            tmr.end("b")
        assert Counter() == device.calls
        assert (None, []) == (on_device(tmr), tmr.get_time("a", gpu=True))

    def test_one_region_with_and_without_the_device_in_turn(self, tmr, device):
        """A stretch's device is forgotten with it: by calls and by handles, in either order."""
        plain, both = tmr.region("a"), tmr.region("a", gpu=True)
        for start, end in (
            (lambda: tmr.start("a", gpu=True), lambda: tmr.end("a", gpu=True)),
            (plain.start, plain.end),
            (both.start, both.end),
            (lambda: tmr.start("a"), lambda: tmr.end("a")),
            (lambda: tmr.start("a", gpu=True), lambda: tmr.discard("a")),
            (plain.start, plain.end),
        ):
            start()
            device.launch(1)
            end()
        assert (5, [1.0, 1.0]) == (len(tmr.get_time("a")), tmr.get_time("a", gpu=True))

    def test_keep_last_and_skip_first(self, clock, device):
        """The settings hold on the device as on the host."""
        tmr = CPUGPUTimer(clock=clock, device_clock=device, keep_last=2, skip_first=1)
        for seconds in (9, 1, 2, 3):
            work(tmr, device, seconds)
        stats = tmr.get_time_stats("a", gpu=True)
        assert ([2.0, 3.0], 3, 6.0, 1) == (tmr.get_time("a", gpu=True), stats.count, stats.total, stats.skipped)

    def test_a_timer_without_a_device(self, clock):
        """``gpu=True`` is accepted and times the host."""
        tmr = CPUGPUTimer(clock=clock)
        with tmr.region("a", gpu=True):
            clock.advance(1)
        tmr.start("a", gpu=True)
        assert tmr.discard("a") is True
        assert ([1.0], []) == (tmr.get_time("a"), tmr.get_time("a", gpu=True))
        assert tmr.complete_all() is None


class TestNeverWaiting:
    def test_what_is_on_its_way_is_pending(self, tmr, device):
        """A snapshot waits for nothing and counts missing times; later ones have it."""
        work(tmr, device, 1)
        work(tmr, device, 1)
        times = on_device(tmr)
        assert (2, None) == (times.pending, times.stats)
        device.advance(1)
        times = on_device(tmr)
        assert (1, 1) == (times.pending, times.stats.count)
        device.finish()
        times = on_device(tmr)
        assert (0, 2, 0) == (times.pending, times.stats.count, device.calls["wait"])

    def test_reading_times_waits(self, tmr, device):
        """``get_time``, ``get_time_stats``, ``intervals`` and ``complete_all`` complete pending times."""
        for read in (
            lambda: tmr.get_time("a", gpu=True),
            lambda: tmr.get_time_stats("a", gpu=True),
            lambda: tmr.intervals("a", gpu=True),
            tmr.complete_all,
        ):
            work(tmr, device, 1)
            assert 1 == on_device(tmr).pending
            read()
            assert 0 == on_device(tmr).pending
        assert 4 == device.calls["wait"]

    @pytest.mark.parametrize("lag", [0, 1, 5, 50])
    def test_events_are_bounded_by_the_work_in_flight(self, tmr, device, lag):
        """Under a steady lag: two records and at most one query a region, no wait, and at last no growth."""
        device_time = 0
        for i in range(3000):
            work(tmr, device, 1)
            if i >= lag:
                device.advance(1)
                device_time += 1
            if i == 1500:
                steady, before = tmr.device.events, Counter(device.calls)
        calls = device.calls - before
        assert 2 * 1499 == calls["record"]
        assert calls["is_done"] <= 1499
        assert 0 == device.calls["wait"]
        assert 0 == calls["new_event"]
        assert steady == tmr.device.events <= 4 * lag + 40
        assert [1.0] * 3000 == tmr.get_time("a", gpu=True)

    def test_a_hundred_thousand_regions(self, tmr, device):
        """A long run under changing lag neither fails nor waits nor hoards events."""
        for i in range(100_000):
            work(tmr, device, 1)
            if i % 7 == 6:
                device.advance(7)
        assert (0, True) == (device.calls["wait"], tmr.device.events < 100)
        device.finish()
        assert 100_000 == on_device(tmr).stats.count


class TestCapture:
    def test_regions_in_a_capture_are_counted_and_not_timed(self, tmr, device, clock):
        """While a stream is being captured nothing is recorded or queried; the host's times go on."""
        work(tmr, device, 1)
        device.capturing = True
        before = Counter(device.calls)
        for _ in range(100):
            work(tmr, device, 1)
        snapshot = tmr.snapshot()
        tmr.complete_all()
        assert set(device.calls - before) <= {"is_capturing", "stream"}
        assert (100, 1) == (snapshot.get("a", "GPU").captured, snapshot.get("a", "GPU").pending)
        device.capturing = False
        assert ([1.0], 101) == (tmr.get_time("a", gpu=True), len(tmr.get_time("a")))

    def test_a_capture_that_begins_or_ends_inside_a_region(self, tmr, device):
        """Such a region is captured as well, and its start event serves again."""
        for _ in range(20):
            tmr.start("a", gpu=True)
            device.capturing = True
            tmr.end("a", gpu=True)
            tmr.start("a", gpu=True)
            device.capturing = False
            tmr.end("a", gpu=True)
        assert (40, True) == (on_device(tmr).captured, tmr.device.events <= 2)

    def test_discard_in_a_capture(self, tmr, device):
        """A captured region can be forgotten."""
        device.capturing = True
        tmr.start("a", gpu=True)
        tmr.discard("a")
        assert (1, 0) == (on_device(tmr).discarded, on_device(tmr).captured)


class TestFaults:
    @pytest.mark.parametrize("method", ["stream", "is_capturing", "new_event", "record"])
    def test_in_start(self, tmr, device, clock, method):
        """A start that the device does not take costs its time, one warning, and nothing of the host's."""
        device.fail(method, RuntimeError("device lost"))
        with pytest.warns(TimingWarning, match="device lost") as caught:
            for _ in range(50):
                tmr.start("a", gpu=True)
                clock.advance(1)
                tmr.end("a", gpu=True)
        assert 1 == len(caught)
        assert (
            "Recording the start of region 'a' on the device 'manual' failed; device times that cannot be read are "
            "counted as failed, CPU times go on: device lost"
        ) == str(caught[0].message)
        device.fail(method, None)
        work(tmr, device, 2)
        assert ([1.0] * 50 + [0.0], [2.0]) == (tmr.get_time("a"), tmr.get_time("a", gpu=True))
        assert (50, True) == (on_device(tmr).failed, tmr.device.events <= 3)

    @pytest.mark.parametrize("method", ["stream", "is_capturing", "record"])
    def test_in_end(self, tmr, device, method):
        """The same for an end; the start event serves again."""
        with pytest.warns(TimingWarning, match="Recording the end of region 'a'") as caught:
            for _ in range(50):
                tmr.start("a", gpu=True)
                device.fail(method, RuntimeError("device lost"))
                tmr.end("a", gpu=True)
                device.fail(method, None)
        assert 1 == len(caught)
        work(tmr, device, 2)
        assert (50, [2.0]) == (on_device(tmr).failed, tmr.get_time("a", gpu=True))
        assert tmr.device.events <= 4

    def test_in_end_for_want_of_an_event(self, tmr, device):
        """The same when the pool is empty and cannot grow."""
        tmr.start("b", gpu=True)
        device.fail("new_event", RuntimeError("no more"))
        with pytest.warns(TimingWarning, match="no more"):
            tmr.start("a", gpu=True)
            tmr.start("c", gpu=True)
            for key in "abc":
                tmr.end(key, gpu=True)
        assert 3 == sum(region.failed for region in tmr.snapshot() if region.device == "GPU") + len(
            tmr.get_time("a", gpu=True)
        )

    def test_in_reading(self, tmr, device):
        """A pair that is done and cannot be read is counted as failed."""
        work(tmr, device, 1)
        device.finish()
        device.fail("elapsed_ns", RuntimeError("bad event"))
        with pytest.warns(TimingWarning) as caught:
            times = on_device(tmr)
        assert (1, 0, None) == (times.failed, times.pending, times.stats)
        assert ("Reading a time on the device 'manual' failed and is counted as failed: bad event") == str(
            caught[0].message
        )

    def test_in_queries(self, tmr, device):
        """Pairs that can be asked for no more are read, or counted as failed, and do not pile up."""
        device.fail("is_done", RuntimeError("sticky"))
        device.fail("elapsed_ns", RuntimeError("sticky"))
        with pytest.warns(TimingWarning):
            for _ in range(100):
                work(tmr, device, 1)
            times = on_device(tmr)
        assert (100, 0) == (times.failed, times.pending)

    def test_in_waiting(self, tmr, device):
        """A wait in vain ends with the known times and a warning."""
        work(tmr, device, 1)
        device.advance(1)
        work(tmr, device, 1)
        device.fail("wait", RuntimeError("hung"))
        with pytest.warns(TimingWarning) as caught:
            assert [1.0] == tmr.get_time("a", gpu=True)
        assert ("Waiting for the device 'manual' failed; times of finished work are reported: hung") == str(
            caught[0].message
        )

    def test_in_asking_for_a_capture(self, tmr, device):
        """A device that cannot say whether it captures is not queried."""
        work(tmr, device, 1)
        device.fail("is_capturing", RuntimeError("gone"))
        before = Counter(device.calls)
        assert 1 == on_device(tmr).pending
        tmr.complete_all()
        assert {"is_capturing"} == set(device.calls - before)

    def test_a_negative_time_is_none(self, tmr, device):
        """A time below zero is no time: it is counted as failed, and said once."""
        tmr.start("a", gpu=True)
        device.launch(1)
        tmr.end("a", gpu=True)
        ((start, end, *_),) = next(iter(tmr.device._queues.values())).pending
        start.recorded_ns, end.recorded_ns = end.recorded_ns, start.recorded_ns
        device.finish()
        with pytest.warns(TimingWarning, match="ended before it began"):
            assert [] == tmr.get_time("a", gpu=True)
        assert 1 == on_device(tmr).failed


class TestForgetting:
    def test_an_exception(self, tmr, device):
        """A failed region has no time on the device either, and its event serves again."""
        for _ in range(20):
            with pytest.raises(ValueError), tmr.region("a", gpu=True):
                device.launch(1)
                raise ValueError
        region = tmr.region("a", gpu=True)
        tmr.fail("a")
        region.start()
        tmr.fail("a")
        times = on_device(tmr)
        assert (21, 0, None) == (times.failed, times.pending, times.stats)
        assert (21, True) == (tmr.snapshot().get("a").failed, tmr.device.events <= 2)

    def test_discard(self, tmr, device):
        """A discarded region counts as such on both."""
        for _ in range(20):
            tmr.start("a", gpu=True)
            assert tmr.discard("a") is True
        assert (20, 20, True) == (on_device(tmr).discarded, tmr.snapshot().get("a").discarded, tmr.device.events <= 2)

    def test_disabling(self, tmr, device):
        """Switching off forgets the open regions, not the times on their way."""
        work(tmr, device, 1)
        tmr.start("a", gpu=True)
        tmr.enabled = False
        work(tmr, device, 1)
        tmr.enabled = True
        assert ([1.0], 1) == (tmr.get_time("a", gpu=True), on_device(tmr).discarded)

    def test_reset(self, tmr, device):
        """Pending times at a ``reset`` are forgotten; its events serve again."""
        for _ in range(5):
            work(tmr, device, 1)
        tmr.reset()
        assert () == tmr.snapshot().regions
        work(tmr, device, 7)
        assert [7.0] == tmr.get_time("a", gpu=True)
        created = tmr.device.events
        for _ in range(5):
            work(tmr, device, 1)
        assert created == tmr.device.events


class TestStreams:
    def test_two_streams(self, tmr, device):
        """Each stream has its own order; a slow one does not hold up the other."""
        device.use_stream("slow")
        work(tmr, device, 100, "slow")
        device.use_stream("fast")
        for _ in range(50):
            work(tmr, device, 1, "fast")
            device.advance(1)
        snapshot = tmr.snapshot()
        assert (1, None) == (snapshot.get("slow", "GPU").pending, snapshot.get("slow", "GPU").stats)
        assert (0, 50) == (snapshot.get("fast", "GPU").pending, snapshot.get("fast", "GPU").stats.count)
        assert [100.0] == tmr.get_time("slow", gpu=True)

    def test_a_region_from_one_stream_to_another(self, tmr, device):
        """A region that ends on another stream is read when both of its events are done."""
        for _ in range(30):
            device.use_stream("one")
            device.launch(10)
            tmr.start("a", gpu=True)
            device.use_stream("two")
            device.launch(11)
            tmr.end("a", gpu=True)
        assert (30, None) == (on_device(tmr).pending, on_device(tmr).stats)
        assert [float(i + 1) for i in range(30)] == tmr.get_time("a", gpu=True)
        assert 0 == on_device(tmr).failed

    def test_timers_share_the_events_of_a_device(self, clock, device):
        """Two timers of one device clock draw from one pool, and their times stay apart."""
        one, two = (CPUGPUTimer(clock=clock, device_clock=device) for _ in range(2))
        for _ in range(10):
            work(one, device, 1)
            work(two, device, 2)
        assert one.device is two.device is pool_of(device)
        assert ([1.0] * 10, [2.0] * 10) == (one.get_time("a", gpu=True), two.get_time("a", gpu=True))

    def test_threads_on_one_stream(self, tmr, device):
        """Threads that share a stream lose nothing and fail nothing."""
        barrier = threading.Barrier(4)

        def worker():
            barrier.wait()
            for _ in range(500):
                work(tmr, device, 1e-9)
                device.advance(1e-9)

        threads = [threading.Thread(target=worker) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tmr.complete_all()
        times = on_device(tmr)
        assert (2000, 0, 0) == (times.stats.count, times.failed, times.pending)

    def test_pending_is_counted_for_each_region(self, tmr, device):
        """Pending times are shown next to the region that it is for."""
        for key, number in (("a", 1), ("b", 3)):
            for _ in range(number):
                work(tmr, device, 1, key)
        snapshot = tmr.snapshot()
        assert {"a": 1, "b": 3} == {region.name: region.pending for region in snapshot if region.device == "GPU"}


def test_a_snapshot_does_not_wait_for_who_waits(device, clock):
    """While one thread waits for the device, another's snapshot and regions go on."""

    class Stuck(ManualDeviceClock):
        def wait(self, event):
            waiting.set()
            let_go.wait()
            super().wait(event)

    waiting, let_go = threading.Event(), threading.Event()
    device = Stuck()
    tmr = CPUGPUTimer(clock=clock, device_clock=device)
    work(tmr, device, 1)
    thread = threading.Thread(target=tmr.complete_all)
    thread.start()
    waiting.wait()
    for _ in range(50):
        work(tmr, device, 1)
    assert 51 == on_device(tmr).pending
    let_go.set()
    thread.join()
    assert 51 == len(tmr.get_time("a", gpu=True))


def test_who_waits_inside_the_collecting_of_its_own_thread_gets_what_there_is(clock):
    """A call out of the middle of collecting, as a signal handler makes it, returns at once."""

    class Nosy(ManualDeviceClock):
        def elapsed_ns(self, start, end):
            inner.append((tmr.complete_all(), tmr.get_time("b", gpu=True), on_device(tmr, "b")))
            return super().elapsed_ns(start, end)

    inner = []
    device = Nosy()
    tmr = CPUGPUTimer(clock=clock, device_clock=device)
    work(tmr, device, 1)
    assert [1.0] == tmr.get_time("a", gpu=True)
    assert [(None, [], None)] == inner


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("work"), st.sampled_from("xyz"), st.integers(0, 5)),
            st.tuples(st.just("advance"), st.integers(0, 20)),
            st.tuples(st.just("stream"), st.sampled_from("st")),
            st.tuples(st.just("discard"), st.sampled_from("xyz")),
            st.tuples(st.just("fail"), st.sampled_from("xyz")),
            st.tuples(st.just("capture"), st.booleans()),
            st.tuples(st.just("snapshot")),
            st.tuples(st.just("complete")),
        ),
        max_size=200,
    )
)
def test_any_history(steps):
    """For any calls in any order, each region's device time is its work's, or it is counted as what it was."""
    device = ManualDeviceClock()
    tmr = CPUGPUTimer(clock=ManualClock(), device_clock=device)
    times = {key: [] for key in "xyz"}
    counted = Counter()
    capturing = False
    device.use_stream("s")
    for kind, *arguments in steps:
        if kind == "work":
            key, seconds = arguments
            work(tmr, device, seconds, key)
            if capturing:
                counted[key, "captured"] += 1
            else:
                times[key].append(float(seconds))
        elif kind == "advance":
            device.advance(*arguments)
        elif kind == "stream":
            device.use_stream(*arguments)
        elif kind == "discard":
            tmr.start(*arguments, gpu=True)
            tmr.discard(*arguments)
            counted[arguments[0], "discarded"] += 1
        elif kind == "fail":
            tmr.region(*arguments, gpu=True).start()
            tmr.fail(*arguments)
            counted[arguments[0], "failed"] += 1
        elif kind == "capture":
            device.capturing = capturing = arguments[0]
        elif kind == "snapshot":
            tmr.snapshot()
        else:
            tmr.complete_all()
    waits = device.calls["wait"]
    assert waits == 0 or any(kind == "complete" for kind, *_ in steps)
    device.capturing = False
    assert {key: sorted(kept) for key, kept in times.items()} == {
        key: sorted(tmr.get_time(key, gpu=True)) for key in times
    }
    for key in times:
        found = on_device(tmr, key)
        for counter in ("captured", "discarded", "failed"):
            assert counted[key, counter] == (getattr(found, counter) if found else 0)
    # Every event is back in the pool, or the anchor of its stream.
    queues = tmr.device._queues.values()
    kept = [anchor.event for queue in queues for anchor in queue.anchors.values()]
    held = [*kept, *(event for queue in queues for event in queue.free)]
    assert tmr.device.events == len(held) == len(set(map(id, held)))
    assert [0] * len(kept) == [anchor.users for queue in queues for anchor in queue.anchors.values()]


def test_collecting_for_one_region_waits_for_no_other(device, tmr):
    """A request for one region's times waits for the last of its pairs, not for later work."""
    for key in ("a", "b", "a", "c"):
        work(tmr, device, 1, key)
    device.use_stream("another")
    work(tmr, device, 100, "c")
    tmr.device.collect_for(tmr._find("a")._device_store())
    assert 3 * 10**9 == device.now_ns
    assert {"a": 2, "b": 1, "c": None} == {
        key: stats and stats.count for key in "abc" for stats in [on_device(tmr, key).stats]
    }
    device.capturing = True
    tmr.device.collect_for(tmr._find("c")._device_store())
    assert 3 * 10**9 == device.now_ns


def test_abandoned_events_are_neither_used_nor_destroyed(device, tmr):
    """A forked child leaves inherited objects alone, and it starts with its own pool."""
    work(tmr, device, 1)
    ledger = EventPool(device)
    assert 0 == ledger.events
    old = set(map(id, next(iter(tmr.device._queues.values())).pending[0][:2]))
    tmr.device.abandon()
    tmr.reset()
    work(tmr, device, 2)
    assert old.isdisjoint(map(id, next(iter(tmr.device._queues.values())).pending[0][:2]))
    assert [2.0] == tmr.get_time("a", gpu=True)
