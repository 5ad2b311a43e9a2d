"""The contract of device clocks, over PyTorch's events: on the test device, and on a real GPU where there is one."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import SkipTest

import pytest

pytest.importorskip("torch")

import torch

import deep500_timing_torch as timer
from deep500_timing.testing import DeviceClockContract


class SimulatedRig:
    """The test device."""

    exact = True

    def __init__(self, dev, device):
        self.dev = dev
        self.device = device
        self.clock = timer.CudaEventClock(device)

    def launch(self, seconds):
        """Queue work on the device of the clock."""
        self.dev.launch(round(seconds * 1e9), self.clock.stream())

    def finish(self):
        """Move the clock on."""
        self.dev.drain()

    @contextmanager
    def side_stream(self):
        """Use another stream of the device of the clock, which stays the current device or stays not."""
        before = self.clock.stream()
        torch.accelerator.set_stream(torch.Stream(before.device))
        torch.accelerator.set_device_index(0)
        yield
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(0)

    @contextmanager
    def capture(self):
        """Capture the stream that the clock is on."""
        stream = self.clock.stream()
        self.dev.set_capturing(True, stream)
        yield
        self.dev.set_capturing(False, stream)


class NumbersRig(SimulatedRig):
    """The test device by a clock with streams that are three numbers, as on CUDA."""

    def __init__(self, dev):
        super().__init__(dev, None)
        self.clock = object.__new__(timer.CudaEventClock)
        self.clock._set_up(torch.device("testdev"))
        self.clock.stream()
        of_device = {name: getattr(self.clock, name) for name in ("stream", "handle_of", "device_of")}

        def stream():
            found = of_device["stream"]()
            return found.stream_id, found.device_index, found.device_type

        def handle_of(numbers):
            stream_id, device_index, device_type = numbers
            return torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)

        vars(self.clock).update(stream=stream, handle_of=handle_of, device_of=lambda numbers: numbers[1])
        self._current = of_device["stream"]

    def launch(self, seconds):
        """Queue work on the current stream."""
        self.dev.launch(round(seconds * 1e9), self._current())

    @contextmanager
    def side_stream(self):
        """Use another stream."""
        before = self._current()
        torch.accelerator.set_stream(torch.Stream(before.device))
        yield
        torch.accelerator.set_stream(before)

    @contextmanager
    def capture(self):
        """Capture the current stream."""
        stream = self._current()
        self.dev.set_capturing(True, stream)
        yield
        self.dev.set_capturing(False, stream)


class CudaRig:
    """A real GPU, kept busy by a kernel that spins for a number of its cycles."""

    exact = False

    def __init__(self):
        self.clock = timer.CudaEventClock("cuda")
        self.cycles_per_second = self.calibrate()

    def calibrate(self):
        """Spin for a known number of cycles and see how long it takes, by PyTorch's own events."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cycles = 100_000_000
        for _ in range(2):  # The first time includes loading the kernel, and a clock that is still slow.
            start.record()
            torch.cuda._sleep(cycles)
            end.record()
            torch.cuda.synchronize()
        return cycles / start.elapsed_time(end) * 1e3

    def launch(self, seconds):
        """Spin on the current stream."""
        torch.cuda._sleep(round(seconds * self.cycles_per_second))

    def finish(self):
        """Wait for the whole device."""
        torch.cuda.synchronize()

    def side_stream(self):
        """Use another stream."""
        return torch.cuda.stream(torch.cuda.Stream())

    @contextmanager
    def capture(self):
        """Capture a graph that holds one small kernel."""
        try:
            graph = torch.cuda.CUDAGraph()
        except RuntimeError as error:
            raise SkipTest(f"no CUDA graphs here: {error}") from error
        data = torch.zeros(8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            data += 1
            yield
        torch.cuda.synchronize()


@pytest.mark.torch_device
@pytest.mark.parametrize("device", [None, "testdev:1"])
class TestOnTheTestDevice(DeviceClockContract):
    @pytest.fixture
    def rig(self, dev, device):
        """The test device, by the clock of whichever device is current or of one that is not."""
        return SimulatedRig(dev, device)


@pytest.mark.torch_device
class TestByNumbers(DeviceClockContract):
    @pytest.fixture
    def rig(self, dev):
        """The test device, with numbers for streams."""
        return NumbersRig(dev)


@pytest.mark.gpu
class TestOnCuda(DeviceClockContract):
    @pytest.fixture
    def rig(self):
        """The current CUDA device."""
        return CudaRig()
