"""A device's effects on a timed program: captures, streams of two devices, forks, the interpreter's end."""

from __future__ import annotations

import gc
import os
import sys
import threading

import pytest
from made_clocks import Interleaved, Together

from deep500_timing import Timer, TimingWarning
from deep500_timing.devices import EventPair, EventPool, captures, pool_of
from deep500_timing.devices._device import EventAnchor
from deep500_timing.testing import ManualClock, ManualDeviceClock

ASKS = ("record", "is_done", "wait", "elapsed_ns", "new_event")


@pytest.fixture
def tmr(clock, device):
    """A timer for it."""
    return Timer(device, clock=clock)


def work(tmr, device, seconds, key="a"):
    """Time work of that length."""
    with tmr.region(key, gpu=True):
        device.launch(seconds)


class Graph:
    """The capture's stream."""


class TestCaptures:
    @pytest.mark.parametrize("what", ["snapshot", "regions", "get_time", "complete_all"])
    @pytest.mark.parametrize("elsewhere", [True, False])
    def test_nothing_is_asked_on_any_thread(self, tmr, device, in_thread, what, elsewhere):
        """While a capture is known to be under way, on any thread, no thread asks, waits or records."""
        for _ in range(40):
            work(tmr, device, 1)
        device.finish()
        graph = Graph()
        captures.begin(graph)
        before = {name: device.calls[name] for name in ASKS}
        do = {
            "snapshot": tmr.snapshot,
            "regions": lambda: [work(tmr, device, 1, "b") for _ in range(60)],
            "get_time": lambda: tmr.get_time("a", gpu=True),
            "complete_all": tmr.complete_all,
        }[what]
        in_thread(do) if elsewhere else do()
        tmr.snapshot()
        asked = {name: device.calls[name] - before[name] for name in ASKS}
        captures.end(graph)
        assert dict.fromkeys(ASKS, 0) == asked
        if what == "regions":
            assert 60 == tmr.snapshot().get("b", "GPU").captured
        assert [1.0] * 40 == tmr.get_time("a", gpu=True)

    def test_it_ends_with_its_graph(self, tmr, device):
        """A capture that is dropped before it ends counts no more; times are taken again."""
        graph, other = Graph(), Graph()
        captures.begin(graph)
        captures.begin(other)
        captures.end(other)
        captures.end(other)
        assert 1 == captures.under_way
        del graph
        gc.collect()
        assert 0 == captures.under_way
        work(tmr, device, 1)
        assert [1.0] == tmr.get_time("a", gpu=True)

    def test_it_waits_for_queries_that_are_under_way(self, device, clock):
        """A capture begins only when the query of another thread is over, so that it meets none."""

        class Slow(ManualDeviceClock):
            def is_done(self, event):
                if slow:
                    asking.set()
                    go_on.wait()
                    seen.append(captures.under_way)
                return super().is_done(event)

        asking, go_on, slow, seen = threading.Event(), threading.Event(), [], []
        device = Slow()
        tmr = Timer(device, clock=clock)
        work(tmr, device, 1)
        slow.append(True)
        reader = threading.Thread(target=tmr.snapshot)
        reader.start()
        asking.wait()
        graph = Graph()
        capturing = threading.Thread(target=captures.begin, args=(graph,))
        capturing.start()
        slow.clear()
        go_on.set()
        reader.join()
        capturing.join()
        assert (1, {0}) == (captures.under_way, set(seen) | {0})
        captures.end(graph)

    def test_a_query_that_raises_leaves_its_pairs(self, tmr, device):
        """As in a capture that no one told of: the pairs stay pending, with one warning, and are read later."""
        for _ in range(40):
            work(tmr, device, 1)
        device.finish()
        device.fail("is_done", RuntimeError("operation not permitted when stream is capturing"))
        with pytest.warns(TimingWarning, match="its times stay pending") as said:
            times = [tmr.snapshot().get("a", "GPU") for _ in range(3)][-1]
        assert (40, 0, 1) == (times.pending + (times.stats.count if times.stats else 0), times.failed, len(said))
        device.fail("is_done", None)
        assert [1.0] * 40 == tmr.get_time("a", gpu=True)


class TwoDevices(ManualDeviceClock):
    """Streams of two devices, with no time between their events."""

    def __init__(self):
        """Count comparisons across."""
        super().__init__()
        self.compared_across = 0

    def device_of(self, stream):
        """The first letter tells."""
        return str(stream)[0]

    def elapsed_ns(self, start, end):
        """Refuse what lies on two devices."""
        if str(start.stream)[0] != str(end.stream)[0]:
            self.compared_across += 1
            raise RuntimeError("events of two devices")
        return super().elapsed_ns(start, end)


def test_events_of_two_devices_are_never_compared(clock):
    """A region that ends on another device is failed when it ends, and its start event serves again at once."""
    device = TwoDevices()
    tmr = Timer(device, clock=clock)
    with pytest.warns(TimingWarning, match="ended on another device"):
        for _ in range(30):
            device.use_stream("0")
            tmr.start("a", gpu=True)
            device.use_stream("1")
            tmr.end("a", gpu=True)
    assert (30, 0) == (tmr.snapshot().get("a", "GPU").failed, tmr.snapshot().get("a", "GPU").pending)
    assert (0, True) == (device.compared_across, pool_of(device).events <= 3)


class TestStreamsOfOneDevice:
    def test_an_end_elsewhere_takes_that_streams_event(self, tmr, device):
        """A region that ends on another stream is queued there, behind what that stream does."""
        device.use_stream("one")
        tmr.start("a", gpu=True)
        device.use_stream("two")
        device.launch(5)
        tmr.end("a", gpu=True)
        device.use_stream("one")
        for _ in range(3):
            work(tmr, device, 1, "b")
        device.advance(3)
        one, two = (tmr.device._queues[name] for name in ("one", "two"))
        tmr.snapshot()
        assert (0, 1) == (len(one.pending), len(two.pending))
        assert [1.0] * 3 == tmr.get_time("b", gpu=True)
        assert [5.0] == tmr.get_time("a", gpu=True)
        # One event of the second stream, and it is back where it belongs.
        assert (1, 1) == (two.created, len(two.free))

    def test_a_full_start_stream_is_reclaimed_too(self, tmr, device):
        """Starts of one stream with ends on another do not let the first stream's pool grow without end."""
        for _ in range(500):
            device.use_stream("one")
            tmr.start("a", gpu=True)
            device.use_stream("two")
            tmr.end("a", gpu=True)
        assert tmr.device.events <= 80

    def test_a_full_end_stream_is_reclaimed_though_the_start_stream_is_not(self, tmr, device):
        """Where the stream of the starts has events to spare, that of the ends does not grow with the regions."""
        device.use_stream("one")
        for _ in range(150):
            work(tmr, device, 1)
        device.finish()
        tmr.snapshot()
        for _ in range(100):
            device.use_stream("one")
            tmr.start("a", gpu=True)
            device.use_stream("two")
            tmr.end("a", gpu=True)
        assert tmr.device._queues["two"].created <= 40

    @pytest.mark.filterwarnings("ignore:A region on the device 'manual' ended before")
    def test_a_pair_that_is_early_is_asked_for_again(self, tmr, device):
        """Where the start is behind on its own stream, the count of finished work starts again: no guess is left."""
        device.use_stream("one")
        device.launch(100)
        tmr.start("late", gpu=True)
        device.use_stream("two")
        tmr.end("late", gpu=True)
        for _ in range(40):
            work(tmr, device, 1e-3, "b")
        device.advance(1)
        asked = []
        for _ in range(30):
            before = device.calls["is_done"]
            work(tmr, device, 1e-3, "b")
            device.advance(1)
            asked.append(device.calls["is_done"] - before)
        queue = tmr.device._queues["two"]
        assert 0 == queue.known_done
        assert len(queue.pending) == 71
        assert set(asked[20:]) <= {0, 2, 3}
        assert 70 == len(tmr.get_time("b", gpu=True))

    def test_a_pair_whose_end_is_behind_is_early_too(self, clock):
        """Two threads that share a stream may queue pairs in another order than they recorded their ends."""
        device = Interleaved()
        tmr = Timer(device, clock=clock)
        tmr.start("behind", gpu=True)
        tmr.start("a", gpu=True)

        def other_thread():
            device.launch(5)
            tmr.end("behind", gpu=True)

        device.amid.append(other_thread)
        tmr.end("a", gpu=True)
        found = tmr.snapshot().get("behind", "GPU")
        assert (1, 0) == (found.pending, found.failed)
        device.finish()
        assert ([5.0], [0.0]) == (tmr.get_time("behind", gpu=True), tmr.get_time("a", gpu=True))


def test_a_clock_in_milliseconds_loses_no_nanosecond(clock):
    """A function that gives milliseconds, as devices do, is rounded to the nearest nanosecond."""

    class InMilliseconds(ManualDeviceClock):
        def elapsed_ms(self, start, end):
            return super().elapsed_ns(start, end) / 1e6

    device = InMilliseconds()
    tmr = Timer(device, clock=clock)
    lengths = [1, 7, 999, 123_456_789]
    for length in lengths:
        work(tmr, device, length * 1e-9)
    assert [length / 1e9 for length in lengths] == tmr.get_time("a", gpu=True)


def test_a_device_that_stops_for_a_reading_is_read_where_asked(clock):
    """Neither the ends of regions nor a snapshot read a time there; a request by name reads them."""

    class Stalls(ManualDeviceClock):
        stalls = True

    device = Stalls()
    tmr = Timer(device, clock=clock)
    for _ in range(100):
        work(tmr, device, 1e-3)
        device.finish()
    assert (100, 0) == (tmr.snapshot().get("a", "GPU").pending, device.calls["elapsed_ns"])
    assert 100 == len(tmr.get_time("a", gpu=True))
    work(tmr, device, 1e-3)
    tmr.complete_all()
    assert 0 == tmr.snapshot().get("a", "GPU").pending


def test_half_a_pool_of_regions_shares_a_query(tmr, device):
    """On a device that keeps up, eight regions cost one question how far it is."""
    for _ in range(1000):
        work(tmr, device, 0)
    assert device.calls["is_done"] <= 1000 / 8 + 10


def test_a_capture_that_begins_inside_costs_no_event(tmr, device):
    """The start of a region that a capture cuts off serves again, and the region is captured, not failed."""
    for _ in range(50):
        tmr.start("a", gpu=True)
        captures.begin(graph := Graph())
        tmr.end("a", gpu=True)
        captures.end(graph)
    found = tmr.snapshot().get("a", "GPU")
    assert (50, 0, True) == (found.captured, found.failed, tmr.device.events <= 3)


def test_an_interrupt_in_a_start_goes_through(device):
    """It is the user's, and the event that it cut off serves again."""
    pool = EventPool(device)
    device.fail("record", KeyboardInterrupt())
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            pool.begin(EventPair("a"))
    assert 1 == pool.events


@pytest.mark.parametrize("users", [0, 1])
def test_an_interrupt_in_the_query_of_an_anchor_goes_through(users):
    """In the start that makes the anchor, or in the next: its event stays the anchor's, that of the other is free."""

    class Interrupting(ManualDeviceClock):
        def is_done(self, event):
            if armed:
                raise KeyboardInterrupt
            return super().is_done(event)

    armed, device = [], Interrupting()
    pool, now_ns = EventPool(device), ManualClock().now_ns
    device.launch(1)
    if not users:
        armed.append(True)
    for _ in range(2):
        pair = EventPair("a", now_ns)
        try:
            pool.begin(pair)
        except KeyboardInterrupt:
            assert None is pair.start
        armed.append(True)
    (queue,) = pool._queues.values()
    assert queue.latest.event not in queue.free
    assert (2, 1, users) == (pool.events, len(queue.free), queue.latest.users)


def test_an_end_without_an_event_leaves_none_behind(tmr, device):
    """Where no event can be made the time failed, and the events are free for the next pairs."""
    tmr.start("a", gpu=True)
    device.fail("new_event", RuntimeError("none left"))
    with pytest.warns(TimingWarning, match="none left"):
        tmr.end("a", gpu=True)
    device.fail("new_event", None)
    for _ in range(3):
        work(tmr, device, 1.0)
    device.finish()
    assert [1.0] * 3 == tmr.get_time("a", gpu=True)
    assert 1 == tmr.snapshot().get("a", "GPU").failed


def test_a_clock_may_record_by_another_handle_than_its_stream(clock):
    """``record_handle`` takes what ``handle_of`` returns; ``record`` takes a stream, and is not called."""

    class ByHandle(ManualDeviceClock):
        def handle_of(self, stream):
            return f"handle of {stream}"

        def record_handle(self, event, handle):
            handles.append(handle)
            self.record(event, handle.removeprefix("handle of "))

    handles, device = [], ByHandle()
    tmr = Timer(device, clock=clock)
    work(tmr, device, 1.0)
    assert [1.0] == tmr.get_time("a", gpu=True)
    assert {"handle of stream 0"} == set(handles)


def test_no_event_is_ever_destroyed(device):
    """Not when its pool forgets it, as in a forked child: it belongs to the parent's context."""
    made = []

    class Watched(ManualDeviceClock):
        def new_event(self, stream):
            event = super().new_event(stream)
            made.append(event)
            return event

    pool = EventPool(Watched())
    pool.begin(EventPair("a"))
    pool.abandon()
    gc.collect()
    (kept,), (other,) = ([sys.getrefcount(thing) for thing in things] for things in (made, [object()]))
    assert (1, 0) == (kept - other, pool.events)  # one reference more, which no one gives back


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_no_events(tmr, device):
    """Those of every pool are the parent's."""
    work(tmr, device, 1.0)
    child = os.fork()
    if child == 0:
        os._exit(tmr.device.events)
    assert (0, 2) == (os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), tmr.device.events)


def test_an_end_without_a_start_failed(device):
    """The end of a pair that was never begun is one time that failed, and no capture."""

    class Sink:
        failed = captured = 0

    pool_of(device).end(EventPair("a"), sink := Sink(), 0, 1)
    assert (1, 0) == (sink.failed, sink.captured)


def test_a_clock_that_binds_at_its_first_call(clock):
    """A clock may replace its methods at the first request for a stream."""

    class Late(ManualDeviceClock):
        def stream(self):
            self.record = super().record
            self.is_capturing = super().is_capturing
            return super().stream()

        def record(self, event, stream):
            raise AssertionError("not bound yet")

        def is_capturing(self):
            raise AssertionError("not bound yet")

    device = Late()
    tmr = Timer(device, clock=clock)
    work(tmr, device, 1)
    assert [1.0] == tmr.get_time("a", gpu=True)


def test_a_comparison_that_fails_leaves_the_device_that_was_current(clock):
    """A comparison may make another device current and then fail; the one from before is made current again."""

    class Current(ManualDeviceClock):
        current = 3

        def device_now(self):
            return self.current

        def back_to(self, device):
            self.current = device

        def elapsed_ns(self, start, end):
            self.current = 0
            raise RuntimeError("lost")

    device = Current()
    tmr = Timer(device, clock=clock)
    work(tmr, device, 1)
    with pytest.warns(TimingWarning, match="lost"):
        tmr.complete_all()
    assert (3, 1) == (device.current, tmr.snapshot().get("a", "GPU").failed)


@pytest.mark.parametrize("method", ["device_now", "back_to"])
def test_a_current_device_that_cannot_be_read_or_restored(clock, method):
    """The times count as failed, with a warning; neither a region nor a report raises."""

    class Lost(ManualDeviceClock):
        def device_now(self):
            self._called("device_now")
            return 0

        def back_to(self, device):
            self._called("back_to")

    device = Lost()
    tmr = Timer(device, clock=clock)
    for name in ("elapsed_ns", method):
        device.fail(name, RuntimeError("lost"))
    with pytest.warns(TimingWarning, match="lost"):
        for _ in range(80):
            work(tmr, device, 0)
            tmr.snapshot()
    assert 64 <= tmr.snapshot().get("a", "GPU").failed


def test_a_reader_waits_for_who_collects(clock):
    """A request for times during another thread's collection waits for it, and has them all."""

    class Slow(ManualDeviceClock):
        def is_done(self, event):
            if threading.get_ident() == collector and not go_on.is_set():
                collecting.set()
                go_on.wait()
            return super().is_done(event)

    collecting, go_on = threading.Event(), threading.Event()
    collector = 0
    device = Slow()
    tmr = Timer(device, clock=clock)
    for _ in range(10):
        work(tmr, device, 1)
    device.finish()

    def collect():
        nonlocal collector
        collector = threading.get_ident()
        tmr.complete_all()

    first = threading.Thread(target=collect)
    first.start()
    collecting.wait()
    found = []
    second = threading.Thread(target=lambda: found.append(tmr.get_time("a", gpu=True)))
    second.start()
    second.join(0.05)
    assert second.is_alive()
    go_on.set()
    first.join()
    second.join()
    assert [[1.0] * 10] == found


PROGRAM = """
import os, sys
from deep500_timing import CPUGPUTimer
class Event:
    made = 0
    def __init__(self): self.pid = os.getpid(); Event.made += 1
    def __del__(self, write=os.write, getpid=os.getpid): write(1, b"D" if self.pid == getpid() else b"F")
class Clock:
    name = "worker"
    def stream(self): return "s"
    def is_capturing(self): return False
    def new_event(self, stream): return Event()
    def record(self, event, stream): pass
    def is_done(self, event): return True
    def wait(self, event): pass
    def elapsed_ns(self, start, end): return 1
tmr = CPUGPUTimer(device_clock=Clock())
for _ in range(20):
    with tmr.region("x", gpu=True): pass
print(Event.made > 3, flush=True)
"""


class TestTheEnd:
    def test_events_outlive_the_interpreter(self, python):
        """No event is destroyed as the process ends: that could hang on a stuck device."""
        assert "True\n" == python(PROGRAM)

    @pytest.mark.skipif(sys.platform == "win32", reason="no fork")
    def test_events_outlive_a_forked_child(self, python):
        """A child that ends as programs end, by ``sys.exit``, destroys no event of its parent's context."""
        fork = "pid = os.fork()\nif pid == 0: sys.exit(0)\nos.waitpid(pid, 0)\nprint('parent')"
        assert "True\nparent\n" == python(PROGRAM + fork)


class TestPlaces:
    def test_where_the_device_ran_them(self, device):
        """Regions that were launched one millisecond apart stand where the device ran them, one after another."""
        tmr = Timer(device, clock=Together(device))
        for _ in range(4):
            work(tmr, device, 0.050)
            device.advance(0.001)
        device.finish()
        assert [[0, 50], [50, 100], [100, 150], [150, 200]] == (tmr.intervals("a", gpu=True) // 10**6).tolist()
        assert 0 == tmr.device.uncertainty_ns

    def test_streams_that_overlap(self, device):
        """Two streams that work at the same time stand side by side."""
        tmr = Timer(device, clock=Together(device))
        for stream in ("one", "two"):
            device.use_stream(stream)
            work(tmr, device, 3, stream)
        device.finish()
        assert [[0, 3 * 10**9]] * 2 == [tmr.intervals(key, gpu=True)[0].tolist() for key in ("one", "two")]

    def test_uncertain_by_what_lies_between_two_answers(self, device):
        """On a busy stream the place is known to within the last no and the first yes, and the middle is taken."""
        tmr = Timer(device, clock=Together(device))
        device.launch(0.010)
        work(tmr, device, 0.001)
        device.advance(0.009)
        work(tmr, device, 0.001)  # says no, at 9 ms
        device.advance(0.004)
        work(tmr, device, 0.001)  # says yes, at 13 ms
        device.finish()
        assert (11, 2_000_000) == (tmr.intervals("a", gpu=True)[0][0] // 10**6, tmr.device.uncertainty_ns)

    def test_anchored_anew(self, device):
        """A run of ten minutes needs an anchor every two seconds, with events that serve again, and stays true."""
        tmr = Timer(device, clock=Together(device))
        true = []
        for _ in range(600):
            true.append(device.now_ns)
            work(tmr, device, 0.02)
            device.advance(1.0)
        assert true == tmr.intervals("a", gpu=True)[:, 0].tolist()
        assert tmr.device.events <= 40

    def test_two_host_clocks_are_anchored_anew(self, device):
        """Each has its anchors, though they take turns: both stay true where they drift, and no event is lost."""

        class Drifting(Together):
            def now_ns(self):
                return round(self.device.now_ns * (1 + 40e-6))

        timers = [Timer(device, clock=Drifting(device)) for _ in range(2)]
        worst = 0
        for number in range(600):
            for tmr in timers:
                truth = tmr.now_ns()
                work(tmr, device, 0.02)
                device.advance(0.5)
                if number % 100 == 99:
                    worst = max(worst, abs(tmr.intervals("a", gpu=True)[-1][0] - truth))
        assert worst <= 150_000
        assert timers[0].device.events <= 60

    def test_how_often_a_new_anchor_is_asked_for(self, device):
        """Once where the device is there at once; eight times, and no more, where it is busy."""
        pool = EventPool(device)
        pool.begin(EventPair("a", Together(device).now_ns))
        assert 1 == device.calls["is_done"]
        device.launch(1.0)
        pool.begin(EventPair("b", Together(device).now_ns))
        assert 9 == device.calls["is_done"]

    @pytest.mark.parametrize(("when", "uncertainty_ns"), [("start", 6_000_000), ("end", 1_000_000)])
    def test_each_end_of_a_region_asks_for_the_anchor(self, device, when, uncertainty_ns):
        """A yes tells when the device was there at the latest, whenever the time is read."""
        tmr = Timer(device, clock=Together(device))
        device.launch(0.010)
        tmr.start("a", gpu=True)
        if when == "end":
            device.advance(0.012)
        tmr.end("a", gpu=True)
        if when == "start":
            device.advance(0.012)
            tmr.start("b", gpu=True)
        device.advance(5.0)
        tmr.complete_all()
        assert uncertainty_ns == tmr.device.uncertainty_ns

    def test_an_anchor_is_narrowed_by_the_one_before(self, device):
        """A time that was precise two seconds ago is precise now, less what the clocks may have drifted."""
        tmr = Timer(device, clock=Together(device))
        work(tmr, device, 0.001)
        device.advance(2.5)
        device.launch(1.0)
        tmr.start("a", gpu=True)  # the device gets there in a second, and is asked much later
        device.advance(2.0)
        tmr.end("a", gpu=True)
        tmr.complete_all()
        assert 0 < tmr.device.uncertainty_ns <= 200_000

    def test_a_capture_that_begins_while_an_anchor_is_recorded(self, device):
        """Nothing is asked from then on; the pair is captured, and the next one placed as ever."""

        class Capturing(ManualDeviceClock):
            def record(self, event, stream):
                super().record(event, stream)
                if not begun:
                    begun.append(graph)
                    captures.begin(graph)

        begun, graph, device = [], Graph(), Capturing()
        tmr = Timer(device, clock=Together(device))
        tmr.start("a", gpu=True)
        tmr.end("a", gpu=True)
        assert 0 == device.calls["is_done"]
        captures.end(graph)
        work(tmr, device, 1.0)
        assert [1.0] == tmr.get_time("a", gpu=True)
        assert 1 == tmr.snapshot().get("a", "GPU").captured

    def test_anchors_do_not_gather(self, device):
        """Each knows the one before it until it is placed, and no longer."""

        def anchors():
            return sum(type(thing) is EventAnchor for thing in gc.get_objects())

        before = anchors()  # of other tests' devices, with pools that live as long as the process
        tmr = Timer(device, clock=Together(device))
        for _ in range(300):
            work(tmr, device, 0.02)
            device.advance(1.0)
        tmr.complete_all()
        assert anchors() - before < 30

    def test_anchors_without_times_do_not_gather(self, device):
        """Regions that are all discarded, over an hour; the next one is placed, and events serve again."""
        tmr = Timer(device, clock=Together(device))
        for _ in range(1200):
            tmr.start("a", gpu=True)
            device.advance(3.0)
            tmr.discard("a")
        began_ns = device.now_ns
        work(tmr, device, 1.0)
        assert [[began_ns, began_ns + 10**9]] == tmr.intervals("a", gpu=True).tolist()
        assert tmr.device.events <= 4

    @pytest.mark.parametrize(("regions", "pause_s"), [(6000, 0.1), (12, 600.0)])
    def test_clocks_that_part(self, device, regions, pause_s):
        """Where the device's clock runs 20 ppm fast, a place is right at any time, however rare the regions are."""

        class Drifting:
            def now_ns(self):
                return round(device.now_ns / (1 + 20e-6))

        tmr = Timer(device, clock=Drifting())
        worst = 0
        for number in range(regions):
            truth = Drifting().now_ns()
            work(tmr, device, 0.02)
            device.advance(pause_s)
            placed = tmr.intervals("a", gpu=True)[-1][0] if number % (regions // 12) == 0 else truth
            worst = max(worst, abs(placed - truth))
        assert worst <= 45_000 + tmr.device.uncertainty_ns

    def test_each_host_clock_has_its_places(self, device):
        """Timers with their own host clocks are placed each on its own timeline."""
        here, there = ManualClock(10**9), ManualClock(5 * 10**9)
        one, two = Timer(device, clock=here), Timer(device, clock=there)
        for _ in range(3):
            for tmr in (one, two):
                work(tmr, device, 1)
        found = [tmr.intervals("a", gpu=True)[:, 0].tolist() for tmr in (one, two)]
        assert [[n * 10**9 for n in (1, 3, 5)], [n * 10**9 for n in (5, 7, 9)]] == found
