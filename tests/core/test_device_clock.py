"""The contract of device clocks, on the device that the package brings for tests."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from deep500_timing.testing import DeviceClockContract, ManualDeviceClock


class ManualRig:
    exact = True

    def __init__(self):
        self.clock = ManualDeviceClock()
        self.launch = self.clock.launch
        self.finish = self.clock.finish

    @contextmanager
    def side_stream(self):
        """Use another stream."""
        self.clock.use_stream("stream 1")
        yield
        self.clock.use_stream("stream 0")

    @contextmanager
    def capture(self):
        """Say that it is being captured."""
        self.clock.capturing = True
        yield
        self.clock.capturing = False


class TestManualDeviceClock(DeviceClockContract):
    @pytest.fixture
    def rig(self):
        """A device of its own for each test."""
        return ManualRig()


class Broken(ManualDeviceClock):
    """A clock with one fault, which the contract must find."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def stream(self):
        """A new one each time, if that is the fault."""
        return object() if self.fault == "stream" else super().stream()

    def is_done(self, event):
        """True, if that is the fault."""
        return True if self.fault == "is_done" else super().is_done(event)

    def elapsed_ns(self, start, end):
        """In microseconds, or too early, if that is the fault."""
        if self.fault == "elapsed_ns":
            return (end.recorded_ns - start.recorded_ns) // 1000
        if self.fault == "early" and end.recorded_ns > self.now_ns:
            return 0
        return super().elapsed_ns(start, end)

    def is_capturing(self):
        """False, if that is the fault."""
        return False if self.fault == "is_capturing" else super().is_capturing()


class TestContractFindsFaults:
    @pytest.mark.parametrize(
        ("fault", "test"),
        [
            ("stream", "test_the_same_stream_is_equal"),
            ("is_done", "test_recording_does_not_wait"),
            ("elapsed_ns", "test_elapsed_is_the_work_between"),
            ("early", "test_elapsed_before_the_end_is_an_error"),
            ("is_capturing", "test_says_when_it_is_captured"),
            ("elapsed_ns", "test_a_timer_over_it"),
        ],
    )
    def test_fails_where_the_clock_does(self, fault, test):
        """A clock with a fault fails the test of the contract that is about it."""
        rig = ManualRig()
        rig.clock = Broken(fault)
        rig.launch, rig.finish = rig.clock.launch, rig.clock.finish
        with pytest.raises(AssertionError):
            getattr(DeviceClockContract(), test)(rig)

    def test_passes_without_one(self):
        """The same clock without a fault passes all of it."""
        for name in vars(DeviceClockContract):
            if name.startswith("test_"):
                rig = ManualRig()
                rig.clock = Broken("none")
                rig.launch, rig.finish = rig.clock.launch, rig.clock.finish
                getattr(DeviceClockContract(), name)(rig)
