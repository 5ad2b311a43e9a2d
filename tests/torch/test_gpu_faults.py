"""The effects of a real GPU on to a timed program, played on the test device, which dies of what CUDA dies of."""

from __future__ import annotations

import os
import types
import warnings

import pytest

pytest.importorskip("torch")

import torch

import deep500_timing_torch as timer
from deep500_timing.devices import captures, pool_of
from deep500_timing_torch import _clock
from deep500_timing_torch.memory import TorchMemory

MS = 1_000_000
STEP = "step"

pytestmark = pytest.mark.torch_device


@pytest.fixture(autouse=True)
def _new_clocks(dev, monkeypatch):
    """Clocks that look at the device again; a capture that a test left open ends with it."""
    monkeypatch.setattr(_clock, "_clocks", {})
    yield
    captures.after_fork()


def ready(dev, device=None):
    """A timer with 40 pairs that are done and that no one has read."""
    tmr = timer.CPUGPUTimer(device)
    stream = None if device is None else torch.accelerator.current_stream(torch.device(device).index)
    for _ in range(40):
        with tmr.region(STEP, gpu=True):
            dev.launch(1000, stream)
    dev.advance(MS)
    return tmr


def regions(dev, tmr, number):
    """Time that many regions."""
    for _ in range(number):
        with tmr.region("loader", gpu=True):
            dev.launch(1000)


class TestCaptures:
    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    @pytest.mark.parametrize(
        "who",
        [
            "snapshot here",
            "regions here",
            "snapshot elsewhere",
            "regions elsewhere",
            "get_time elsewhere",
            "complete_all elsewhere",
            "snapshot beside the stream",
            "snapshot of another device",
        ],
    )
    def test_survives_whatever_the_timer_does(self, dev, in_thread, mode, who):
        """A capture on one thread outlives snapshots, regions and waits on every thread, in every mode."""
        tmr = ready(dev, "testdev:1" if "another device" in who else None)
        do = {
            "snapshot": tmr.snapshot,
            "regions": lambda: regions(dev, tmr, 60),
            "get_time": lambda: tmr.get_time(STEP, gpu=True),
            "complete_all": tmr.complete_all,
        }[who.split()[0]]
        side, graph = torch.Stream(), dev.TestGraph()
        graph.capture_begin(side, mode)
        if "elsewhere" in who:
            in_thread(do)
        elif "here" in who:
            with side:
                do()
        else:
            do()
        graph.capture_end()  # raises if anything has ended it
        assert 40 == len(tmr.get_time(STEP, gpu=True))
        assert 0 == tmr.snapshot().get(STEP, "GPU").failed

    def test_the_test_device_can_fail_it(self, dev, in_thread):
        """A bare query on another thread ends a capture of the global mode there, as on CUDA."""
        event = torch.Event("testdev", enable_timing=True)
        event.record()
        graph = dev.TestGraph()
        graph.capture_begin(torch.Stream())
        error = []

        def ask():
            try:
                event.query()
            except RuntimeError as found:
                error.append(str(found))

        in_thread(ask)
        assert "(900)" in error[0]
        with pytest.raises(RuntimeError, match=r"\(901\)"):
            graph.capture_end()

    def test_a_capture_that_fails_to_begin_counts_for_nothing(self, dev):
        """What raises at its begin or its end leaves no capture counted."""
        ready(dev)
        graph = dev.TestGraph()
        with pytest.raises(RuntimeError, match="default stream"):
            graph.capture_begin()
        assert 0 == captures.under_way
        with pytest.raises(RuntimeError, match="no capture"):
            graph.capture_end()
        assert 0 == captures.under_way


class TestCurrentDevice:
    def test_stays_what_it_is(self, dev):
        """A region that is open across ``set_device`` is failed when it ends, and the device stays as it was set."""
        tmr = timer.CPUGPUTimer()
        tmr.start("setup", gpu=True)
        torch.accelerator.set_device_index(1)
        with pytest.warns(timer.TimingWarning, match="ended on another device"):
            tmr.end("setup", gpu=True)
        dev.drain()
        assert 1 == tmr.snapshot().get("setup", "GPU").failed
        for _ in range(100):
            with tmr.region(STEP, gpu=True):
                dev.launch(1000)
            dev.advance(1000)
        assert 1 == torch.accelerator.current_device_index()
        assert (100, 1) == (len(tmr.get_time(STEP, gpu=True)), torch.accelerator.current_device_index())

    @pytest.mark.parametrize("kind", ["record", "elapsed"])
    def test_stays_when_the_device_fails(self, dev, kind):
        """A call for another device that raises leaves the current one as it was."""
        tmr = ready(dev, "testdev:1")
        tmr.get_time(STEP, gpu=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "record":
                dev.fail_next("record")
            with tmr.region(STEP, gpu=True):
                pass
            dev.drain()
            if kind == "elapsed":
                dev.fail_next("elapsed", 2)
            tmr.snapshot()
        assert 0 == torch.accelerator.current_device_index()

    def test_the_test_device_can_fail_it(self, dev):
        """A bare generic event with a failing record leaves the stream's device current, as on CUDA."""
        event, stream = torch.Event("testdev:1", enable_timing=True), torch.accelerator.current_stream(1)
        dev.fail_next("record")
        with pytest.raises(RuntimeError):
            event.record(stream)
        assert 1 == torch.accelerator.current_device_index()


class TestForks:
    @pytest.mark.parametrize("what", ["timer", "named device", "wallclock", "memory", "pickle", "host regions"])
    def test_nothing_is_started_before_gpu_true(self, dev, what):
        """Making timers, host regions and reading memory ask the driver nothing: forked children may use the device."""
        import pickle

        from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer

        do = {
            "timer": timer.CPUGPUTimer,
            "named device": lambda: timer.CPUGPUTimer("testdev:1"),
            "wallclock": SynchronizedWallClockTimer,
            "memory": lambda: TorchMemory().read(),
            "pickle": lambda: pickle.loads(pickle.dumps(timer.CPUGPUTimer())),
            "host regions": lambda: timer.CPUGPUTimer().region(STEP).__enter__(),
        }[what]
        do()
        assert (0, []) == (dev.probes(), dev.contexts())
        assert "ok" == self.child(lambda: "bad" if dev._is_in_bad_fork() else "ok")

    def test_gpu_true_starts_it(self, dev):
        """The probe can tell: the first region with ``gpu=True`` asks the driver."""
        with timer.CPUGPUTimer().region(STEP, gpu=True):
            pass
        assert dev.probes() > 0
        assert "bad" == self.child(lambda: "bad" if dev._is_in_bad_fork() else "ok")

    def test_a_child_destroys_no_event_of_its_parent(self, dev):
        """The parent's events are left alone in a child, also when the child has dropped everything it can."""
        tmr = ready(dev)

        def drop():
            import gc

            tmr.reset()
            tmr.snapshot()
            gc.collect()
            return str(dev.counters().foreign_events_destroyed)

        assert "0" == self.child(drop)

    def child(self, function):
        """A forked child's answer."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.write(writing, function().encode())
            finally:
                os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        with os.fdopen(reading) as pipe:
            return pipe.read()


class TestPlaces:
    def test_true_starts_and_ends(self, dev):
        """Launched 1 ms apart, regions of 50 ms stand one behind another, where the device ran them."""

        class Host:
            now_ns = staticmethod(dev.now_ns)

        tmr = timer.CPUGPUTimer(clock=Host())
        true = []
        for _ in range(4):
            with tmr.region(STEP, gpu=True):
                true.append(list(dev.launch(50 * MS)))
            dev.advance(MS)
        dev.drain()
        assert true == tmr.intervals(STEP, gpu=True).tolist()

    def test_a_minute_costs_less_than_a_microsecond(self, dev):
        """Anchors every two seconds keep the float32 milliseconds of a long run within a microsecond of the truth."""

        class Host:
            now_ns = staticmethod(dev.now_ns)

        tmr = timer.CPUGPUTimer(clock=Host())
        true = []
        for index in range(3000):
            with tmr.region(STEP, gpu=True):
                true.append(dev.launch(1_234_567 + index)[0])
            dev.advance(20 * MS + 7919 * (index % 13))
        worst = max(abs(a - b) for a, b in zip(true, tmr.intervals(STEP, gpu=True)[:, 0].tolist(), strict=True))
        assert worst <= 1000
        assert dev.counters().events_alive <= 40


class TestCuda:
    """Which of CUDA's functions are used, on a stand-in for ``torch.cuda`` that only notes its calls."""

    @pytest.fixture
    def cuda(self, monkeypatch):
        """The stand-in."""
        asked = []

        class Event:
            def __init__(self, enable_timing=False):
                asked.append(("Event", enable_timing))

            record = lambda self, stream: asked.append(("record", stream))  # noqa: E731
            query = lambda self: asked.append("query") or True  # noqa: E731
            synchronize = lambda self: asked.append("synchronize")  # noqa: E731
            elapsed_time = lambda self, end: asked.append("elapsed_time") or 2.5  # noqa: E731

        class Graph:
            def capture_begin(self, fail=False):
                asked.append(captures.under_way)
                if fail:
                    raise RuntimeError("cannot begin")

            def capture_end(self):
                asked.append(captures.under_way)

        def stream(**numbers):
            return types.SimpleNamespace(device=f"cuda:{numbers['device_index']}", **numbers)

        def current_stream(device=None):
            asked.append("current_stream")
            return stream(stream_id=7, device_index=device or 0, device_type=1)

        module = types.SimpleNamespace(
            init=lambda: asked.append("init"),
            Event=Event,
            Stream=stream,
            CUDAGraph=Graph,
            current_stream=current_stream,
            current_device=lambda: 0,
            is_current_stream_capturing=lambda: bool(asked.append("is_current_stream_capturing")),
        )
        monkeypatch.setattr(torch, "cuda", module)
        monkeypatch.setattr(torch._C, "_CudaEventBase", Event, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", lambda index: (7, max(index, 0), 1), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        monkeypatch.setattr(_clock, "_resolve", lambda device: torch.device(device or "cuda"))
        monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
        return asked

    @pytest.mark.parametrize(
        ("lacks", "takes"),
        [
            (None, set()),
            ("_CudaEventBase", set()),
            ("_cuda_getCurrentStream", {"current_stream"}),
            ("_cuda_isCurrentStreamCapturing", {"is_current_stream_capturing"}),
        ],
    )
    @pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:1", 1)])
    def test_no_generic_event(self, cuda, monkeypatch, device, index, lacks, takes):
        """Events are those of ``torch.cuda``, with a guard that leaves the current device as it is.

        A PyTorch that lacks one of the private functions is timed by the public one around it.
        """
        if lacks is not None:
            monkeypatch.delattr(torch._C, lacks)
        clock = timer.CudaEventClock(device)
        assert [] == cuda
        tmr = timer.Timer(clock)
        for _ in range(3):
            with tmr.region(STEP, gpu=True):
                pass
        assert [0.0025] * 3 == tmr.get_time(STEP, gpu=True)
        assert 1 == cuda.count("init")
        only_here = {"is_current_stream_capturing"} if index else set()  # it tells of the current device only
        assert takes - only_here == {"current_stream", "is_current_stream_capturing"} & {str(each) for each in cuda}
        records = [each[1] for each in cuda if each[0] == "record"]
        assert {(7, index, 1)} == {(each.stream_id, each.device_index, each.device_type) for each in records}
        assert 6 == len(records)
        (queue,) = pool_of(clock)._queues.values()
        assert index == queue.device

    @pytest.mark.parametrize(("device", "captured"), [("cuda", 1), ("cuda:0", 1), ("cuda:1", 0)])
    def test_a_capture_that_cpp_begins(self, cuda, monkeypatch, device, captured):
        """A numbered clock asks as well, while its device is the current one."""
        monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
        tmr = timer.Timer(timer.CudaEventClock(device))
        with tmr.region(STEP, gpu=True):
            pass
        tmr.complete_all()
        assert captured == tmr.snapshot().get(STEP, "GPU").captured

    def test_captures_are_watched_from_the_import(self, run_alone):
        """Those of every graph class, before any clock is used and without starting a driver."""
        program = """
import torch, deep500_timing_torch
modules = [module for name in ("accelerator", "cuda", "xpu", "mtia") if (module := getattr(torch, name, None))]
graphs = [kind for module in modules for kind in vars(module).values()
          if isinstance(kind, type) and hasattr(kind, "capture_begin")]
print(len(graphs) > 0, all(hasattr(kind.capture_begin, "_deep500_timing") for kind in graphs))
print(torch.cuda.is_initialized(), any(name.startswith("torch._dynamo") for name in __import__("sys").modules))
"""
        assert ["True", "True", "False", "False"] == run_alone(program).stdout.split()

    def test_captures_of_its_graphs_are_seen(self, cuda):
        """Each capture is counted from before it begins until after it ended, and not if it fails to begin."""
        timer.CudaEventClock("cuda").stream()
        graph = torch.cuda.CUDAGraph()
        del cuda[:]
        graph.capture_begin()
        graph.capture_end()
        with pytest.raises(RuntimeError, match="cannot begin"):
            graph.capture_begin(fail=True)
        assert ([1, 1, 1], 0) == (cuda, captures.under_way)
        _clock.watch_captures(torch.cuda)
        graph.capture_begin()
        assert 1 == captures.under_way
        graph.capture_end()


class TestApple:
    """MPS, with events that cost a full stop of the device: only by name, and only when asked for."""

    @pytest.fixture(autouse=True)
    def _mps(self, monkeypatch):
        """A machine with an accelerator of Apple's."""
        monkeypatch.setattr(_clock, "accelerator", lambda: "mps")
        monkeypatch.setattr(torch.backends.mps, "is_built", lambda: True)

    def test_not_unless_it_is_named(self):
        """``gpu=True`` gives CPU times and one warning that says why and how."""
        tmr = timer.CPUGPUTimer()
        with pytest.warns(timer.TimingWarning, match=r"without stopping the whole device.*CPUGPUTimer\('mps'\)"):
            for _ in range(2):
                with tmr.region(STEP, gpu=True):
                    pass
        assert ([], 2) == (tmr.get_time(STEP, gpu=True), len(tmr.get_time(STEP)))
        with pytest.raises(timer.DeviceUnavailableError, match="without stopping the whole device"):
            timer.CudaEventClock()

    def test_by_name_read_only_when_asked_for(self, dev, monkeypatch):
        """Named, it says its cost; no region's end and no snapshot reads a time, ``get_time`` does."""
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch, "get_device_module", lambda kind: dev)
        tmr = timer.CPUGPUTimer("mps")
        with pytest.warns(timer.TimingWarning, match="reading a time stops the whole device"):
            for _ in range(100):
                with tmr.region(STEP, gpu=True):
                    dev.launch(1000)
                dev.advance(1000)
        tmr.snapshot()
        assert 0 == dev.counters().elapsed_calls
        assert 100 == len(tmr.get_time(STEP, gpu=True))
        assert 0 == dev.counters().synchronizes

    def test_a_wait_has_an_end(self, dev, monkeypatch):
        """A device that never gets there is not waited for for ever."""
        monkeypatch.setattr(_clock, "WAIT_S", 0.01)
        event = torch.Event("testdev", enable_timing=True)
        dev.launch(MS)
        event.record()
        with pytest.raises(TimeoutError, match="has not reached"):
            _clock._wait_at_most(event)
        dev.drain()
        _clock._wait_at_most(event)
