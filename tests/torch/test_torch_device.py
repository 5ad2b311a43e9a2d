"""The test device does the other tests' assumptions: its clock, its queues, its counters and its faults."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.one_form, pytest.mark.torch_device]

PACKAGE = Path(__file__).parents[1] / "torch_device" / "__init__.py"
LOAD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("torch_device", {str(PACKAGE)!r})
sys.modules["torch_device"] = torch_device = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_device)
"""
MS = 1_000_000


def load_package():
    """Import tests/torch_device by its path, once per process."""
    if "torch_device" not in sys.modules:
        spec = importlib.util.spec_from_file_location("torch_device", PACKAGE)
        sys.modules["torch_device"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["torch_device"]


@pytest.fixture
def dev():
    """The device at time 0."""
    device = load_package().load_or_skip()
    device.reset()
    yield device
    device.reset()


def timed_event():
    """Make an event that can be timed."""
    return torch.Event(enable_timing=True)


def recorded(stream=None):
    """An event recorded on `stream`, or on the current one."""
    event = timed_event()
    event.record(*([] if stream is None else [stream]))
    return event


class TestRegistration:
    def test_is_the_accelerator(self, dev):
        """torch.accelerator names the device, counts two of it and starts at index 0."""
        assert torch.device("testdev") == torch.accelerator.current_accelerator()
        assert torch.accelerator.is_available() is True
        assert 2 == torch.accelerator.device_count()
        assert 0 == torch.accelerator.current_device_index()

    def test_load_is_idempotent(self, dev):
        """Loading again gives the same module, which torch knows by the device's name."""
        assert dev is load_package().load()
        assert dev is torch.testdev
        assert dev is torch.get_device_module("testdev")

    def test_events_without_a_device_are_events_of_it(self, dev):
        """A torch.Event made without a device belongs to the test device."""
        assert "testdev" == recorded().device.type

    def test_unavailable_device(self, dev):
        """set_available(False) leaves the backend built and without a device, until the reset."""
        dev.set_available(False)
        assert torch.accelerator.is_available() is False
        assert 0 == torch.accelerator.device_count()
        assert torch.accelerator.current_accelerator(check_available=True) is None
        dev.reset()
        assert torch.accelerator.is_available() is True

    def test_training_on_the_cpu_goes_on(self, dev):
        """A forward, a backward and a seed on the CPU work with the device loaded."""
        torch.manual_seed(0)
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
        assert [2.0, 2.0, 2.0] == weight.grad.tolist()


class TestQueues:
    def test_work_is_in_order_and_starts_now_at_the_earliest(self, dev):
        """Work starts at the end of the queue, and at the present time when the queue has run dry."""
        assert (0, 5) == dev.launch(5)
        assert (5, 8) == dev.launch(3)
        dev.advance(100)
        assert (100, 101) == dev.launch(1)
        assert 101 == dev.tail_ns()

    def test_streams_are_independent(self, dev):
        """Work on one stream delays neither another stream nor another device."""
        side, other = torch.Stream(), torch.Stream("testdev:1")
        dev.launch(50)
        assert (0, 7) == dev.launch(7, side)
        assert (0, 9) == dev.launch(9, other)
        assert 3 == len({torch.accelerator.current_stream(), side, other})

    def test_event_is_done_when_the_clock_reaches_it(self, dev):
        """An event turns done exactly when the clock reaches the end of the work before it."""
        dev.launch(10)
        event = recorded()
        dev.launch(10)
        dev.advance(9)
        assert event.query() is False
        dev.advance(1)
        assert event.query() is True

    def test_unrecorded_event_is_done(self, dev):
        """A query of an event that was never recorded is True and never reaches the device."""
        assert timed_event().query() is True
        assert 0 == dev.counters().queries

    def test_event_on_an_idle_stream_is_done_at_once(self, dev):
        """An event behind no work is done as it is recorded."""
        dev.advance(3)
        assert recorded().query() is True

    def test_recording_again_moves_the_event(self, dev):
        """The last record of an event is the one that counts."""
        event = recorded()
        dev.launch(4)
        event.record()
        assert event.query() is False

    def test_wait_makes_a_stream_wait(self, dev):
        """Work behind stream.wait_event starts when the event is done, and the host does not wait."""
        side = torch.Stream()
        dev.launch(20)
        side.wait_event(recorded())
        assert (20, 21) == dev.launch(1, side)
        assert 0 == dev.now_ns()
        assert (1, 0) == (dev.counters().blocks, dev.counters().synchronizes)

    def test_wait_stream(self, dev):
        """wait_stream waits for the other stream's queued work."""
        side = torch.Stream()
        dev.launch(20)
        side.wait_stream(torch.accelerator.current_stream())
        dev.launch(20)
        assert (20, 20) == dev.launch(0, side)

    def test_stream_query(self, dev):
        """A stream is done when all of its work is."""
        stream = torch.accelerator.current_stream()
        dev.launch(2)
        assert stream.query() is False
        dev.advance(2)
        assert stream.query() is True

    def test_negative_times_are_refused(self, dev):
        """The clock never runs backwards, nor does work end before it starts."""
        with pytest.raises(ValueError, match="never goes back"):
            dev.advance(-1)
        with pytest.raises(ValueError, match="duration_ns"):
            dev.launch(-1)

    def test_drain_finishes_all_work_and_counts_nothing(self, dev):
        """A drain moves the clock to the end of the last stream of the last device without a synchronize."""
        dev.launch(5)
        dev.launch(30, torch.Stream("testdev:1"))
        assert 30 == dev.drain()
        assert 0 == dev.counters().synchronizes

    @settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
    @given(
        st.lists(
            st.one_of(
                st.tuples(st.just("launch"), st.integers(0, 2), st.integers(0, 10**9)),
                st.tuples(st.just("record"), st.integers(0, 2), st.just(0)),
                st.tuples(st.just("advance"), st.just(0), st.integers(0, 10**9)),
            ),
            max_size=30,
        )
    )
    def test_agrees_with_a_model(self, dev, calls):
        """Any order of calls on three streams gives each event the time that plain additions give it."""
        dev.reset()
        dev.set_float32_elapsed(False)
        streams = [torch.accelerator.current_stream(), torch.Stream(), torch.Stream()]
        tails, now, stamps, events = [0, 0, 0], 0, [], []
        origin = recorded()
        for call, which, ns in calls:
            if call == "launch":
                tails[which] = max(tails[which], now) + ns
                dev.launch(ns, streams[which])
            elif call == "record":
                stamps.append(max(tails[which], now))
                events.append(recorded(streams[which]))
            else:
                now += ns
                dev.advance(ns)
        assert [stamp <= now for stamp in stamps] == [event.query() for event in events]
        dev.drain()
        assert [stamp / MS for stamp in stamps] == [origin.elapsed_time(event) for event in events]


class TestElapsed:
    def test_is_the_work_between_in_ms(self, dev):
        """The elapsed time is the device's time between two events in ms, for any work of the host."""
        dev.set_float32_elapsed(False)
        start = recorded()
        dev.launch(1_234_567)
        end = recorded()
        dev.advance(1_000 * MS)
        assert 1.234567 == start.elapsed_time(end)
        assert -1.234567 == end.elapsed_time(start)

    def test_unfinished_pair_raises(self, dev):
        """An end that is not done raises, as CUDA does, and waits for nothing."""
        start = recorded()
        dev.launch(1)
        end = recorded()
        with pytest.raises(RuntimeError, match="completed"):
            start.elapsed_time(end)
        assert (0, 0, 0) == (dev.now_ns(), dev.counters().synchronizes, dev.counters().elapsed_calls)

    def test_unrecorded_and_untimed_pairs_raise(self, dev):
        """Events that were never recorded, or that were made without timing, have no elapsed time."""
        with pytest.raises(ValueError, match="recorded"):
            recorded().elapsed_time(timed_event())
        untimed = torch.Event(enable_timing=False)
        untimed.record()
        with pytest.raises(ValueError, match="enable_timing"):
            recorded().elapsed_time(untimed)

    def test_across_devices_raises(self, dev):
        """Events of two devices have no elapsed time."""
        here = recorded()
        there = recorded(torch.Stream("testdev:1"))
        with pytest.raises(RuntimeError, match="device 0 and device 1"):
            here.elapsed_time(there)

    def test_across_streams_of_one_device(self, dev):
        """Events of two streams of one device do have one."""
        start = recorded()
        side = torch.Stream()
        dev.launch(3 * MS, side)
        end = recorded(side)
        dev.drain()
        assert 3.0 == start.elapsed_time(end)

    def test_float32_as_in_cuda(self, dev):
        """With set_float32_elapsed an hour and a nanosecond is an hour."""
        dev.set_float32_elapsed(True)
        start = recorded()
        dev.launch(3600 * 1000 * MS + 1)
        end = recorded()
        dev.drain()
        assert 3_600_000.0 == start.elapsed_time(end)
        dev.set_float32_elapsed(False)
        assert 3_600_000.000001 == start.elapsed_time(end)

    def test_an_event_stays_on_its_device(self, dev):
        """Recording an event on a stream of another device than its first raises."""
        event = recorded()
        with pytest.raises(RuntimeError, match="device 0 was recorded on a stream of device 1"):
            event.record(torch.Stream("testdev:1"))


class TestSynchronize:
    def test_event(self, dev):
        """event.synchronize moves the clock to the event, not to the end of the queue, and counts."""
        dev.launch(5)
        event = recorded()
        dev.launch(5)
        event.synchronize()
        assert 5 == dev.now_ns()
        assert (1, 0, 0) == synchronizes_by_kind(dev)

    def test_stream(self, dev):
        """stream.synchronize moves the clock to the end of that stream's work, and counts."""
        side = torch.Stream()
        dev.launch(5, side)
        dev.launch(50)
        side.synchronize()
        assert 5 == dev.now_ns()
        assert (0, 1, 0) == synchronizes_by_kind(dev)

    def test_device(self, dev):
        """torch.accelerator.synchronize moves the clock to the end of that device's work, and counts."""
        dev.launch(5)
        dev.launch(7, torch.Stream())
        dev.launch(90, torch.Stream("testdev:1"))
        torch.accelerator.synchronize()
        assert 7 == dev.now_ns()
        torch.accelerator.synchronize("testdev:1")
        assert 90 == dev.now_ns()
        assert (0, 0, 2) == synchronizes_by_kind(dev)
        assert 2 == dev.counters().synchronizes

    def test_never_moves_the_clock_back(self, dev):
        """Waiting for finished work counts and changes nothing."""
        event = recorded()
        dev.advance(10)
        event.synchronize()
        torch.accelerator.synchronize()
        assert 10 == dev.now_ns()
        assert (1, 0, 1) == synchronizes_by_kind(dev)


def synchronizes_by_kind(dev):
    """Return how many synchronizes of events, streams and devices there were."""
    counters = dev.counters()
    return counters.event_synchronizes, counters.stream_synchronizes, counters.device_synchronizes


class TestDevicesAndStreams:
    def test_current_device(self, dev):
        """The current device can be set, and an event without a stream goes to its current stream."""
        torch.accelerator.set_device_index(1)
        assert 1 == torch.accelerator.current_device_index()
        assert 1 == torch.accelerator.current_stream().device_index
        assert torch.device("testdev", 1) == recorded().device
        with torch.accelerator.device_index(0):
            assert 0 == torch.accelerator.current_device_index()
        assert 1 == torch.accelerator.current_device_index()

    def test_device_that_does_not_exist(self, dev):
        """A device index out of range raises."""
        with pytest.raises(RuntimeError, match="no device 2"):
            torch.accelerator.set_device_index(2)

    def test_stream_that_does_not_exist(self, dev):
        """A stream id that was never given out raises rather than meaning some other stream."""
        bogus = torch.Stream(stream_id=10**6, device_index=0, device_type=torch.Stream().device_type)
        with pytest.raises(RuntimeError, match="no stream 1000000"):
            timed_event().record(bogus)

    def test_current_stream_follows_the_context(self, dev):
        """Inside `with stream` work and events go to that stream, also on another device, but not after."""
        default, side = torch.accelerator.current_stream(), torch.Stream("testdev:1")
        with side:
            assert side == torch.accelerator.current_stream()
            dev.launch(4)
        assert default == torch.accelerator.current_stream()
        assert (0, 4) == (dev.tail_ns(), dev.tail_ns(side))

    def test_current_device_and_stream_belong_to_the_thread(self, dev):
        """Another thread starts on device 0 and its default stream, for any choice of this thread."""
        torch.accelerator.set_stream(torch.Stream("testdev:1"))
        seen = []

        def look():
            stream = torch.accelerator.current_stream()
            seen.append((stream.device_index, stream.stream_id))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert [(0, 0)] == seen
        assert 1 == torch.accelerator.current_device_index()


class TestCounters:
    def test_every_call_counts_once(self, dev):
        """Records, queries, elapsed times, lookups and launches each count where they happen."""
        stream = torch.accelerator.current_stream()
        start, end = recorded(stream), recorded(stream)
        dev.launch(0)
        assert end.query()
        start.elapsed_time(end)
        counters = dev.counters()
        assert (2, 1, 1) == (counters.records, counters.own_queries, counters.elapsed_calls)
        assert 3 == counters.queries  # elapsed_time of torch queries both events first
        assert (1, 1) == (counters.stream_lookups, counters.launches)

    def test_record_without_a_stream_looks_it_up(self, dev):
        """A record on the current stream costs one lookup, a record on a given stream none."""
        stream = torch.Stream()
        recorded(stream)
        assert 0 == dev.counters().stream_lookups
        recorded()
        assert 1 == dev.counters().stream_lookups

    def test_events_are_counted_from_their_first_record_to_their_end(self, dev):
        """An event is created at its first record, once, and destroyed with its last reference."""
        event = timed_event()
        assert 0 == dev.counters().events_created
        event.record()
        event.record()
        other = recorded()
        del event
        counters = dev.counters()
        assert (2, 1, 1) == (counters.events_created, counters.events_destroyed, counters.events_alive)
        del other
        assert 0 == dev.counters().events_alive

    def test_reset_counters_keeps_the_clock_and_the_living(self, dev):
        """reset_counters sets to 0 the counts, not the time, nor the number of events that exist."""
        event = recorded()
        dev.advance(5)
        dev.reset_counters()
        counters = dev.counters()
        assert (0, 0, 1) == (counters.records, counters.events_created, counters.events_alive)
        assert 5 == dev.now_ns()
        del event
        assert 0 == dev.counters().events_alive

    def test_concurrent_calls_are_all_counted(self, dev):
        """Records and queries from several threads lose no count."""

        def work():
            event = timed_event()
            for _ in range(500):
                event.record()
                event.query()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counters = dev.counters()
        assert (2000, 2000) == (counters.records, counters.queries)
        assert (4, 0) == (counters.events_created, counters.events_alive)


class TestReset:
    def test_everything_is_as_at_first(self, dev):
        """A reset undoes the clock, queues, counters, current device and stream, faults and captures."""
        torch.accelerator.set_stream(torch.Stream("testdev:1"))
        dev.launch(5)
        dev.advance(3)
        recorded()
        dev.fail_next("record", 3)
        dev.set_capturing(True)
        load_package().reset()
        assert set(dev.counters()) == {0}
        assert (0, 0) == (dev.now_ns(), dev.tail_ns())
        assert (0, 0) == (dev.current_device(), torch.accelerator.current_stream().stream_id)
        assert dev.is_current_stream_capturing() is False
        assert recorded().query() is True

    def test_events_of_before(self, dev):
        """An event of before a reset is done, is not counted, and cannot be paired with one of after."""
        dev.launch(5)
        old = recorded()
        dev.reset()
        assert old.query() is True
        with pytest.raises(RuntimeError, match="reset between"):
            old.elapsed_time(recorded())
        del old
        counters = dev.counters()
        assert (1, 1, 0) == (counters.events_created, counters.events_destroyed, counters.events_alive)

    def test_events_of_before_can_be_recorded_again(self, dev):
        """An event that a pool kept over a reset works like a new one once it is recorded."""
        kept = recorded()
        dev.reset()
        kept.record()
        dev.launch(2 * MS)
        end = recorded()
        dev.drain()
        assert 2.0 == kept.elapsed_time(end)
        assert 1 == dev.counters().events_created


class TestCapture:
    def test_queries_and_records_are_counted(self, dev):
        """Queries and records during a capture are counted apart, and no longer after it."""
        before = recorded()
        dev.set_capturing(True)
        assert dev.is_current_stream_capturing() is True
        before.query()
        recorded()
        dev.set_capturing(False)
        before.query()
        recorded()
        counters = dev.counters()
        assert (1, 1) == (counters.queries_while_capturing, counters.records_while_capturing)
        assert (2, 3) == (counters.queries, counters.records)

    def test_of_one_stream(self, dev):
        """Only the captured stream captures, yet a query anywhere meanwhile is counted."""
        side = torch.Stream()
        dev.set_capturing(True, side)
        assert side.is_capturing() is True
        assert dev.is_current_stream_capturing() is False
        recorded().query()
        recorded(side)
        counters = dev.counters()
        assert (1, 1) == (counters.queries_while_capturing, counters.records_while_capturing)

    def test_captured_event_can_never_be_read(self, dev):
        """An event recorded in a capture raises on every read, until it is recorded outside of one."""
        dev.set_capturing(True)
        event = recorded()
        dev.set_capturing(False)
        with pytest.raises(RuntimeError, match="never be read"):
            event.query()
        with pytest.raises(RuntimeError, match="never be read"):
            event.synchronize()
        with pytest.raises(RuntimeError, match="never be read"):
            event.elapsed_time(recorded())
        event.record()
        assert event.query() is True

    def test_synchronizes_and_launches(self, dev):
        """During a capture a synchronize is counted apart, and launched work never runs."""
        dev.set_capturing(True)
        assert (0, 0) == dev.launch(5)
        torch.accelerator.synchronize()
        counters = dev.counters()
        assert (1, 1) == (counters.synchronizes_while_capturing, counters.launches_while_capturing)
        assert (0, 0, 0) == (counters.launches, dev.now_ns(), dev.tail_ns())


CALLS = {
    "record": lambda event: event.record(torch.Stream()),
    "query": lambda event: event.query(),
    "elapsed": lambda event: event.elapsed_time(event),
    "synchronize": lambda event: event.synchronize(),
    "stream_lookup": lambda event: torch.accelerator.current_stream(),
}


class TestFaults:
    @pytest.mark.parametrize("kind", CALLS)
    def test_next_calls_raise(self, dev, kind):
        """The next two calls of the kind raise, the third and calls of other kinds do not."""
        event = recorded()
        dev.fail_next(kind, 2)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"injected fault in {kind}"):
                CALLS[kind](event)
        for call in CALLS.values():
            call(event)
        assert 2 == dev.counters().faults

    def test_failed_record_leaves_the_event(self, dev):
        """A record that fails is counted, makes no event and moves none."""
        event = timed_event()
        dev.fail_next("record")
        with pytest.raises(RuntimeError):
            event.record()
        counters = dev.counters()
        assert (1, 0) == (counters.records, counters.events_created)
        assert event.query() is True

    def test_can_be_taken_back(self, dev):
        """fail_next(kind, 0) cancels the faults that are pending."""
        dev.fail_next("query", 5)
        dev.fail_next("query", 0)
        assert recorded().query() is True

    def test_misuse(self, dev):
        """An unknown kind and a negative number are refused."""
        with pytest.raises(ValueError, match="not 'recrod'"):
            dev.fail_next("recrod")
        with pytest.raises(ValueError, match="n >= 0"):
            dev.fail_next("record", -1)


class TestProcesses:
    def test_exit_with_living_events(self, dev, run_forked):
        """An interpreter that ends with events in globals, cycles and threads' hands ends in silence."""
        printed = run_forked(
            LOAD
            + """
import torch, threading
dev = torch_device.load()
event = torch.Event(enable_timing=True); event.record()
cycle = [torch.Event(enable_timing=True)]; cycle[0].record(); cycle.append(cycle)
torch._kept_by_torch = torch.Event(); torch._kept_by_torch.record()
release = threading.Event()
def hold(event):
    event.record()
    release.wait()
threading.Thread(target=hold, args=(torch.Event(),), daemon=True).start()
dev.launch(10**9)
print("end")
"""
        )
        assert "end\n" == printed

    def test_no_accelerator_without_loading(self, run_forked):
        """A new process that does not load the device is how tests get one without an accelerator."""
        printed = run_forked(
            "import torch; print(hasattr(torch, 'testdev'), torch.accelerator.current_accelerator())"
        ).split()
        assert "False" == printed[0]
        assert "testdev" not in printed[1]

    @pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
    def test_fork(self, dev, run_forked):
        """A forked child can use the events it inherited, and its counts stay its own."""
        printed = run_forked(
            LOAD
            + """
import os, torch
dev = torch_device.load()
event = torch.Event(enable_timing=True); event.record()
pid = os.fork()
if pid == 0:
    event.record()
    os._exit(0 if event.query() and dev.counters().records == 2 else 1)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), dev.counters().records)
"""
        )
        assert "0 1\n" == printed


class TestBuild:
    @pytest.fixture
    def build(self, dev, monkeypatch, tmp_path):
        """The build module, pointed at an empty folder."""
        module = sys.modules["torch_device._build"]
        monkeypatch.setattr(module, "BUILD_ROOT", tmp_path / "build")
        return module

    def test_no_compiler(self, build, monkeypatch):
        """Without a C++ compiler the reason names the one that was looked for."""
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(build.UnavailableError, match="C\\+\\+ compiler; there is no 'no-such-compiler'"):
            build.load_extension()

    def test_no_ninja(self, build, monkeypatch, tmp_path):
        """Without ninja the reason says so."""
        monkeypatch.setenv("CXX", sys.executable)  # a program that exists where PATH leads nowhere
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(build.UnavailableError, match="needs ninja"):
            build.load_extension()

    def test_missing_tool_skips_with_the_reason(self, build, monkeypatch):
        """load_or_skip turns a missing tool into a skip that gives the reason."""
        package = load_package()

        def unavailable():
            raise build.UnavailableError("the test device needs a thing")

        monkeypatch.setattr(package, "load", unavailable)
        with pytest.raises(pytest.skip.Exception, match="needs a thing"):
            package.load_or_skip()

    def test_folder_depends_on_source_and_torch(self, build, monkeypatch, tmp_path):
        """Another source or another torch gets another library."""
        first = build._library_path()
        changed = tmp_path / "device.cpp"
        changed.write_bytes(build.SOURCE.read_bytes() + b"\n")
        monkeypatch.setattr(build, "SOURCE", changed)
        second = build._library_path()
        monkeypatch.setattr(torch, "__version__", "0.0.0")
        assert 3 == len({first, second, build._library_path()})

    def test_concurrent_loads_build_once(self, build, monkeypatch):
        """Of four that find no library at the same time one builds and the others take its library."""
        together = threading.Barrier(4)
        monkeypatch.setattr(build, "_require_tools", together.wait)
        built, imported = [], []
        monkeypatch.setattr(build, "_build", lambda library: (built.append(library), library.touch()))
        monkeypatch.setattr(build, "_import_library", imported.append)
        threads = [threading.Thread(target=build.load_extension) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [build._library_path()] == built
        assert built * 3 == imported
        assert "*\n" == (build.BUILD_ROOT / ".gitignore").read_text()
