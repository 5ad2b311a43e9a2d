"""Where the regions of one process lie, from the intervals that its timer keeps."""

from __future__ import annotations

import threading

import pytest

from deep500_timing import Timer


def place(tmr, *path, device="CPU"):
    """One place of a timer, which must be there."""
    found = [place for place in tmr.snapshot(places=True).places if (place.path, place.device) == (path, device)]
    assert 1 == len(found)
    return found[0]


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
    """It costs nothing where nobody draws a tree."""
    train(tmr, clock)
    assert tmr.snapshot().places is None


def test_one_name_at_two_places(tmr, clock):
    """Each place has its own statistics, share of its parent and rest."""
    train(tmr, clock)
    inside, beside = place(tmr, "EPOCH", "BATCH", "IO"), place(tmr, "EPOCH", "IO")
    batch, epoch = place(tmr, "EPOCH", "BATCH"), place(tmr, "EPOCH")
    assert (20, 2) == (inside.stats.count, beside.stats.count)
    assert pytest.approx(0.4 / 2.9) == inside.share
    assert pytest.approx(2.5) == batch.rest_s
    assert pytest.approx(0.0) == epoch.rest_s
    assert 1.0 == batch.first_s
    assert epoch.share is None


def test_what_is_open_holds_what_has_ended_in_it(tmr, clock):
    """A table that is printed within an epoch has the batches below it, without a share of what is not known."""
    with tmr.region("EPOCH"):
        with tmr.region("BATCH"):
            clock.advance(1.0)
        assert place(tmr, "EPOCH").stats is None
        assert (1.0, None) == (place(tmr, "EPOCH", "BATCH").stats.total, place(tmr, "EPOCH", "BATCH").share)


def test_warm_up_is_apart_and_the_rest_adds_up(clock):
    """What ``skip_first`` leaves out is in no statistic, and not in the rest of what holds it either."""
    tmr = Timer(clock=clock, skip_first=1)
    train(tmr, clock, epochs=3)
    batch, epoch = place(tmr, "EPOCH", "BATCH"), place(tmr, "EPOCH")
    assert (29, 1, 1.0) == (batch.stats.count, batch.warm_up, batch.warm_up_s)
    assert (2, 1) == (epoch.stats.count, epoch.warm_up)
    assert pytest.approx(2.0 / 2.1) == batch.share
    assert pytest.approx(0.0) == epoch.rest_s


def test_what_is_forgotten_stands_where_the_newest_lie(clock):
    """With ``keep_last`` the times are of the whole run and the place of the newest; it is said to be an estimate."""
    tmr = Timer(clock=clock, keep_last=100)
    train(tmr, clock, epochs=1, steps=20_000)
    batch, inside = place(tmr, "EPOCH", "BATCH"), place(tmr, "EPOCH", "BATCH", "IO")
    assert (20_000, True) == (batch.stats.count, batch.is_estimate)
    assert (20_001, True) == (inside.stats.count, inside.is_estimate)
    assert pytest.approx(0.2, rel=0.01) == inside.share
    assert pytest.approx(batch.stats.total - inside.stats.total) == batch.rest_s
    assert pytest.approx(1.0, rel=0.01) == batch.share


def test_threads_do_not_nest_in_each_other(tmr, clock):
    """What runs on another thread at the same time lies beside, not inside."""
    with tmr.region("BATCH"):
        thread = threading.Thread(target=lambda: tmr.record("load", 10, 20))
        thread.start()
        thread.join()
        clock.advance(1.0)
    assert {("BATCH",), ("load",)} == {found.path for found in tmr.snapshot(places=True).places}


def test_device_times_have_the_place_of_their_region(clock, device):
    """A time on the device lies where its region lay on the host, also where that differs from time to time."""
    tmr = Timer(device, clock=clock)
    for outer, seconds in (("TRAIN", 2.0), ("EVAL", 3.0), ("TRAIN", 2.0)):
        with tmr.region(outer, gpu=True):
            clock.advance(0.001)
            with tmr.region("FORWARD", gpu=True):
                device.launch(seconds)
                clock.advance(0.001)
    device.finish()
    tmr.complete_all()
    assert (2, 4.0) == _count_and_total(place(tmr, "TRAIN", "FORWARD", device="GPU"))
    assert (1, 3.0) == _count_and_total(place(tmr, "EVAL", "FORWARD", device="GPU"))
    assert pytest.approx(1.0) == place(tmr, "EVAL", "FORWARD", device="GPU").share


def _count_and_total(found):
    return found.stats.count, found.stats.total


def test_nothing_recorded_has_no_place(tmr):
    """An unused timer has a tree with nothing in it."""
    assert () == tmr.snapshot(places=True).places
