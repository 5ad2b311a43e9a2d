"""The contract of device clocks, as a suite of tests that an adapter's tests inherit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from deep500_timing._base.names import GPU
from deep500_timing._base.protocols import DeviceClock
from deep500_timing.timer import CPUGPUTimer

if TYPE_CHECKING:
    from contextlib import AbstractContextManager


class DeviceRig(Protocol):
    """A device under test, and how to give it work: what :class:`DeviceClockContract` needs from an adapter's tests."""

    clock: DeviceClock
    exact: bool
    """Whether times are exact to the nanosecond, as on a simulated device. On a real one they are at least as long."""

    def launch(self, seconds: float) -> None:
        """Queue work that takes the device that long, in the calling thread's current stream, without waiting."""
        ...

    def finish(self) -> None:
        """Come back when the device has done everything that is queued."""
        ...

    def side_stream(self) -> AbstractContextManager[object]:
        """A block in which another stream is current; ``unittest.SkipTest`` where there is only one."""
        ...

    def capture(self) -> AbstractContextManager[object]:
        """A block in which the current stream is captured; ``unittest.SkipTest`` where there are no graphs."""
        ...


class DeviceClockContract:
    """What every :class:`~deep500_timing.DeviceClock` must do, as tests.

    Under pytest, an adapter's tests subclass it with a fixture ``rig`` that returns a :class:`DeviceRig`::

        class TestMyClock(DeviceClockContract):
            @pytest.fixture
            def rig(self):
                return MyRig()
    """

    # Long enough that a real device is not done by the time that it is asked, short enough for a test.
    work_seconds = 0.05

    def test_is_a_device_clock(self, rig: DeviceRig) -> None:
        """It has every method, and the name of a device."""
        assert isinstance(rig.clock, DeviceClock)
        assert rig.clock.name
        assert isinstance(rig.clock.name, str)

    def test_the_same_stream_is_equal(self, rig: DeviceRig) -> None:
        """The current stream, asked for twice, compares equal and hashes alike."""
        first, second = rig.clock.stream(), rig.clock.stream()
        assert first == second
        assert hash(first) == hash(second)

    def test_another_stream_is_not(self, rig: DeviceRig) -> None:
        """Another current stream differs from the first, which is current again afterwards."""
        before = rig.clock.stream()
        with rig.side_stream():
            assert rig.clock.stream() != before
        assert rig.clock.stream() == before

    def test_recording_does_not_wait(self, rig: DeviceRig) -> None:
        """An event behind work is not done while the device works."""
        rig.launch(self.work_seconds)
        assert not rig.clock.is_done(self._recorded(rig))
        rig.finish()

    def test_done_when_the_device_is(self, rig: DeviceRig) -> None:
        """Every event is done when the device has finished the queued work."""
        before = self._recorded(rig)
        rig.launch(self.work_seconds)
        after = self._recorded(rig)
        rig.finish()
        assert rig.clock.is_done(before)
        assert rig.clock.is_done(after)

    def test_waiting_for_an_event(self, rig: DeviceRig) -> None:
        """An event that was waited for is done."""
        rig.launch(self.work_seconds)
        event = self._recorded(rig)
        rig.clock.wait(event)
        assert rig.clock.is_done(event)

    def test_elapsed_is_the_work_between(self, rig: DeviceRig) -> None:
        """The time between two events is that of the work between them, and of no other."""
        rig.launch(3 * self.work_seconds)
        start = self._recorded(rig)
        rig.launch(self.work_seconds)
        end = self._recorded(rig)
        rig.launch(3 * self.work_seconds)
        rig.finish()
        self._check(rig, rig.clock.elapsed_ns(start, end))

    def test_elapsed_before_the_end_is_an_error(self, rig: DeviceRig) -> None:
        """A time that is not known yet is an error and no number."""
        start = self._recorded(rig)
        rig.launch(self.work_seconds)
        end = self._recorded(rig)
        try:
            elapsed = rig.clock.elapsed_ns(start, end)
        except Exception:
            rig.finish()
        else:
            raise AssertionError(f"elapsed_ns of an event that is not done gave {elapsed} instead of an error")

    def test_events_serve_again(self, rig: DeviceRig) -> None:
        """Events that are recorded again tell the new time."""
        start, end = self._recorded(rig), self._recorded(rig)
        rig.finish()
        stream = rig.clock.stream()
        rig.clock.record(start, stream)
        rig.launch(self.work_seconds)
        rig.clock.record(end, stream)
        assert not rig.clock.is_done(end)
        rig.finish()
        self._check(rig, rig.clock.elapsed_ns(start, end))

    def test_says_when_it_is_captured(self, rig: DeviceRig) -> None:
        """It knows a stream that is being captured from one that is not."""
        rig.clock.stream()
        assert not rig.clock.is_capturing()
        with rig.capture():
            assert rig.clock.is_capturing()
        assert not rig.clock.is_capturing()

    def test_a_timer_over_it(self, rig: DeviceRig) -> None:
        """A timer returns the times of many regions without waiting in between."""
        timer = CPUGPUTimer(device_clock=rig.clock)
        rounds = 50
        for _ in range(rounds):
            with timer.region("work", gpu=True):
                rig.launch(self.work_seconds / rounds)
        rig.finish()
        times = timer.get_time("work", gpu=True)
        assert len(times) == rounds
        self._check(rig, round(sum(times) * 1e9))

    def test_a_timer_during_a_capture(self, rig: DeviceRig) -> None:
        """A region that is captured has no time and is counted; the next has one again."""
        timer = CPUGPUTimer(device_clock=rig.clock)
        with rig.capture(), timer.region("work", gpu=True):
            pass
        with timer.region("work", gpu=True):
            rig.launch(self.work_seconds)
        rig.finish()
        times = timer.snapshot().get("work", GPU)
        assert times is not None
        assert times.stats is not None
        assert (times.captured, times.stats.count) == (1, 1)

    def _recorded(self, rig: DeviceRig) -> object:
        stream = rig.clock.stream()
        event: object = rig.clock.new_event(stream)
        rig.clock.record(event, stream)
        return event

    def _check(self, rig: DeviceRig, elapsed_ns: int) -> None:
        expected_ns = self.work_seconds * 1e9
        if rig.exact:
            assert elapsed_ns == round(expected_ns)
        else:
            # A device may take its time, and the caller's spin may be a little short by the device's own clock.
            assert 0.9 * expected_ns <= elapsed_ns <= 2.5 * expected_ns
