"""Named timers, memory and peaks on a real GPU."""

from __future__ import annotations

import pytest
from suite_rehearsal import FAKES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu


def work():
    """Keep the device busy for some 50 ms."""
    torch.cuda._sleep(100_000_000)


def test_named_timers_agree_with_events():
    """A timer around work reads the time of a pair of events around it, within a tenth."""
    from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer
    from deep500_timing_torch.event_timer import CudaEventTimer

    work()
    timers = SynchronizedWallClockTimer()
    timers("warm-up").start()  # Its search for the device takes milliseconds.
    timers("warm-up").stop()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    timers("fwd").start()
    work()
    timers("fwd").stop()
    end.record()
    assert timers("fwd").elapsed() == pytest.approx(CudaEventTimer(start, end).get_elapsed_msec(), rel=0.1)


def test_memory_is_the_allocators_and_peaks_stay():
    """The numbers are PyTorch's own, and the peak that the program counts is not reset."""
    from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer
    from deep500_timing_torch.memory import MemoryTimer

    torch.cuda.reset_peak_memory_stats()
    tmr = MemoryTimer()
    with tmr.region("x", gpu=True):
        held = torch.empty(2**20, device="cuda")
        torch.empty(2**24, device="cuda")
    peak = torch.cuda.max_memory_allocated()
    seen = tmr.snapshot().get("x").memory.last
    assert seen.device == "cuda:0"
    assert seen.device_allocated_bytes == torch.cuda.memory_allocated() >= held.nbytes
    assert seen.device_peak_allocated_bytes == peak == torch.cuda.max_memory_allocated()
    assert seen.device_reserved_bytes == torch.cuda.memory_reserved()
    assert " | mem_allocated: " in SynchronizedWallClockTimer.memory_usage()


@pytest.mark.skipif(FAKES is not None, reason="in the rehearsal a product takes 50 µs, whatever its size")
def test_a_matrix_product_is_not_above_the_peak():
    """If the table knows this GPU, bfloat16 products reach a plausible share of its peak."""
    from deep500_timing.flops import utilization
    from deep500_timing_deepspeed.wallclock import ThroughputTimer
    from deep500_timing_torch.flop_counter import count_flops, device_peak_flops

    peak = device_peak_flops(dtype=torch.bfloat16)
    if peak is None:
        pytest.skip(f"the table does not know {torch.cuda.get_device_name()}")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    model = count_flops(lambda: a @ a)
    assert model.flops == 2 * 8192**3
    rate = ThroughputTimer(1, start_step=5)
    for _ in range(30):
        rate.start()
        a @ a
        rate.stop(global_step=True)
    used = utilization(rate.average(), model, peak)
    print(used)
    assert 0.3 < used.ratio < 1.0
