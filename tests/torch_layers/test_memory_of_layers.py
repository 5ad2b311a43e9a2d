"""What layers do to the device's memory is read without changing anything, and a leak is named."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from deep500_timing.memory import MemoryUsage  # noqa: E402
from deep500_timing_torch.layers import LayerTimer  # noqa: E402

MIB = 1024**2


class Device:
    """A device's accounting that moves only when a layer moves it."""

    def __init__(self):
        self.allocated = 100 * MIB
        self.peak = 100 * MIB

    def take(self, size):
        """Occupy so many bytes, or give them back."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def read(self):
        """The accounting's sentences."""
        return MemoryUsage(
            device="fake:0",
            device_allocated_bytes=self.allocated,
            device_peak_allocated_bytes=self.peak,
            device_reserved_bytes=self.allocated + 50 * MIB,
            device_peak_reserved_bytes=self.peak + 50 * MIB,
        )


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, device, kept, within, leak):
        ctx.device, ctx.kept = device, kept
        device.take(within)
        device.take(kept + leak - within)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.take(-ctx.kept)
        return gradient, None, None, None, None


class Keeps(nn.Module):
    """Keeps memory for its backward pass, needs more within, and may leak."""

    def __init__(self, device, kept, within=0, leak=0):
        super().__init__()
        self.arguments = device, kept * MIB, within * MIB, leak * MIB

    def forward(self, value):
        """Move the device's accounting."""
        return _Keep.apply(value, *self.arguments)


@pytest.fixture
def gpu_memory():
    """The accounting of a device."""
    return Device()


def train(model, tmr, memory, steps):
    """The times of a model after some steps."""
    layers = LayerTimer(model, tmr, memory=memory)
    with layers:
        for _ in range(steps):
            model(torch.ones(2, requires_grad=True) * 1).sum().backward()
    return layers


def test_each_layer_has_what_it_keeps_and_its_peak(gpu_memory, tmr):
    """The memory that a forward pass leaves occupied, and the peak where the layer raised the device's own."""
    model = nn.Sequential(Keeps(gpu_memory, kept=2, within=7), Keeps(gpu_memory, kept=1, within=2))
    times = train(model, tmr, gpu_memory, steps=3).times()
    memory = [layer.memory for layer in times.layers]
    assert [3 * MIB, 2 * MIB, 1 * MIB] == [one.kept_bytes for one in memory]
    assert [107 * MIB, 107 * MIB, None] == [one.peak_within_bytes for one in memory]
    assert (100 * MIB, 102 * MIB, 152 * MIB) == (
        memory[1].allocated_before_bytes,
        memory[1].allocated_after_bytes,
        memory[1].reserved_after_bytes,
    )
    assert ([0, 0, 0], None) == ([one.unreturned_bytes for one in memory], times.leak)


def test_a_leak_is_named_with_its_size(gpu_memory, tmr):
    """The layer that does not give back its memory is the leak, not the block around it."""
    inner = nn.Sequential(Keeps(gpu_memory, kept=2), Keeps(gpu_memory, kept=1, leak=1))
    layers = train(nn.Sequential(inner, Keeps(gpu_memory, kept=4)), tmr, gpu_memory, steps=12)
    times = layers.times()
    assert ("0.1", MIB, True) == (times.leak.path, times.growth.bytes_per_step, times.growth.is_significant)
    assert "Memory grows by 1.00 MiB a step [1.00 MiB, 1.00 MiB] over 11 steps, most of it in 0.1." in layers.table()


def test_gradients_that_are_made_anew_are_no_leak(gpu_memory, tmr):
    """Gradients that each step makes and its optimizer frees are not taken for memory that is not given back."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda made: gpu_memory.take(4 * made.numel()))
    layers = LayerTimer(model, tmr, memory=gpu_memory)
    with layers:
        for _ in range(8):
            model(torch.ones(2, requires_grad=True) * 1).sum().backward()
            model.zero_grad(set_to_none=True)
            gpu_memory.take(-24)
    times = layers.times()
    assert (0, 0, None) == (times.growth.bytes_per_step, times.get("0.0").memory.unreturned_bytes, times.leak)


def test_reading_the_memory_is_no_part_of_a_layer_s_time(gpu_memory, tmr, clock, ms):
    """A reader that takes its time lengthens no layer of which it is read."""

    class Slow:
        def read(self):
            clock.advance(1)
            return gpu_memory.read()

    model = nn.Sequential(Keeps(gpu_memory, kept=1))
    train(model, tmr, Slow(), steps=1)
    assert ([0], [0]) == (ms("0 forward"), ms("0 backward"))


def test_a_cpu_has_no_device_memory_to_report(tmr):
    """Without a device every number is None: the host's memory is not passed off as it."""
    times = train(nn.Sequential(nn.Linear(2, 2)), tmr, True, steps=6).times()
    memory = times.get("0").memory
    assert (6, None, None, None, None) == (
        memory.samples,
        memory.allocated_before_bytes,
        memory.kept_bytes,
        memory.peak_within_bytes,
        memory.unreturned_bytes,
    )
    assert (None, None) == (times.growth, times.leak)


def test_out_of_memory_names_the_layer(gpu_memory, tmr):
    """The innermost layer in which the device ran out of memory stands in the report, and the error goes on."""

    class Full(nn.Module):
        def forward(self, value):
            raise torch.OutOfMemoryError("no room")

    layers = LayerTimer(nn.Sequential(nn.Sequential(nn.Identity(), Full())), tmr, memory=gpu_memory)
    with layers, pytest.raises(torch.OutOfMemoryError):
        nn.Module.__call__(layers.layers[0].module, torch.ones(2))
    assert "0.1" == layers.times().out_of_memory
    assert "The device ran out of memory in 0.1.\n" in layers.table()
