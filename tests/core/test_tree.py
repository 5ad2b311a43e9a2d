"""The tree of regions of one process, from the intervals that its timer keeps."""

from __future__ import annotations

import threading
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing._base.names import CPU
from deep500_timing._recording.intervals import Intervals
from deep500_timing._summary.nesting import ENDLESS, Paths
from deep500_timing._summary.reading import Store, _nest
from deep500_timing.testing import ManualClock

NAMES = "abc"
UNIT_NS = 200_000_003  # so that a sum needs more than 26 bits
SPANS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.integers(0, 12), st.integers(0, 9)).map(
        lambda span: (span[0], span[1] * UNIT_NS, (span[1] + span[2]) * UNIT_NS)
    ),
    max_size=9,
)
BUCKETS = 15


def nodes_of(tmr):
    """All nodes of a timer's tree but the rests."""
    return [node for node in tmr.snapshot(places=True).tree.walk() if not node.is_rest]


def node(tmr, *path):
    """One node of a timer's tree. It must exist."""
    found = tmr.snapshot(places=True).tree.at(path)
    assert found is not None
    return found


def train(tmr, clock, epochs=2, steps=10):
    """Epochs of steps of 100 ms, 20 of them IO inside, the first step 1 s; and 50 ms of IO after the steps."""
    for epoch in range(epochs):
        with tmr.region("EPOCH"):
            for step in range(steps):
                with tmr.region("BATCH"):
                    with tmr.region("IO"):
                        clock.advance(0.02)
                    clock.advance(0.98 if (epoch, step) == (0, 0) else 0.08)
            with tmr.region("IO"):
                clock.advance(0.05)


def test_a_snapshot_does_not_look_for_places_unasked(tmr, clock):
    """It costs nothing where no one draws a tree."""
    train(tmr, clock)
    assert tmr.snapshot().tree is None


def test_one_name_at_two_places(tmr, clock):
    """Each place has its own statistics, share of its parent and rest."""
    train(tmr, clock)
    inside, beside = node(tmr, "EPOCH", "BATCH", "IO"), node(tmr, "EPOCH", "IO")
    batch, epoch = node(tmr, "EPOCH", "BATCH"), node(tmr, "EPOCH")
    assert (20, 2) == (inside.count, beside.count)
    assert pytest.approx(0.4 / 2.9) == inside.share
    assert pytest.approx(2.5) == batch.rest_s
    assert pytest.approx(0.0) == epoch.rest_s
    assert 1.0 == batch.first_s
    assert epoch.share is None


def test_what_is_open_holds_what_has_ended_in_it(tmr, clock):
    """A table that is printed within an epoch has the batches below it, without a share of unknown times."""
    with tmr.region("EPOCH"):
        with tmr.region("BATCH"):
            clock.advance(1.0)
        assert node(tmr, "EPOCH").total_s is None
        assert (1.0, None) == (node(tmr, "EPOCH", "BATCH").total_s, node(tmr, "EPOCH", "BATCH").share)


def test_warm_up_is_apart_and_the_rest_adds_up(clock):
    """What ``skip_first`` leaves out is in no statistic, and not in the rest of what holds it either."""
    tmr = Timer(clock=clock, skip_first=1)
    train(tmr, clock, epochs=3)
    batch, epoch = node(tmr, "EPOCH", "BATCH"), node(tmr, "EPOCH")
    assert (29, 1, 1.0) == (batch.count, batch.warm_up, batch.warm_up_s)
    assert (2, 1) == (epoch.count, epoch.warm_up)
    assert pytest.approx(2.0 / 2.1) == batch.share
    assert pytest.approx(0.0) == epoch.rest_s


def test_what_is_forgotten_stands_where_the_newest_lie(clock):
    """With ``keep_last`` the times are of the whole run and the place of the newest; it is said to be an estimate."""
    tmr = Timer(clock=clock, keep_last=100)
    train(tmr, clock, epochs=1, steps=20_000)
    batch, inside = node(tmr, "EPOCH", "BATCH"), node(tmr, "EPOCH", "BATCH", "IO")
    assert (20_000, 20_001) == (batch.count, inside.count)
    assert tmr.snapshot(places=True).tree.kept_only
    assert pytest.approx(0.2, rel=0.01) == inside.share
    assert pytest.approx(batch.total_s - inside.total_s) == batch.rest_s
    assert pytest.approx(1.0, rel=0.01) == batch.share
    assert inside.rest_s is None


def test_what_is_forgotten_and_all_warm_up_has_a_place(clock):
    """Its times are not shown, nor a share of them, and its parent shows all its time as rest."""
    tmr = Timer(clock=clock, keep_last=10, skip_first=1000)
    for number in range(2000):
        with tmr.region("BATCH"):
            clock.advance(0.01)
            if number >= 1400:  # so that more of them are forgotten than are kept, and fewer than are warm-up
                with tmr.region("IO"):
                    clock.advance(0.01)
    batch, inside = node(tmr, "BATCH"), node(tmr, "BATCH", "IO")
    assert (1000, 1000) == (batch.count, batch.warm_up)
    assert (None, None, None) == (inside.total_s, inside.share, inside.rest_s)
    assert pytest.approx(batch.total_s) == batch.rest_s


def test_what_ends_while_it_is_read_is_there_once():
    """Found open, and its interval is kept when that is asked for: it has ended, and is not open as well."""

    def rows(open_ns, *pairs):
        intervals = Intervals(-1, 0)
        for pair in pairs:
            intervals.append(*pair)
        store = Store("a", CPU, 0, intervals, open_ns, 0, intervals.digest())
        kept = _nest([store], ["a"], Paths())
        return list(zip(kept.starts.tolist(), kept.ends.tolist(), strict=True))

    assert [(5, 9)] == rows(5, (5, 9))
    assert [(1, 3), (5, 9)] == rows(5, (1, 3), (5, 9))
    assert [(1, 3), (5, ENDLESS)] == rows(5, (1, 3))
    assert [(5, ENDLESS)] == rows(5)


def test_threads_do_not_nest_in_each_other(tmr, clock, in_thread):
    """What runs on another thread at the same time lies next to, not inside."""
    with tmr.region("BATCH"):
        in_thread(tmr.record, "load", 10, 20)
        clock.advance(1.0)
    assert {("BATCH",), ("load",)} == {found.path for found in nodes_of(tmr)}


@pytest.mark.parametrize("is_open", [False, True])
def test_device_times_have_the_place_of_their_region(clock, device, is_open):
    """A time on the device lies where its region lay on the host, also while the region is open once more."""
    tmr = Timer(device, clock=clock)
    for outer, seconds in (("TRAIN", 2.0), ("EVAL", 3.0), ("TRAIN", 2.0)):
        with tmr.region(outer, gpu=True):
            clock.advance(0.001)
            with tmr.region("FORWARD", gpu=True):
                device.launch(seconds)
                clock.advance(0.001)
    device.finish()
    tmr.complete_all()
    if is_open:
        tmr.start("FORWARD", gpu=True)
    assert (2, 4.0) == _count_and_total(node(tmr, "TRAIN", "FORWARD").gpu)
    assert (1, 3.0) == _count_and_total(node(tmr, "EVAL", "FORWARD").gpu)
    assert pytest.approx(1.0) == node(tmr, "EVAL", "FORWARD").gpu.share


def test_device_times_lie_in_each_other(clock, device):
    """Each has its share of its parent, at any depth."""
    tmr = Timer(device, clock=clock)
    with tmr.region("EPOCH", gpu=True):
        clock.advance(0.001)
        device.launch(2.0)
        with tmr.region("BATCH", gpu=True):
            clock.advance(0.001)
            device.launch(3.0)
            with tmr.region("FORWARD", gpu=True):
                clock.advance(0.001)
                device.launch(1.0)
    device.finish()
    tmr.complete_all()
    paths = [("EPOCH",), ("EPOCH", "BATCH"), ("EPOCH", "BATCH", "FORWARD")]
    found = [node(tmr, *path).gpu for path in paths]
    assert [None, 4 / 6, 1 / 4] == [one.share for one in found]
    assert not tmr.snapshot(places=True).tree.kept_only


def test_a_device_time_in_what_is_not_timed_there_has_no_share(clock, device):
    """Its parent has no time on the device, for any ancestors."""
    tmr = Timer(device, clock=clock)
    with tmr.region("EPOCH", gpu=True), tmr.region("BATCH"):
        clock.advance(0.001)
        with tmr.region("FORWARD", gpu=True):
            clock.advance(0.001)
            device.launch(1.0)
    device.finish()
    tmr.complete_all()
    assert (1.0, None) == ((inner := node(tmr, "EPOCH", "BATCH", "FORWARD").gpu).total_s, inner.share)


def test_a_device_time_that_is_on_its_way_moves_no_other(clock, device):
    """Where host and device have not as many, each of the device's times lies where its region was."""
    tmr = Timer(device, clock=clock)
    for outer in ("TRAIN", "TRAIN", "TRAIN", "EVAL"):
        with tmr.region(outer), tmr.region("FORWARD", gpu=True):
            device.launch(1.0)
            clock.advance(1.0)
        if outer == "TRAIN":
            device.finish()
    found = [one for one in nodes_of(tmr) if one.gpu is not None]
    assert [("TRAIN", "FORWARD")] == [one.path for one in found]
    assert (3, 3.0) == _count_and_total(found[0].gpu)


def test_a_missing_device_time_moves_no_other(clock, device):
    """One that was captured has no time; those after it lie where their regions were."""
    tmr = Timer(device, clock=clock)
    for outer in ("TRAIN", "TRAIN", "EVAL", "EVAL"):
        device.capturing = outer == "TRAIN" and not tmr.get_time("FORWARD")
        with tmr.region(outer):
            clock.advance(1.0)
            with tmr.region("FORWARD", gpu=True):
                device.launch(1.0 if outer == "TRAIN" else 3.0)
                clock.advance(1.0)
        device.finish()
    device.capturing = False
    assert (1, 1.0) == _count_and_total(node(tmr, "TRAIN", "FORWARD").gpu)
    assert (2, 6.0) == _count_and_total(node(tmr, "EVAL", "FORWARD").gpu)


def test_device_times_that_are_forgotten_are_those_of_the_whole_run(clock, device):
    """With ``keep_last`` they stand where their region is, and it is said to be an estimate."""
    tmr = Timer(device, clock=clock, keep_last=3)
    for _ in range(600):
        with tmr.region("FORWARD", gpu=True):
            device.launch(0.001)
            clock.advance(0.001)
        device.finish()
    tmr.complete_all()
    assert (600, pytest.approx(0.6)) == _count_and_total(node(tmr, "FORWARD").gpu)
    assert tmr.snapshot(places=True).tree.kept_only


def _count_and_total(found):
    return found.count, found.total_s


def test_nothing_recorded_has_no_place(tmr):
    """An unused timer has a tree with nothing in it."""
    assert () == tmr.snapshot(places=True).tree.roots


def rows_of(spans, skip_first):
    """The intervals of one thread as they lie in each other, by looking at every pair."""
    met = defaultdict(int)
    rows = []
    for number, (name, start, end) in enumerate(spans):
        met[name] += 1
        counted = met[name] > skip_first
        rows.append({"name": name, "start": start, "end": end, "counted": counted, "number": number})
    rows.sort(key=lambda row: (row["start"], -row["end"], row["name"], row["number"]))
    for at, row in enumerate(rows):
        around = [other for other in rows[:at] if other["end"] >= row["end"] and row["start"] < other["end"]]
        row["parent"] = around[-1] if around else None
        row["path"] = (*(around[-1]["path"] if around else ()), row["name"])
        siblings = [other for other in rows[:at] if other["parent"] is row["parent"]]
        reached = max([row["start"], *(min(other["end"], row["end"]) for other in siblings)])
        row["covered"] = reached - row["start"]
    return rows


def length(rows):
    """Their total time, in ns."""
    return sum(row["end"] - row["start"] for row in rows)


def by_hand(rows):
    """What each place has, worked out from the rows one by one."""
    counted = [row for row in rows if row["counted"]]
    begin = min((row["start"] for row in counted), default=0)
    width = -(-(max((row["end"] for row in counted), default=0) - begin + 1) // BUCKETS)
    found = {}
    for path in {row["path"] for row in rows}:
        here = [row for row in rows if row["path"] == path]
        own = [row for row in here if row["counted"]]
        warm_up = [row for row in here if not row["counted"]]
        in_counted = [row for row in own if row["parent"] is not None and row["parent"]["counted"]]
        above = length([row for row in counted if row["path"] == path[:-1]])
        inside = [row for row in rows if row["parent"] is not None and row["parent"]["path"] == path]
        taken = [row for row in inside if row["parent"]["counted"]]
        trend = [[row for row in own if (row["start"] - begin) // width == part] for part in range(BUCKETS)]
        found[path] = {
            "count": len(own) or None,
            "total": length(own) / 1e9 if own else None,
            # Intervals that overlap in a parent may take more than it did, which is no share.
            "share": length(in_counted) / above if own and 0 < above >= length(in_counted) else None,
            "rest_s": (length(own) - length(taken) + sum(row["covered"] for row in taken)) / 1e9
            if inside and own
            else None,
            "overlap_s": sum(row["covered"] for row in in_counted) / 1e9,
            "first_s": length(sorted(here, key=lambda row: (row["start"], -row["end"]))[:1]) / 1e9,
            "warm_up": len(warm_up),
            "warm_up_s": length(warm_up) / 1e9 if warm_up else None,
            "trend": [length(part) / len(part) / 1e9 if part else None for part in trend] if counted else [],
        }
    return found


def alike(expected, actual):
    """Whether two values are the same but for rounding; only None is as None."""
    if isinstance(expected, list):
        return len(expected) == len(actual) and all(map(alike, expected, actual))
    return (expected is actual) if expected is None or actual is None else expected == pytest.approx(actual, rel=1e-12)


@given(SPANS, SPANS, st.integers(0, 2))
def test_any_intervals_lie_where_a_look_at_every_pair_puts_them(spans, elsewhere, skip_first):
    """Paths, shares, rests, overlaps, warm-up and course of intervals on two threads, overlapping ones among them."""
    tmr = Timer(clock=ManualClock(), skip_first=skip_first)
    for name in NAMES:
        tmr.region(name)

    def record(some):
        for span in some:
            tmr.record(*span)

    record(spans)
    thread = threading.Thread(target=record, args=(elsewhere,))
    thread.start()
    thread.join()
    with np.errstate(all="raise"):
        nodes = nodes_of(tmr)
    expected = by_hand([*rows_of(spans, skip_first), *rows_of(elsewhere, skip_first)])
    actual = {
        found.path: {
            "count": found.count or None,
            "total": found.total_s,
            **{name: getattr(found, name) for name in ("share", "rest_s", "overlap_s", "first_s", "warm_up")},
            "warm_up_s": found.warm_up_s,
            "trend": list(found.trend),
        }
        for found in nodes
    }
    assert expected.keys() == actual.keys()
    for path, values in expected.items():
        for name, value in values.items():
            assert alike(value, actual[path][name]), (path, name)
