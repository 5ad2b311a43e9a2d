"""The sums of a named timer: added up on the host at a reading, on a device as the times arrive."""

from __future__ import annotations

import threading
from operator import attrgetter
from types import SimpleNamespace

import pytest

from deep500_timing._named.sums import _UNDRAINED, Arrival, DeviceTimes, HostTimes, Totals
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
def times(pool):
    """Times of a device, over that pool."""
    return DeviceTimes("a", pool, lambda: 0)


def stop(times, store, record=False):
    """One stretch; its time has not arrived."""
    times.start()
    times.stop(store, 0, 5, record)


class TestArrival:
    def test_a_time_goes_into_the_intervals_and_all_totals(self, store):
        """It stands where the pool has placed it, and is added up in each."""
        totals = (Totals(), Totals(kept=0))
        Arrival(store, totals).append(3, 10)
        assert ([[3, 10]], [7, 7]) == (
            [list(part) for part in store.copy()["pairs"]],
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
    def test_nothing_is_started_and_nothing_waited_for_at_first(self, times, pool):
        """Reading a timer that was never stopped asks the device nothing."""
        assert (False, 0, 0) == (times.started_here(), times.read().count, times.lifetime().count)
        assert [] == pool.calls

    def test_a_lifetime_keeps_no_time_one_by_one(self, times, pool, store):
        """It is as large after a million stops as after one."""
        stop(times, store)
        pool.sink.append(0, 5)
        assert (5, 0) == (times.lifetime().total_ns, len(times.lifetime().durations_ns))

    def test_only_what_is_to_be_kept_is_recorded(self, times, pool, store):
        """``stop(record=True)`` alone is expected there; reading leaves it, resetting takes it."""
        stop(times, store)
        stop(times, store, record=True)
        pool.sink.append(0, 5)
        read = times.recorded()
        stop(times, store, record=True)
        pool.sink.append(5, 8)
        assert [(1, 5), (2, 8), (2, 8), (0, 0)] == [
            (totals.expected, totals.total_ns)
            for totals in (read, times.recorded(), times.recorded(reset=True), times.recorded())
        ]

    def test_a_stretch_that_was_stopped_already_is_not_stopped_again(self, times, pool, store):
        """The second of two stops at once asks the device nothing, and no reader waits for it."""
        times.stop(store, 0, 5, record=True)
        assert ([], 0, True) == (pool.calls, times.recorded().expected, times.read().complete)

    def test_an_interrupted_stop_is_a_time_that_failed(self, times, pool, store):
        """It goes on, is counted, and its event serves again; no reader waits for it."""
        pool.fault = KeyboardInterrupt()
        with pytest.raises(KeyboardInterrupt):
            stop(times, store)
        assert (1, ["begin", "end", "drop"]) == (store.failed, pool.calls)
        assert times.read().complete

    def test_a_reader_looks_again_while_another_thread_is_amid_its_stop(self, times, pool, store):
        """An expected time will be on its way soon; the reader looks until it arrives."""
        stop(times, store)
        looks = iter([lambda: None, lambda: None, lambda: pool.sink.append(0, 5)])
        pool.when_collected = lambda: next(looks)()
        assert 5 == times.read().total_ns
        assert ["collect for"] * 3 == pool.calls[2:]

    def test_a_reader_does_not_look_again_at_a_device_that_does_not_answer(self, times, pool, store):
        """A time still on its way after the wait does not arrive by asking again."""
        stop(times, store)
        pool.on_its_way = {id(store): 1}
        assert 0 == times.read().count
        assert ["collect for"] == pool.calls[2:]

    def test_a_lifetime_waits(self, times, pool, store):
        """The sum of all times includes those on their way."""
        stop(times, store)
        times.lifetime()
        assert ["collect for"] == pool.calls[2:]


class TestOnTheHost:
    def test_a_lifetime_keeps_no_time_one_by_one(self):
        """It is as large after a million stops as after one."""
        times = HostTimes()
        times.add(0, 5, False)
        assert (5, 0) == (times.lifetime().total_ns, len(times.lifetime().durations_ns))

    def test_stops_without_a_reader_are_added_up_now_and_then(self):
        """Unread stops do not gather without end."""
        times = HostTimes()
        for _ in range(3 * _UNDRAINED):
            times.add(0, 1, False)
        assert len(times.fresh) <= _UNDRAINED
        assert 3 * _UNDRAINED == times.lifetime().count

    def test_adding_up_leaves_the_lock_to_others(self):
        """Another thread reads after a stop has added up."""
        times = HostTimes()
        for _ in range(_UNDRAINED + 1):
            times.add(0, 1, False)
        seen = []
        reader = threading.Thread(target=lambda: seen.append(times._lock.acquire(blocking=False)))
        reader.start()
        reader.join()
        assert [True] == seen

    def test_the_end_is_that_of_what_nobody_has_read_yet(self):
        """The latest end counts, in whichever order stops have come."""
        times = HostTimes()
        times.add(3, 9, False)
        times.add(1, 5, False)
        assert 9 == times.ended_ns()

    def test_a_stretch_that_was_ended_between_two_looks_counts_once(self):
        """A reader that saw its start, and then finds the timer running again on another thread, adds nothing."""
        times = HostTimes()
        times.add(3, 9, False)
        begun_anew = SimpleNamespace(is_open=True, _opened_ns=lambda: 3)
        assert (6, 1) == attrgetter("total_ns", "count")(times.read(begun_anew, lambda: 12))

    def test_recorded_times_stay_until_they_are_reset(self):
        """Reading hands out a copy; resetting hands out the times and restarts."""
        times = HostTimes()
        times.add(0, 5, True)
        times.add(5, 6, False)
        read = times.recorded()
        times.add(6, 8, True)
        assert [(1, 1, 5), (2, 2, 7), (2, 2, 7), (0, 0, 0)] == [
            (totals.count, totals.expected, totals.total_ns)
            for totals in (read, times.recorded(), times.recorded(reset=True), times.recorded())
        ]
