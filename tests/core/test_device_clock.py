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
        """Its own device for each test."""
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
        """True, or never behind work, if that is the fault."""
        if self.fault == "is_done":
            return True
        done = super().is_done(event)
        return done and not (self.fault == "stuck" and event.recorded_ns)

    def wait(self, event):
        """Nothing, if that is the fault."""
        if self.fault != "wait":
            super().wait(event)

    def elapsed_ns(self, start, end):
        """In microseconds, too early or of other work, if that is the fault; or so many times too long."""
        if self.fault == "elapsed_ns":
            return (end.recorded_ns - start.recorded_ns) // 1000
        if self.fault == "early" and end.recorded_ns > self.now_ns:
            return 0
        elapsed_ns = super().elapsed_ns(start, end)
        if self.fault == "since the beginning":
            return end.recorded_ns
        if self.fault == "until now":
            return self.now_ns - start.recorded_ns
        return round(elapsed_ns * self.fault) if isinstance(self.fault, float) else elapsed_ns

    def is_capturing(self):
        """False, or only known once it was asked for its stream, if that is the fault."""
        if self.fault == "late" and not self.calls["stream"]:
            raise RuntimeError("nothing is loaded yet")
        return False if self.fault == "is_capturing" else super().is_capturing()


def rig_of(clock, *, exact=True):
    """A rig of that clock."""
    rig = ManualRig()
    rig.clock, rig.exact = clock, exact
    rig.launch, rig.finish = clock.launch, clock.finish
    return rig


def failing(make):
    """The tests of the contract that rigs made so do not pass."""
    found = set()
    for name in vars(DeviceClockContract):
        if name.startswith("test_"):
            try:
                getattr(DeviceClockContract(), name)(make())
            except AssertionError:
                found.add(name)
    return found


TIMES = {"test_elapsed_is_the_work_between", "test_events_serve_again", "test_a_timer_over_it"}


class TestContractFindsFaults:
    @pytest.mark.filterwarnings("ignore:Reading a time on the device 'manual' failed")
    @pytest.mark.parametrize(
        ("fault", "tests"),
        [
            ("none", set()),
            ("late", set()),
            (
                "stream",
                {
                    *TIMES,
                    "test_the_same_stream_is_equal",
                    "test_another_stream_is_not",
                    "test_recording_does_not_wait",
                    "test_elapsed_before_the_end_is_an_error",
                },
            ),
            ("is_done", {"test_recording_does_not_wait", "test_events_serve_again", "test_a_timer_over_it"}),
            (
                "stuck",
                {
                    "test_done_when_the_device_is",
                    "test_waiting_for_an_event",
                    "test_a_timer_over_it",
                    "test_a_timer_during_a_capture",
                },
            ),
            ("wait", {"test_waiting_for_an_event"}),
            ("elapsed_ns", {*TIMES, "test_elapsed_before_the_end_is_an_error"}),
            ("early", {"test_elapsed_before_the_end_is_an_error"}),
            ("since the beginning", {"test_elapsed_is_the_work_between", "test_a_timer_over_it"}),
            ("until now", {"test_elapsed_is_the_work_between", "test_a_timer_over_it"}),
            ("is_capturing", {"test_says_when_it_is_captured", "test_a_timer_during_a_capture"}),
            (1.05, TIMES),
        ],
    )
    def test_fails_where_the_clock_does(self, fault, tests):
        """A clock with a fault fails the tests of the contract that are about it, and no other."""
        assert tests == failing(lambda: rig_of(Broken(fault)))

    @pytest.mark.parametrize(
        ("times", "tests"), [(0.899, TIMES), (0.9, set()), (1.05, set()), (2.5, set()), (2.501, TIMES)]
    )
    def test_a_real_device_may_take_its_time(self, times, tests):
        """Where a rig is not exact, a time may be a tenth short and two and a half times as long."""
        assert tests == failing(lambda: rig_of(Broken(times), exact=False))

    def test_it_leaves_the_device_idle(self):
        """A test's queued work is done at its end, so that the next one begins on an idle device."""
        busy = []
        for name in vars(DeviceClockContract):
            if name.startswith("test_"):
                rig = rig_of(ManualDeviceClock())
                getattr(DeviceClockContract(), name)(rig)
                before = rig.clock.now_ns
                rig.finish()
                if rig.clock.now_ns > before:
                    busy.append(name)
        assert [] == busy
