"""GPU times on a real CUDA device. Elsewhere the test device stands in for it.

Run them by ``make test-gpu``, in a process without the test device, which PyTorch would take for its accelerator.
"""

from __future__ import annotations

import itertools
import os
import threading
import warnings

import pytest

pytest.importorskip("torch")

import torch
from suite_rehearsal import FAKES

import deep500_timing_torch as timer
from deep500_timing.devices import _pool as _device

BATCH = timer.TimeType.BATCH
VISIBLE = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}

pytestmark = pytest.mark.gpu


@pytest.fixture
def spin():
    """A function that keeps the current stream busy for a number of seconds, to within some percent."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 100_000_000
    for _ in range(2):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize()
    per_second = cycles / start.elapsed_time(end) * 1e3
    yield lambda seconds: torch.cuda._sleep(round(seconds * per_second))
    torch.cuda.synchronize()


@pytest.fixture
def no_synchronize(monkeypatch):
    """Fails the test if any way of waiting for the device that Python can see is used."""

    def refuse(*args, **kwargs):
        raise AssertionError("the timer waited for the device")

    for module, name in [
        (torch.cuda, "synchronize"),
        (torch.accelerator, "synchronize"),
        (torch._C, "_cuda_synchronize"),
    ]:
        monkeypatch.setattr(module, name, refuse)
    clock = timer.CudaEventClock("cuda")
    monkeypatch.setattr(clock, "wait", refuse)
    # PyTorch's own watch over calls that synchronize.
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def assert_value(value, data):
    """The device has computed this. In the rehearsal it computes nothing."""
    if FAKES is None:
        assert value == data[0].item()


class TestTimes:
    def test_known_work(self, spin):
        """A region's GPU time is that of its work, and agrees with two events around it."""
        tmr = timer.CPUGPUTimer(device="cuda")
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        spin(1)  # The device must not wait for this process, which may not get a processor for long.
        before.record()
        with tmr.region(BATCH, gpu=True):
            spin(0.02)
        after.record()
        spin(0.02)
        (seconds,) = tmr.get_time(BATCH, gpu=True)
        torch.cuda.synchronize()
        outer = before.elapsed_time(after) / 1e3
        assert 0.015 < seconds <= outer + 1e-6  # CUDA rounds each to half a microsecond.
        assert outer - seconds < 0.001

    def test_launching_is_not_running(self, spin):
        """The CPU time of a region is that of launching the work, and the GPU time that of doing it."""
        tmr = timer.CPUGPUTimer()
        with tmr.region("warm", gpu=True):
            spin(0.001)
        tmr.complete_all()
        with tmr.region(BATCH, gpu=True):
            spin(0.1)
        (cpu,) = tmr.get_time(BATCH)
        (gpu,) = tmr.get_time(BATCH, gpu=True)
        assert cpu < gpu / 2

    def test_side_stream(self, spin):
        """A region on a side stream has that stream's time, though another stream is busy longer."""
        tmr = timer.CPUGPUTimer()
        spin(0.1)
        with torch.cuda.stream(torch.cuda.Stream()), tmr.region(BATCH, gpu=True):
            spin(0.02)
        (seconds,) = tmr.get_time(BATCH, gpu=True)
        assert 0.015 < seconds < 0.15

    def test_backward_on_autograds_thread(self):
        """A region begun and ended in hooks of a backward pass, on autograd's own thread, is timed."""
        tmr = timer.CPUGPUTimer()
        threads = set()
        x = torch.ones(512, 512, device="cuda", requires_grad=True)
        y = x @ x

        def begin(grad):
            threads.add(threading.get_ident())
            tmr.start("node", gpu=True)

        def end(grad):
            tmr.end("node", gpu=True)

        y.register_hook(begin)
        x.register_hook(end)
        y.sum().backward()
        (seconds,) = tmr.get_time("node", gpu=True)
        assert seconds > 0
        assert threading.get_ident() not in threads

    @pytest.mark.skipif("torch.cuda.device_count() < 2")
    def test_another_device(self, spin):
        """A timer for device 1 times work there while device 0 is current."""
        tmr = timer.CPUGPUTimer(device="cuda:1")
        with tmr.region(BATCH, gpu=True), torch.cuda.device(1):
            spin(0.02)
        (seconds,) = tmr.get_time(BATCH, gpu=True)
        assert seconds > 0.005

    @pytest.mark.skipif("torch.cuda.device_count() < 2")
    def test_device_switched_inside(self):
        """Between two devices there is no time: it is failed, with a warning."""
        tmr = timer.CPUGPUTimer()
        tmr.start(BATCH, gpu=True)
        with torch.cuda.device(1), pytest.warns(timer.TimingWarning, match="counted as failed"):
            tmr.end(BATCH, gpu=True)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        assert [] == tmr.get_time(BATCH, gpu=True)


class TestNeverInTheWay:
    def test_a_hundred_thousand_regions(self, no_synchronize):
        """They wait for nothing, and use events in proportion to the work in flight and not to their number."""
        tmr = timer.CPUGPUTimer(keep_last=100)
        data = torch.zeros(1024, device="cuda")
        ledger = _device.pool_of(timer.CudaEventClock())
        for _ in range(100_000):
            with tmr.region(BATCH, gpu=True):
                data += 1
        times = tmr.snapshot().get(BATCH, "GPU")
        assert 100_000 == times.stats.count + times.pending
        assert 0 == times.failed
        # CUDA lets a stream run some thousand launches ahead at most; a region holds two events.
        assert ledger.events <= 20_000

    def test_the_end_of_a_region_does_not_wait(self, spin, no_synchronize):
        """A region over long work is over, for the CPU, long before the work is."""
        tmr = timer.CPUGPUTimer()
        with tmr.region("warm", gpu=True):
            pass
        with tmr.region(BATCH, gpu=True):
            spin(0.3)
        assert 1 == tmr.snapshot().get(BATCH, "GPU").pending


class TestGraphs:
    def test_capture_is_counted(self, spin):
        """Regions in a capture leave the graph as it is, are counted, and times go on after it."""
        tmr = timer.CPUGPUTimer()
        data = torch.zeros(8, device="cuda")
        for _ in range(100):  # So that there are pairs to ask for, which a capture would not survive.
            with tmr.region("before", gpu=True):
                data += 1
        torch.cuda.synchronize()
        data.zero_()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.simplefilter("error", timer.TimingWarning)
            with torch.cuda.graph(graph):
                for _ in range(50):
                    with tmr.region("captured", gpu=True):
                        data += 1
                tmr.snapshot()
        graph.replay()
        torch.cuda.synchronize()
        assert_value(50.0, data)
        assert 50 == tmr.snapshot().get("captured", "GPU").captured
        assert [] == tmr.get_time("captured", gpu=True)
        assert 100 == len(tmr.get_time("before", gpu=True))
        with tmr.region("replay", gpu=True):
            graph.replay()
        assert 1 == len(tmr.get_time("replay", gpu=True))

    @pytest.mark.skipif(FAKES is not None, reason="Triton's kernels need a real driver")
    def test_compiled_with_graphs(self):
        """A region around a function that runs as a CUDA graph is timed, and one within it is not recorded."""
        tmr = timer.CPUGPUTimer()

        @torch.compile(mode="reduce-overhead", fullgraph=True)
        def function(x):
            with tmr.region("within", gpu=True):
                return x * 2 + 1

        x = torch.ones(64, device="cuda")
        for _ in range(5):
            with tmr.region("around", gpu=True):
                function(x)
        assert 5 == len(tmr.get_time("around", gpu=True))
        assert [] == tmr.get_time("within")


def on_a_thread(what):
    """Run it on another thread and join."""
    thread = threading.Thread(target=what)
    thread.start()
    thread.join()


class TestWhatOnlyAGpuShows:
    @pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
    @pytest.mark.parametrize("what", ["snapshot", "regions", "get_time"])
    @pytest.mark.parametrize("elsewhere", [True, False])
    def test_a_capture_lives(self, spin, mode, what, elsewhere):
        """A capture survives every call of the timer, on its thread and on others, in every mode."""
        tmr = timer.CPUGPUTimer()
        data = torch.zeros(8, device="cuda")
        for _ in range(40):
            with tmr.region("before", gpu=True):
                data += 1
        torch.cuda.synchronize()

        def regions():
            for _ in range(60):
                with tmr.region("inside", gpu=True):
                    pass

        do = {"snapshot": tmr.snapshot, "regions": regions, "get_time": lambda: tmr.get_time("before", gpu=True)}[what]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            data += 1
            on_a_thread(do) if elsewhere else do()
        graph.replay()
        torch.cuda.synchronize()
        assert_value(41.0, data)
        assert 40 == len(tmr.get_time("before", gpu=True))

    def test_the_place_of_a_region(self, spin):
        """Regions that were launched together lie one after another, between the host's times before and after."""
        tmr = timer.CPUGPUTimer()
        with tmr.region("warm", gpu=True):
            spin(0.001)
        torch.cuda.synchronize()
        began_ns = tmr.now_ns()
        for _ in range(4):
            with tmr.region(BATCH, gpu=True):
                spin(0.05)
        torch.cuda.synchronize()
        ended_ns = tmr.now_ns()
        placed = tmr.intervals(BATCH, gpu=True).tolist()
        slack_ns = tmr.device.uncertainty_ns + 50_000
        assert all(end <= start + slack_ns for (_, end), (start, _) in itertools.pairwise(placed))
        assert began_ns - slack_ns <= placed[0][0]
        assert placed[-1][1] <= ended_ns + slack_ns

    @pytest.mark.parametrize(
        "first",
        [
            "with timer.CPUGPUTimer().region('a'): pass",
            "from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer as t; t()",
        ],
    )
    def test_a_child_may_use_the_gpu(self, run_alone, first):
        """After a timer was made and the host timed, a forked child starts CUDA."""
        program = f"""
import os, torch, deep500_timing_torch as timer
{first}
pid = os.fork()
if pid == 0:
    torch.zeros(1, device="cuda")
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
        assert "0" == run_alone(program, **VISIBLE).stdout.strip()

    def test_the_end_says_nothing(self, run_alone):
        """A process that timed the GPU, and its forked child that ends by ``sys.exit``, end without a word."""
        program = """
import os, sys, warnings, deep500_timing_torch as timer
# Python 3.12 warns of any fork beside CUDA's threads.
warnings.simplefilter("ignore", DeprecationWarning)
tmr = timer.CPUGPUTimer("cuda")
for _ in range(50):
    with tmr.region("a", gpu=True):
        pass
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
"""
        assert "" == run_alone(program, **VISIBLE).stderr

    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_the_current_device_stays(self, spin):
        """A region that is open across ``set_device`` is failed when it ends, and the device stays as it was set."""
        tmr = timer.CPUGPUTimer()
        tmr.start("setup", gpu=True)
        torch.cuda.set_device(1)
        try:
            with pytest.warns(timer.TimingWarning, match="ended on another device"):
                tmr.end("setup", gpu=True)
            assert 1 == tmr.snapshot().get("setup", "GPU").failed
            assert 1 == torch.cuda.current_device()
        finally:
            torch.cuda.set_device(0)

    def test_collectives_issued_together(self, monkeypatch):
        """Each of six asynchronous all-reduces has the time that NCCL's own events give it."""
        import torch.distributed as dist

        from deep500_timing_torch import comm

        if not dist.is_nccl_available():
            pytest.skip("needs NCCL")
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29573", "RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
        dist.init_process_group("nccl")
        try:
            data = [torch.ones(1 << 22, device="cuda") for _ in range(6)]
            dist.all_reduce(data[0])
            torch.cuda.synchronize()
            comm.reset_log()
            works = [comm.all_reduce(tensor, async_op=True) for tensor in data]
            for work in works:
                work.wait()
            torch.cuda.synchronize()
            times = comm.summary(wait=True).find("all_reduce")
            own = sum(work._get_duration() for work in works) / 6e3
            assert (6, False) == (times.count, times.upper_bound)
            assert own == pytest.approx(times.mean_s, rel=0.01)
        finally:
            dist.destroy_process_group()
