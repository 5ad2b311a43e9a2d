"""The sums of a named timer: added up on the host at a reading, on a device as the times arrive."""

from __future__ import annotations

from collections import deque

import pytest

from deep500_timing import CPUGPUTimer
from deep500_timing._named import _UNDRAINED, Arrival, NamedTimer, Totals
from deep500_timing._recording.intervals import Intervals


class _Pool:
    """A stand-in for a pool of events: notes the calls and plays the faults of a test."""

    def __init__(self):
        self.calls = []
        self.on_its_way = {}
        self.fault = None
        self.when_collected = lambda: None

    def begin(self, pair):
        self.calls.append("begin")

    def end(self, pair, sink, start_ns, end_ns):
        self.calls.append("end")
        if self.fault is not None:
            raise self.fault
        self.sink = sink

    def drop(self, pair):
        self.calls.append("drop")

    def collect(self, *, wait):
        self.calls.append(f"collect, wait={wait}")

    def collect_for(self, sink):
        self.calls.append("collect for")
        self.when_collected()

    def pending(self):
        return self.on_its_way


@pytest.fixture
def store():
    """A region's intervals on the device."""
    return Intervals(-1, 0)


@pytest.fixture
def pool():
    """A pool that has nothing on its way."""
    return _Pool()


@pytest.fixture
def timer(pool, clock):
    """A named timer of a device, over that pool."""
    timer = NamedTimer("a", CPUGPUTimer(clock=clock))
    timer._device = pool
    return timer


@pytest.fixture
def on_host(clock):
    """A named timer on the host."""
    return NamedTimer("a", CPUGPUTimer(clock=clock))


def spend(timer, clock, nanoseconds, record=False):
    """One stretch on the host."""
    timer.start()
    clock.advance_ns(nanoseconds)
    timer.stop(record=record)


def stop(timer, record=False):
    """One stretch; its time has not arrived."""
    timer.start()
    timer.stop(record=record)


class TestArrival:
    def test_a_time_goes_into_the_intervals_and_all_totals(self, store):
        """It stands where the pool has placed it, and is added up in each."""
        totals = (Totals(), Totals(deque(maxlen=0)))
        Arrival(store, totals).append(3, 10, 2, 4)
        assert ([[3, 10]], [7, 7]) == (
            [memoryview(part).cast("q").tolist() for part in store.kept()[0]],
            [each.total_ns for each in totals],
        )

    def test_a_time_that_cannot_be_had_is_counted_and_missing(self, store):
        """The intervals say why, and no reader waits for it."""
        totals = Totals()
        totals.expected = 2
        arrival = Arrival(store, (totals,))
        arrival.failed += 1
        assert (1, 0, 1, False) == (store.failed, store.captured, totals.missing, totals.complete)
        arrival.captured += 1
        assert (1, 1, 2, True) == (store.failed, store.captured, totals.missing, totals.complete)


class TestOnADevice:
    def test_nothing_is_started_and_nothing_waited_for_at_first(self, timer, pool):
        """Reading a timer that was never stopped asks the device nothing."""
        assert 0 == timer.read().count
        assert [] == pool.calls

    def test_only_what_is_to_be_kept_is_recorded(self, timer, pool):
        """``stop(record=True)`` alone is expected there; reading leaves it, resetting takes it."""
        stop(timer)
        stop(timer, record=True)
        pool.sink.append(0, 5, 0, 5)
        read = timer.recorded()
        stop(timer, record=True)
        pool.sink.append(5, 8, 5, 8)
        assert [(1, 5), (2, 8), (2, 8), (0, 0)] == [
            (totals.expected, totals.total_ns)
            for totals in (read, timer.recorded(), timer.recorded(reset=True), timer.recorded())
        ]

    def test_a_stretch_that_was_stopped_already_is_not_stopped_again(self, timer, pool):
        """The second of two stops at once asks the device nothing, and no reader waits for it."""
        timer._stop_on_device(pool, 0, 5, True)
        assert ([], 0, True) == (pool.calls, timer.recorded().expected, timer.read().complete)

    def test_an_interrupted_stop_is_a_time_that_failed(self, timer, pool):
        """It goes on, is counted, and its event serves again; no reader waits for it."""
        pool.fault = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            stop(timer)
        assert (1, ["begin", "end", "drop"]) == (timer._store.failed, pool.calls)
        assert timer.read().complete

    def test_a_reader_looks_again_while_another_thread_is_amid_its_stop(self, timer, pool):
        """An expected time will be on its way soon; the reader looks until it arrives."""
        stop(timer)
        looks = iter([lambda: None, lambda: None, lambda: pool.sink.append(0, 5, 0, 5)])
        pool.when_collected = lambda: next(looks)()
        assert 5 == timer.read().total_ns
        assert ["collect for"] * 3 == pool.calls[2:]

    def test_a_reader_does_not_look_again_at_a_device_that_does_not_answer(self, timer, pool):
        """A time still on its way after the wait does not arrive by asking again."""
        stop(timer)
        pool.on_its_way = {id(timer._store): 1}
        assert 0 == timer.read().count
        assert ["collect for"] == pool.calls[2:]


class TestOnTheHost:
    def test_stops_without_a_reader_are_added_up_now_and_then(self, on_host, clock):
        """Unread stops do not gather without end."""
        for _ in range(3 * _UNDRAINED):
            spend(on_host, clock, 1)
        assert len(on_host._fresh) <= _UNDRAINED
        assert 3 * _UNDRAINED == on_host.read().count

    def test_adding_up_leaves_the_lock_to_others(self, on_host, clock, in_thread):
        """Another thread reads after a stop has added up."""
        for _ in range(_UNDRAINED + 1):
            spend(on_host, clock, 1)
        assert in_thread(lambda: on_host._lock.acquire(blocking=False))

    def test_a_stretch_that_was_ended_between_two_looks_counts_once(self, on_host, clock):
        """A reader that saw its start, and then finds the timer running again on another thread, adds nothing."""
        start_ns = clock.now_ns()
        spend(on_host, clock, 6)
        on_host._region._open_at(start_ns)
        clock.advance_ns(3)
        totals = on_host.read()
        assert (6, 1) == (totals.total_ns, totals.count)

    def test_recorded_times_stay_until_they_are_reset(self, on_host, clock):
        """Reading hands out a copy; resetting hands out the times and restarts."""
        spend(on_host, clock, 5, record=True)
        spend(on_host, clock, 1)
        read = on_host.recorded()
        spend(on_host, clock, 2, record=True)
        assert [(1, 1, 5), (2, 2, 7), (2, 2, 7), (0, 0, 0)] == [
            (totals.count, totals.expected, totals.total_ns)
            for totals in (read, on_host.recorded(), on_host.recorded(reset=True), on_host.recorded())
        ]
