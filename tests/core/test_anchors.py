"""Where a device's times lie on the host's clock, and whether anybody captures: what a pool of events goes by."""

from __future__ import annotations

import pytest

from deep500_timing.devices._queue import Anchor, Captures

S = 10**9


def anchor(low_ns, high_ns=None):
    """An anchor that the device reached between these moments; without the second, one that it has not reached."""
    made = Anchor(None, int, low_ns, low_ns + 2 * S, None)
    if high_ns is not None:
        made.done_before(high_ns)
    return made


class TestAnchor:
    def test_a_new_one_is_not_reached(self):
        """It has no user and is neither reached, due, placed nor retired."""
        made = anchor(5)
        assert (0, False, False, False, False) == (made.users, made.is_done, made.is_due, made.placed, made.retired)

    def test_the_first_yes_counts(self):
        """A later query cannot say more than an earlier one that found it done."""
        made = anchor(5, 90)
        made.done_before(70)
        made.done_before(80)
        assert (True, 70) == (made.is_done, made.high_ns)

    def test_the_last_no_counts(self):
        """A no raises the lower bound, and neither lowers it nor lifts it above a yes."""
        made = anchor(10)
        made.raise_low(30)
        made.raise_low(20)
        assert 30 == made.low_ns
        made.done_before(50)
        made.raise_low(51)
        assert 30 == made.low_ns
        made.raise_low(50)
        assert 50 == made.low_ns

    def test_the_middle_is_taken(self):
        """Half of what lies between the bounds is the uncertainty, and bounds that cross are no negative one."""
        made = anchor(100, 300)
        made.place()
        assert (True, 200, 100) == (made.placed, made.place_ns, made.uncertainty_ns())
        made.high_ns = 90
        assert 0 == made.uncertainty_ns()

    @pytest.mark.parametrize(
        ("earlier", "narrowed"),
        [
            # One second later, and the clocks part by 50 µs at most either way.
            ((100_000, 200_000), (S + 50_000, S + 250_000)),
            ((0, 2_000_000), (S, S + 1_000_000)),
            ((300_000, 5_000_000), (S + 250_000, S + 1_000_000)),
            ((-90_000, 10_000), (S, S + 60_000)),
            # It knows the place to the nanosecond, or contradicts.
            ((1_050_000, 9_000_000), (S + 1_000_000, S + 1_000_000)),
            ((1_050_001, 9_000_000), (S, S + 1_000_000)),
            ((-9_000_000, -50_001), (S, S + 1_000_000)),
        ],
    )
    def test_the_one_before_narrows_it(self, earlier, narrowed):
        """Its bounds, moved on by the time between them, less what two quartz clocks may part; unless they cross."""
        made = anchor(S, S + 1_000_000)
        made.narrow(anchor(*earlier), S)
        assert narrowed == (made.low_ns, made.high_ns)


class Graph:
    """What is captured into."""


class TestCaptures:
    @pytest.mark.parametrize("make", [Graph, object])
    def test_each_is_under_way_from_its_begin_to_its_end(self, make):
        """Whether or not a graph can be referred to weakly; an end that comes twice ends no other."""
        one, two, found = make(), make(), Captures()
        seen = [found.under_way]
        for step, graph in ((found.begin, one), (found.begin, two), (found.end, one), (found.end, one)):
            step(graph)
            seen.append(found.under_way)
        found.end(two)
        assert [0, 1, 2, 1, 1, 0] == [*seen, found.under_way]

    def test_a_forked_child_has_none(self):
        """The parent's captures are not its own, and neither is a lock that another thread of the parent held."""
        graph, found = Graph(), Captures()
        before = found.asking
        found.begin(graph)
        found.after_fork()
        assert (0, True) == (found.under_way, found.asking is not before)
        found.begin(other := Graph())
        assert 1 == found.under_way
        found.end(other)
        assert 0 == found.under_way
