"""The only thing that leaves a timer: plain, frozen data."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading

import pytest

from deep500_timing import CPUGPUTimer, RegionTimes, Snapshot, Timer, TimeType
from deep500_timing._recording.recorder import begin_recomputation, end_recomputation
from deep500_timing._summary.reading import summarize
from deep500_timing._summary.snapshot import ClockAnchor, take_anchor
from deep500_timing.testing import ManualDeviceClock

S = 1_000_000_000


def test_regions_stand_in_the_order_of_time_types_and_then_of_names(tmr):
    """The order does not depend on who was first, and is that of the types, not of their names."""
    for key in ("zebra", TimeType.OTHER, "ALPHA", TimeType.BATCH, TimeType.IO, TimeType.EPOCH):
        tmr.record(key, 0, S)
    expected = [member.name for member in TimeType if member.name in {"EPOCH", "BATCH", "IO", "OTHER"}]
    assert expected != sorted(expected)
    assert [*expected, "ALPHA", "zebra"] == [region.name for region in tmr.snapshot()]


def test_what_is_counted_adds_up_over_threads(tmr, in_thread):
    """Failures, discarded starts and kept intervals of every thread are in the one row."""

    def fail(times):
        for _ in range(times):
            with pytest.raises(KeyError), tmr.region("a"):
                raise KeyError
        tmr.record("a", times, 2 * times)
        tmr.start("a")
        tmr.discard("a")

    in_thread(fail, 3)
    fail(2)
    region = tmr.snapshot().get("a")
    assert (5, 2, 2) == (region.failed, region.discarded, region.stats.count)
    assert [[2, 4], [3, 6]] == sorted(tmr.intervals("a").tolist())


def test_a_summary_of_several_threads_has_their_counters(tmr, in_thread):
    """What operations between ranks are reported from: times and counters of several stores together."""

    def fail(times):
        for _ in range(times):
            with pytest.raises(KeyError), tmr.region("a"):
                raise KeyError
        tmr.record("a", 0, times)

    in_thread(fail, 3)
    fail(2)
    times = summarize([region._intervals for region in tmr._regions_of("a")])
    assert (2, 5, [5, 0, 0, 0]) == (times.count, times.distribution.total_ns, times.counters)


def test_intervals_of_what_was_not_timed_are_whole_nanoseconds_too(tmr):
    """Nothing recorded is an array of no intervals, with the columns and the type of any other."""
    none = tmr.intervals("a")
    assert ((0, 2), "int64") == (none.shape, none.dtype.name)
    tmr.start("a")
    assert ((0, 2), "int64") == (tmr.intervals("a").shape, tmr.intervals("a").dtype.name)


def test_cpu_before_gpu(clock):
    """A region's times on a device follow its times on the host."""
    tmr = CPUGPUTimer(clock=clock, device_clock=ManualDeviceClock())
    for key in ("b", "a"):
        with tmr.region(key, gpu=True):
            pass
    assert [("a", "CPU"), ("a", "GPU"), ("b", "CPU"), ("b", "GPU")] == [
        (region.name, region.device) for region in tmr.snapshot()
    ]


def test_get(tmr):
    """A region is found by its key and device; an unused one is None."""
    tmr.record(TimeType.BATCH, 0, S)
    snapshot = tmr.snapshot()
    assert snapshot.get("BATCH") is snapshot.get(TimeType.BATCH) is snapshot.regions[0]
    assert (None, None) == (snapshot.get("batch"), snapshot.get("BATCH", "GPU"))


def test_statistics_are_the_same_to_the_last_digit_however_they_are_asked_for(tmr):
    """A report and ``get_time_stats`` agree: few times are not added up in one way here and another there."""
    for nanoseconds in (182, 128, 108):
        tmr.record("a", 0, nanoseconds)
    assert tmr.snapshot().get("a").stats == tmr.get_time_stats("a")


def test_it_says_where_and_when(tmr, monkeypatch):
    """Host, process and wall-clock time stand next to the times."""
    monkeypatch.setattr("time.time", lambda: 1234.5)
    snapshot = tmr.snapshot()
    assert (1234.5, socket.gethostname(), os.getpid()) == (snapshot.unix_time_s, snapshot.host, snapshot.pid)


def test_it_places_the_timers_clock_in_unix_time(clock, monkeypatch):
    """The anchor is the narrowest of many readings: both clocks at one moment, on the timer's own clock."""
    widths_ns = iter([900, 40, 700])
    unix_ns = iter(range(1_000_000_000_000, 2_000_000_000_000, 1_000_000))

    def read_unix_ns():
        clock.advance_ns(next(widths_ns, 500))
        return next(unix_ns)

    monkeypatch.setattr("time.time_ns", read_unix_ns)
    clock.advance_ns(10_000)
    assert ClockAnchor(1_000_010_900 + 20, 1_000_001_000_000, 40) == take_anchor(clock.now_ns)

    before_ns = clock.now_ns()
    anchor = Timer(clock=clock).snapshot().anchor
    assert before_ns < anchor.host_ns < clock.now_ns()
    assert 500 == anchor.width_ns


def test_it_does_not_change(tmr):
    """A snapshot does not change later, and no one can write to it."""
    tmr.record("a", 0, S)
    snapshot = tmr.snapshot()
    tmr.record("a", 0, 3 * S)
    tmr.reset()
    assert (1, 1.0) == (snapshot.get("a").stats.count, snapshot.get("a").stats.total)
    for thing, field in ((snapshot, "host"), (snapshot.regions[0], "name"), (snapshot.regions[0].stats, "mean")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, "else")


def test_as_json(tmr):
    """``to_dict`` gives plain data; an unknown value is null."""
    tmr.record("a", 0, S)
    tmr.start("b")
    snapshot = tmr.snapshot()
    data = json.loads(json.dumps(snapshot.to_dict(), allow_nan=False))
    a, b = data["regions"]
    assert ("a", 1.0, None, 1) == (a["name"], a["stats"]["mean"], a["stats"]["median_ci"], a["stats"]["count"])
    assert ("b", None, 1) == (b["name"], b["stats"], b["running"])
    assert a == json.loads(json.dumps(snapshot.regions[0].to_dict()))
    assert {field.name for field in dataclasses.fields(Snapshot)} - {"tree", "enabled"} == set(data)
    assert {field.name for field in dataclasses.fields(RegionTimes)} == set(a)


def test_a_region_that_only_warmed_up_is_shown(clock):
    """Warm-up alone leaves no statistics, but is no reason to hide the region."""
    tmr = Timer(clock=clock, skip_first=3)
    tmr.record("a", 0, S)
    assert (None, ["a"]) == (tmr.snapshot().get("a").stats, [region.name for region in tmr.snapshot()])


def test_what_was_only_looked_at_is_left_out(tmr):
    """A handle that was never used, or a key that was only asked for, is no region of the report."""
    tmr.region("handle")
    tmr.timed("decorator")
    tmr.iterate([], "loop")
    tmr.discard("discard")
    assert () == tmr.snapshot().regions


def test_what_a_recomputation_repeats_is_counted(tmr, clock):
    """A recomputation of an activation checkpoint is in no statistics and is counted next to them."""
    with tmr.region("block"):
        clock.advance(1.0)
    begin_recomputation()
    with tmr.region("block"):
        clock.advance(5.0)
    end_recomputation()
    region = tmr.snapshot().get("block")
    assert (1, 1.0, 1) == (region.stats.count, region.stats.max, region.recomputed)


def test_recomputations_inside_of_each_other_end_with_the_outermost(tmr, clock, in_thread):
    """What lies between the inner end and the outer is repeated too, on a thread that had timed nothing as well."""

    def recompute():
        begin_recomputation()
        begin_recomputation()
        with tmr.region("block"):
            clock.advance(5.0)
        end_recomputation()
        with tmr.region("block"):
            clock.advance(5.0)
        end_recomputation()
        with tmr.region("block"):
            clock.advance(1.0)

    recompute()
    in_thread(recompute)
    region = tmr.snapshot().get("block")
    assert ([1.0, 1.0], 4, 0) == (tmr.get_time("block"), region.recomputed, region.running)


def test_threads_that_end_during_a_recomputation_keep_their_times(clock, in_thread):
    """With warm-up each thread has its own store; threads of one id that follow each other replace none."""
    tmr, idents = Timer(clock=clock, skip_first=1), []

    def work():
        idents.append(threading.get_ident())
        for _ in range(3):
            tmr.record("a", 0, S)

    work()
    for _ in range(2):
        in_thread(work)
    begin_recomputation()
    in_thread(work)
    end_recomputation()
    in_thread(work)
    assert 2 * len(idents) == tmr.get_time_stats("a").count


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_what_was_timed_before_a_recomputation_is_there_after_it(tmr, clock, depth):
    """However many lie inside of each other: all until the last end is repeated, and no more than that."""
    with tmr.region("block"):
        clock.advance(2.0)
    for _ in range(depth):
        begin_recomputation()
    for _ in range(depth):
        with tmr.region("block"):
            clock.advance(5.0)
        end_recomputation()
    with tmr.region("block"):
        clock.advance(1.0)
    assert ([2.0, 1.0], depth) == (tmr.get_time("block"), tmr.snapshot().get("block").recomputed)


def test_a_timer_that_was_made_in_a_recomputation_loses_nothing(clock):
    """It repeats nothing, so that it keeps its times; nor does an end that nothing began take any away."""
    begin_recomputation()
    tmr = Timer(clock=clock)
    for seconds in (1.0, 2.0, 3.0):
        with tmr.region("block"):
            clock.advance(seconds)
        end_recomputation()
    with tmr.region("block"):
        clock.advance(4.0)
    assert ([1.0, 2.0, 3.0, 4.0], 0) == (tmr.get_time("block"), tmr.snapshot().get("block").recomputed)
