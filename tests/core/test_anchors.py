"""Where a device's times lie on the host's clock, and whether anyone captures: for a pool of events."""

from __future__ import annotations

import pytest
from made_clocks import Interleaved, Together

from deep500_timing import Timer
from deep500_timing.devices._device import Captures, EventAnchor
from deep500_timing.testing import ManualDeviceClock

S = 10**9


def anchor(low_ns, high_ns=None):
    """An anchor that the device reached between these moments; without the second, one that it has not reached."""
    made = EventAnchor(None, int, low_ns, low_ns + 2 * S)
    if high_ns is not None:
        made.done_before(high_ns)
    return made


class TestAnchor:
    def test_a_new_one_is_not_reached(self):
        """It has no user and is neither reached, placed nor retired."""
        made = anchor(5)
        assert (0, False, False, False) == (made.users, made.is_done, made.placed, made.retired)

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


class TestOneAfterAnother:
    """An anchor that is followed by another before any of its pairs is read, as their ends lie on another stream."""

    @staticmethod
    def run(tmr, device):
        """An anchor of which all is known; one that is known to a second, and one more behind it that is so as well."""

        def time(key, end_on):
            device.use_stream("one")
            tmr.start(key, gpu=True)
            if key == "late":
                device.advance(2.0)
            device.use_stream(end_on)
            tmr.end(key, gpu=True)
            device.advance(0.1)

        time("sure", "one")
        device.advance(2.5)
        for end_on in ("two", "one"):
            device.use_stream("one")
            device.launch(1.0)
            began_ns = device.now_ns + S
            time("late", end_on)
        return began_ns

    def test_the_first_is_narrowed_before_it_narrows_the_second(self, device):
        """A precise time is known well two anchors later, less what the clocks may have drifted."""
        tmr = Timer(device, clock=Together(device))
        began_ns = self.run(tmr, device)
        tmr.snapshot()
        error_ns = abs(max(tmr.intervals("late", gpu=True)[:, 0]) - began_ns)
        assert error_ns <= tmr.device.uncertainty_ns <= 300_000

    def test_two_at_once_free_the_one_before_once(self):
        """Two threads of one stream may each make an anchor, the second during the record of the first."""

        def work(key):
            with tmr.region(key, gpu=True):
                pass

        device = Interleaved()
        tmr = Timer(device, clock=Together(device))
        for _ in range(2):
            work("a")
            device.advance(3)
        device.amid.append(lambda: work("b"))
        for _ in range(2):
            work("a")
        tmr.complete_all()
        (queue,) = tmr.device._queues.values()
        assert len(queue.free) == len({id(event) for event in queue.free}) == tmr.device.events - 1

    def test_its_event_serves_again_when_its_last_pair_is_read(self, device):
        """However often that happens, there are no more events than are in use at a time."""
        tmr = Timer(device, clock=Together(device))
        events = []
        for _ in range(12):
            self.run(tmr, device)
            tmr.complete_all()
            events.append(tmr.device.events)
        assert events[2] == events[-1]


def test_a_clock_that_has_milliseconds_is_asked_for_nothing_else(clock):
    """Where there is a function that gives them, it is called and no method around it."""

    class InMilliseconds(ManualDeviceClock):
        def elapsed_ms(self, start, end):
            return super().elapsed_ns(start, end) / 1e6

        def elapsed_ns(self, start, end):
            raise AssertionError("asked for nanoseconds")

    device = InMilliseconds()
    tmr = Timer(device, clock=clock)
    with tmr.region("a", gpu=True):
        device.launch(1.5)
    assert [1.5] == tmr.get_time("a", gpu=True)


class Graph:
    """The capture's stream."""


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
        before = found.query_lock
        found.begin(graph)
        found.after_fork()
        assert (0, True) == (found.under_way, found.query_lock is not before)
        found.begin(other := Graph())
        assert 1 == found.under_way
        found.end(other)
        assert 0 == found.under_way
