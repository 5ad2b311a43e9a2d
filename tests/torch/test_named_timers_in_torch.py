"""Named timers, throughput, memory and FLOPs in PyTorch programs: on the test device, and without any device."""

from __future__ import annotations

import types
import warnings

import pytest
import torch

from deep500_timing import TimingWarning, memory
from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer, ThroughputTimer
from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch import memory as torch_memory
from deep500_timing_torch.event_timer import CudaEventTimer
from deep500_timing_torch.flop_counter import count_flops, device_peak_flops
from deep500_timing_torch.memory import MemoryTimer, TorchMemory

MS = 1_000_000


@pytest.mark.torch_device
class TestOnTheTestDevice:
    def test_named_timers_find_the_device_and_do_not_synchronize(self, dev):
        """Times are between events; the first wait is for the first value that is read."""
        timers = SynchronizedWallClockTimer()
        for length in (10, 20):
            timers("fwd").start()
            dev.launch(length * MS)
            timers("fwd").stop()
        assert dev.counters().synchronizes == 0
        assert timers("fwd").elapsed() == pytest.approx(30.0)
        assert dev.counters().event_synchronizes == dev.counters().synchronizes == 1

    def test_reading_one_timer_leaves_later_work_running(self, dev):
        """Only the events concerned are waited for."""
        timers = SynchronizedWallClockTimer()
        for name, length in (("fwd", 10), ("bwd", 500)):
            timers(name).start()
            dev.launch(length * MS)
            timers(name).stop()
        assert timers("fwd").elapsed() == pytest.approx(10.0)
        assert dev.now_ns() == 10 * MS

    def test_throughput_does_not_synchronize(self, dev):
        """Nor do steps; the rate is of the device's time."""
        timer = ThroughputTimer(10, start_step=0)
        for _ in range(5):
            timer.start()
            dev.launch(500 * MS)
            timer.stop(global_step=True)
        assert dev.counters().synchronizes == 0
        assert timer.avg_samples_per_sec() == pytest.approx(20.0)

    def test_a_hundred_thousand_regions_need_few_events(self, dev):
        """Named timers draw their events from the pool."""
        timers = SynchronizedWallClockTimer()
        timer = timers("fwd")
        for _ in range(10_000):
            timer.start()
            dev.launch(1_000)
            timer.stop()
            dev.advance(1_000)
        assert dev.counters().events_alive < 64
        assert dev.counters().synchronizes == 0
        assert timer.elapsed() == pytest.approx(10.0, rel=1e-3)

    def test_an_engines_config_without_synchronization_takes_the_host(self, dev, monkeypatch):
        """``synchronized=False`` asks for the CPU's clock, as in the original."""
        config = types.SimpleNamespace(enabled=True, synchronized=False)
        timer = ThroughputTimer(config, batch_size=10, start_step=0)
        timer.start()
        timer.stop(global_step=True)
        assert dev.counters().records == 0

    def test_an_event_pair_of_your_own(self, dev):
        """``CudaEventTimer`` waits for its two events, and for nothing queued after them."""
        start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        start.record()
        dev.launch(5 * MS)
        end.record()
        dev.launch(500 * MS)
        timer = CudaEventTimer(start, end)
        assert timer.get_elapsed_msec() == pytest.approx(5.0)
        assert timer.get_elapsed_msec() == pytest.approx(5.0)
        assert dev.now_ns() == 5 * MS

    def test_an_event_pair_over_two_streams(self, dev):
        """The start may be the later one to be done."""
        start, end = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        other = torch.Stream()
        dev.launch(5 * MS)
        start.record()
        end.record(other)
        assert CudaEventTimer(start, end).get_elapsed_msec() == pytest.approx(-5.0)

    def test_events_that_cannot_be_timed_are_errors(self, dev):
        """PyTorch says their error."""
        start, end = torch.Event(), torch.Event()
        start.record()
        end.record()
        with pytest.raises(ValueError, match="enable_timing"):
            CudaEventTimer(start, end).get_elapsed_msec()
        timed = torch.Event(enable_timing=True), torch.Event(enable_timing=True)
        with pytest.raises((ValueError, RuntimeError), match="recorded"):
            CudaEventTimer(*timed).get_elapsed_msec()

    def test_memory_timers_time_the_device_too(self, dev):
        """A memory timer of the adapter is a CPUGPUTimer with one thing more."""
        tmr = MemoryTimer()
        with tmr.region("x", gpu=True):
            dev.launch(5 * MS)
        assert isinstance(tmr, CPUGPUTimer)
        assert tmr.get_time("x", gpu=True) == [pytest.approx(0.005)]
        assert tmr.snapshot().get("x").memory.last.device == "testdev:0"

    def test_the_peak_of_an_unknown_device(self, dev):
        """No guess: None, with a message that names it."""
        with pytest.warns(TimingWarning, match="'testdev' is not known here"):
            assert device_peak_flops() is None


class Allocator:
    """Stands for the module of a device: counts its calls, and has peaks that one could reset."""

    def __init__(self):
        self.resets = 0

    def memory_allocated(self, device):
        """Now."""
        return 100

    def max_memory_allocated(self, device):
        """At most."""
        return 200

    def memory_reserved(self, device):
        """Held now."""
        return 300

    def max_memory_reserved(self, device):
        """Held at most."""
        return 400

    def get_device_properties(self, device):
        """The device's memory."""
        return types.SimpleNamespace(total_memory=500)

    def reset_peak_memory_stats(self, device=None):
        """What must not be called."""
        self.resets += 1


class TestMemory:
    @pytest.fixture
    def allocator(self, monkeypatch):
        """A device with such an allocator."""
        allocator = Allocator()
        monkeypatch.setattr(torch_memory.torch, "get_device_module", lambda device: allocator)
        return allocator

    def test_a_devices_four_numbers(self, allocator):
        """Allocated, reserved, and the peaks of both, for any kind of device; and how much it has."""
        usage = TorchMemory("cuda:1").read()
        assert usage.device == "cuda:1"
        assert (usage.device_allocated_bytes, usage.device_peak_allocated_bytes) == (100, 200)
        assert (usage.device_reserved_bytes, usage.device_peak_reserved_bytes) == (300, 400)
        assert usage.device_total_bytes == 500

    def test_a_device_without_properties(self, allocator, monkeypatch):
        """Its size is not known, and the rest is read all the same."""
        monkeypatch.setattr(Allocator, "get_device_properties", lambda self, device: types.SimpleNamespace())
        usage = TorchMemory("cuda").read()
        assert usage.device_total_bytes is None
        assert usage.device_allocated_bytes == 100

    def test_the_users_peaks_are_not_reset(self, allocator):
        """Reading at every end leaves the framework's counters alone."""
        tmr = memory.MemoryTimer(memory=TorchMemory("cuda"))
        for _ in range(3):
            with tmr.region("x"):
                pass
        assert tmr.snapshot().get("x").memory.samples == 3
        assert allocator.resets == 0

    def test_what_a_device_does_not_say_is_none(self, monkeypatch):
        """A device that counts nothing has None, not 0."""
        monkeypatch.setattr(torch_memory.torch, "get_device_module", lambda device: types.SimpleNamespace())
        usage = TorchMemory("xpu").read()
        assert usage.device == "xpu"
        assert usage.device_allocated_bytes is None

    def test_without_psutil_the_devices_numbers_remain(self, allocator, monkeypatch):
        """The host's are left out, with one message."""
        import sys

        monkeypatch.setitem(sys.modules, "psutil", None)
        with pytest.warns(TimingWarning, match="psutil"):
            usage = TorchMemory("cuda").read()
        assert (usage.host_rss_bytes, usage.device_allocated_bytes) == (None, 100)


class TestFlops:
    def test_a_step_is_counted(self):
        """Forward and backward of a linear layer: 2·m·k·n each for output and weights, per sample."""
        layer = torch.nn.Linear(64, 32, bias=False)
        inputs = torch.randn(8, 64)
        model = count_flops(lambda: layer(inputs).sum().backward(), units=8, unit="sample")
        assert model.flops == 2 * (2 * 64 * 32)
        assert (model.unit, model.recompute) == ("sample", False)
        assert "FlopCounterMode: 65536 per step of 8 sample(s)" in model.formula

    def test_recomputed_operations_are_counted_and_named(self):
        """With activation checkpointing PyTorch counts the forward pass twice: that is HFU."""
        from torch.utils.checkpoint import checkpoint

        layer = torch.nn.Linear(64, 32, bias=False)
        inputs = torch.randn(8, 64)
        model = count_flops(
            lambda: checkpoint(lambda x: layer(x).relu(), inputs, use_reentrant=False).sum().backward(), recompute=True
        )
        assert model.flops == 3 * (2 * 8 * 64 * 32)
        assert model.recompute

    def test_nothing_counted_is_none_with_a_message(self):
        """A step without matrix products has no MFU."""
        with pytest.warns(TimingWarning, match="FlopCounterMode saw no matrix product"):
            assert count_flops(lambda: torch.ones(3) + 1) is None

    def test_units_must_be_positive(self):
        """They divide."""
        with pytest.raises(ValueError, match="units"):
            count_flops(lambda: None, units=0)

    def test_the_peak_may_be_given(self):
        """For a device that the table does not have."""
        assert device_peak_flops("cpu", torch.float32, given=1e12).flops_per_s == 1e12

    @pytest.mark.parametrize(("precision", "dtype"), [("highest", "float32"), ("high", "tf32")])
    def test_float32_on_cuda_is_tf32_where_it_may_be(self, monkeypatch, precision, dtype):
        """The peak is of the matrix products' type."""
        before = torch.get_float32_matmul_precision()
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        try:
            torch.set_float32_matmul_precision(precision)
            assert device_peak_flops("cuda", torch.float32).dtype == dtype
            assert device_peak_flops("cuda", torch.bfloat16).dtype == "bfloat16"
        finally:
            torch.set_float32_matmul_precision(before)


class TestCompiled:
    def test_named_timers_break_no_graph(self):
        """In a compiled function a timer that exists records nothing; around it, it times."""
        timers = SynchronizedWallClockTimer(device="cpu")
        timers("inside")

        @torch.compile(backend="eager", fullgraph=True)
        def step(x):
            timers("inside").start()
            y = x.sin() + 1
            timers("inside").stop(record=True)
            return y

        timers("outside").start()
        assert torch.equal(step(torch.zeros(3)), torch.ones(3))
        timers("outside").stop()
        assert timers("outside").elapsed() > 0.0
        assert timers.timer.snapshot().get("inside") is None


class TestWithoutADevice:
    def test_the_hosts_clock_serves_without_a_word(self, run_forked):
        """No accelerator, no warning: host times, as the original on a CPU."""
        printed = run_forked(
            "import warnings; warnings.simplefilter('error')\n"
            "from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer, ThroughputTimer\n"
            "timers = SynchronizedWallClockTimer()\n"
            "timers('x').start(); timers('x').stop()\n"
            "assert timers('x').elapsed(reset=False) > 0\n"
            "timers.log(['x'], memory_breakdown=True)\n"
            "rate = ThroughputTimer(10, 0); rate.start(); rate.stop(global_step=True)\n"
            "assert rate.avg_samples_per_sec() > 0\n"
        )
        assert "time (ms) | x: " in printed
        assert "mem_allocated" not in printed

    def test_a_timer_and_a_device_exclude_each_other(self):
        """A timer has its own."""
        with pytest.raises(ValueError, match="Leave one out"):
            SynchronizedWallClockTimer(CPUGPUTimer(device="cpu"), device="cpu")

    def test_reading_memory_warns_of_nothing(self, run_forked):
        """Without an accelerator the device's numbers are None."""
        printed = run_forked(
            "from deep500_timing_torch.memory import TorchMemory\n"
            "usage = TorchMemory().read(); print(usage.device, usage.device_allocated_bytes)\n"
        )
        assert printed.split() == ["None", "None"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            TorchMemory("cpu").read()
