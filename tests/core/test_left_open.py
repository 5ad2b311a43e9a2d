"""Regions that somebody else's loop leaves open, and who is asked for them before they are read."""

from __future__ import annotations

import gc

import pytest

from deep500_timing import Timer, TimingWarning
from deep500_timing._base.warn import forget_warnings
from deep500_timing.adapters import ask_before_reading


class Opener:
    """Opens a region and closes it when it is asked."""

    def __init__(self, timer, name, asked=None):
        self.timer, self.name, self.asked = timer, name, [] if asked is None else asked
        timer.start(name)
        ask_before_reading(timer, self)

    def end_what_is_over(self):
        """The loop is over."""
        self.asked.append(self.name)
        self.timer.fail(self.name)


def test_openers_are_asked_before_a_snapshot_the_newest_first():
    """What they close is not running in the snapshot that asks, and every snapshot asks each once."""
    timer, other, asked = Timer(), Timer(), []
    outer, inner = Opener(timer, "outer", asked), Opener(timer, "inner", asked)
    ask_before_reading(timer, outer)  # It began anew, inside.
    other.start("else")
    assert {"outer": (0, 1), "inner": (0, 1)} == {
        found.name: (found.running, found.failed) for found in timer.snapshot()
    }
    assert [1] == [found.running for found in other.snapshot()]
    assert ["outer", "inner"] == asked
    assert inner.asked is outer.asked


def test_opener_that_is_gone_is_not_asked():
    """Nobody is kept alive for it, and what it opened stays what it is."""
    timer, asked = Timer(), []
    Opener(timer, "lost", asked)
    gc.collect()
    assert [1] == [found.running for found in timer.snapshot()]
    assert [] == asked


def test_opener_that_fails_costs_a_warning():
    """The others are asked, and the snapshot is there."""

    class Broken(Opener):
        def end_what_is_over(self):
            raise ValueError("broken")

    forget_warnings()
    timer, asked = Timer(), []
    both = Opener(timer, "well", asked), Broken(timer, "broken")
    with pytest.warns(TimingWarning, match=r"Broken .* ValueError\('broken'\)"):
        found = {region.name: region.running for region in timer.snapshot()}
    assert {"well": 0, "broken": 1} == found
    assert ["well"] == both[0].asked
