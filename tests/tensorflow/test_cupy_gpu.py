"""CuPy's clock on a real GPU, by the contract of device clocks, with a kernel that spins; ``make test-gpu``."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from deep500_timing.devices import DeviceClockContract
from deep500_timing_tensorflow import CupyEventClock

pytestmark = pytest.mark.gpu

SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
    long long began = clock64();
    while (clock64() - began < cycles) {}
}
"""


class CupyRig:
    """The current GPU, kept busy on CuPy's current stream."""

    exact = False

    def __init__(self, cupy):
        self.cupy = cupy
        self.clock = CupyEventClock(synchronize=lambda: None)
        self.kernel = cupy.RawKernel(SPIN, "spin")
        self.cycles_per_second = self.calibrate()

    def calibrate(self):
        """See how long a known number of cycles takes, by bare events."""
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        cycles = 100_000_000
        for _ in range(2):
            start.record()
            self.kernel((1,), (1,), (self.cupy.int64(cycles),))
            end.record()
            end.synchronize()
        return cycles / self.cupy.cuda.get_elapsed_time(start, end) * 1e3

    def launch(self, seconds):
        """Spin on the current stream."""
        self.kernel((1,), (1,), (self.cupy.int64(round(seconds * self.cycles_per_second)),))

    def finish(self):
        """Wait for the whole device."""
        self.cupy.cuda.Device().synchronize()

    def side_stream(self):
        """Use another stream."""
        return self.cupy.cuda.Stream(non_blocking=True)

    @contextmanager
    def capture(self):
        """Capture its own stream."""
        with self.cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                yield
            finally:
                stream.end_capture()


class TestOnCupy(DeviceClockContract):
    @pytest.fixture
    def rig(self):
        """CuPy, where it sees a GPU."""
        cupy = pytest.importorskip("cupy")
        try:
            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:
            pytest.skip(f"CuPy sees no GPU: {error}")
        return CupyRig(cupy)
