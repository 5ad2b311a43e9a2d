"""GPU times through CuPy, with a CuPy with a simulated device: no such device is on the machines that run this."""

from __future__ import annotations

import pickle
import sys
import types
import warnings

import pytest

import deep500_timing_tensorflow as timer
from deep500_timing._base.warn import forget_warnings
from deep500_timing.testing import ManualDeviceClock
from deep500_timing.wallclock import SynchronizedWallClockTimer
from deep500_timing_tensorflow import _clock


class CudaError(RuntimeError):
    """What CuPy raises, with CUDA's number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class FakeStream:
    """One stream; what CuPy returns as the current one."""

    ptr = 0

    def __init__(self, device: FakeCupy) -> None:
        self._device = device

    def is_capturing(self) -> bool:
        """Whether a test said so."""
        return self._device.clock.capturing


class FakeCupy(types.ModuleType):
    """The parts of CuPy that the adapter uses, on a device with a time that moves on request."""

    def __init__(self) -> None:
        super().__init__("cupy")
        clock = self.clock = ManualDeviceClock("cuda")
        self.devices = 1
        self.fault: int | None = None
        cupy = self

        class Event:
            def __init__(self) -> None:
                self.real = clock.new_event(None)

            def record(self, stream: FakeStream) -> None:
                assert isinstance(stream, FakeStream)
                clock.record(self.real, "stream 0")

            @property
            def done(self) -> bool:
                return clock.is_done(self.real)

            def synchronize(self) -> None:
                clock.wait(self.real)

        def get_device_count() -> int:
            if cupy.fault is not None:
                raise CudaError(cupy.fault)
            return cupy.devices

        stream = FakeStream(self)
        self.cuda = types.SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: stream,
            get_elapsed_time=lambda start, end: clock.elapsed_ns(start.real, end.real) / 1e6,
            runtime=types.SimpleNamespace(getDevice=lambda: 0, getDeviceCount=get_device_count),
        )


class FakeTensorFlow(types.ModuleType):
    """A TensorFlow with that many GPUs, with work that ends when it is waited for."""

    def __init__(self, cupy: FakeCupy, gpus: int = 1) -> None:
        super().__init__("tensorflow")
        self.synchronized = []
        self.eager = True
        self.placed = []
        tf = self

        class Device:
            def __init__(self, name: str) -> None:
                self.name = name

            def __enter__(self) -> None:
                tf.placed.append(self.name)

            def __exit__(self, *error: object) -> None:
                tf.placed.pop()

        def sync_device() -> None:
            tf.synchronized.append(tf.placed[-1])
            cupy.clock.finish()

        self.device = Device
        self.raw_ops = types.SimpleNamespace(SyncDevice=sync_device)
        self.executing_eagerly = lambda: tf.eager
        names = [types.SimpleNamespace(name=f"/device:GPU:{number}") for number in range(gpus)]
        self.config = types.SimpleNamespace(list_logical_devices=lambda kind: names if kind == "GPU" else [])


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """A simulated CuPy, in a process without TensorFlow in which nothing was said yet."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    monkeypatch.setattr(_clock, "_clocks", [])
    forget_warnings()
    return fake


def _message(**settings: object) -> str:
    tmr = timer.CPUGPUTimer(**settings)
    with pytest.warns(timer.TimingWarning) as said, tmr.region("work", gpu=True):
        pass
    assert [] == tmr.get_time("work", gpu=True)
    assert 1 == len(tmr.get_time("work"))
    (warning,) = said
    return str(warning.message)


def test_region_is_timed_between_two_events(cupy):
    """The device's time is the work between start and end, for any work of the host."""
    tmr = timer.CPUGPUTimer()
    with tmr.region("work", gpu=True):
        cupy.clock.launch(0.25)
    assert [0.25] == tmr.get_time("work", gpu=True)


def test_timers_share_one_clock_and_its_events(cupy):
    """The events of all timers of the process come from one pool."""
    first, second = timer.CPUGPUTimer(), timer.CPUGPUTimer()
    for tmr in (first, second):
        with tmr.region("work", gpu=True):
            pass
    assert first.device is second.device


def test_cpu_times_ask_nothing_of_cupy(monkeypatch):
    """A timer that is never asked for GPU times looks for no GPU, and says nothing of one."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    tmr = timer.CPUGPUTimer()
    with tmr.region("work"):
        pass
    assert (1, []) == (len(tmr.get_time("work")), tmr.get_time("work", gpu=True))


def test_the_clock_without_cupy_says_what_to_install(monkeypatch):
    """A ``CupyEventClock`` where there is no CuPy is a missing package with the remedy, as everywhere."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(timer.MissingPackageError, match=r"CupyEventClock requires cupy; pip install"):
        timer.CupyEventClock()


def test_captured_stream_is_counted_and_left_alone(cupy):
    """While CuPy captures a graph nothing is recorded, and that is counted."""
    tmr = timer.CPUGPUTimer()
    cupy.clock.capturing = True
    with tmr.region("work", gpu=True):
        pass
    cupy.clock.capturing = False
    assert 1 == tmr.snapshot().get("work", "GPU").captured


def test_each_event_waits_for_every_gpu_of_tensorflow(cupy, monkeypatch):
    """TensorFlow's own streams are waited for before the start and before the end."""
    tf = FakeTensorFlow(cupy, gpus=2)
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    tmr = timer.CPUGPUTimer()
    tmr.start("work", gpu=True)
    assert ["/device:GPU:0", "/device:GPU:1"] == tf.synchronized
    cupy.clock.launch(0.5)
    tmr.end("work", gpu=True)
    assert 4 == len(tf.synchronized)
    assert [0.5] == tmr.get_time("work", gpu=True)


def test_cpu_regions_never_wait_for_the_gpu(cupy, monkeypatch):
    """A region without ``gpu=True`` synchronizes nothing."""
    tf = FakeTensorFlow(cupy)
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    tmr = timer.CPUGPUTimer()
    with tmr.region("work"):
        pass
    assert [] == tf.synchronized


@pytest.mark.parametrize(
    ("gpus", "eager", "says"),
    [(0, True, "CuPy finds a GPU and TensorFlow does not"), (1, False, "inside a tf.function")],
)
def test_time_that_cannot_be_ordered_is_not_reported(cupy, monkeypatch, gpus, eager, says):
    """Where TensorFlow cannot be waited for there is no GPU time, which is counted, and said once."""
    tf = FakeTensorFlow(cupy, gpus)
    tf.eager = eager
    monkeypatch.setitem(sys.modules, "tensorflow", tf)
    tmr = timer.CPUGPUTimer()
    work = tmr.timed("work", gpu=True)(lambda: None)
    with pytest.warns(timer.TimingWarning, match=says) as said:
        _ = [work() for _ in range(3)]
    assert 1 == len(said)
    assert [] == tmr.get_time("work", gpu=True)
    assert 3 == tmr.snapshot().get("work", "GPU").failed
    assert 3 == len(tmr.get_time("work"))


def test_no_cupy_has_its_message(cupy, monkeypatch):
    """Without CuPy the message names the extra to install."""
    monkeypatch.delitem(sys.modules, "cupy")

    class Finder:
        def find_spec(self, name, *more):
            if name == "cupy":
                raise ModuleNotFoundError("No module named 'cupy'", name="cupy")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    assert "pip install 'deep500-timing[cupy]'" in _message()


def test_a_driver_that_is_absent_or_too_old_has_its_message(cupy):
    """CUDA reports an absent driver as one that is too old."""
    cupy.fault = 35
    assert "the NVIDIA driver is absent or too old for it" in _message()


@pytest.mark.parametrize("fault", [100, None])
def test_no_gpu_has_its_message(cupy, fault):
    """CUDA without a device is distinguished from CUDA without a driver, whichever way CUDA says it."""
    cupy.fault, cupy.devices = fault, 0
    assert "no GPU is visible" in _message()


def test_other_faults_are_passed_on(cupy):
    """Another error is shown as CUDA says it."""
    cupy.fault = 999
    assert "CUDA does not start: CUDA error 999" in _message()


def test_message_is_said_once(cupy):
    """A second timer says nothing again."""
    cupy.fault = 100
    _message()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tmr = timer.CPUGPUTimer()
        with tmr.region("work", gpu=True):
            pass
    assert (1, []) == (len(tmr.get_time("work")), tmr.get_time("work", gpu=True))


def test_insisting_on_a_gpu_that_is_not_there_is_an_error(cupy):
    """``device="cuda"`` raises with the reason and the remedy."""
    cupy.fault = 100
    with pytest.raises(timer.DeviceUnavailableError, match="CUDA_VISIBLE_DEVICES"):
        timer.CPUGPUTimer(device="cuda")


def test_unknown_device_is_an_error():
    """Devices of other names are refused."""
    with pytest.raises(ValueError, match="pass 'cuda'"):
        timer.CPUGPUTimer(device="tpu")


def test_broken_cupy_is_not_called_missing(cupy, monkeypatch):
    """A CuPy that fails to import is reported as it fails."""
    monkeypatch.delitem(sys.modules, "cupy")

    class Finder:
        def find_spec(self, name, *more):
            if name == "cupy":
                raise ImportError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(ImportError, match=r"libcuda\.so\.1"):
        _clock.CupyEventClock.why_unavailable()


def test_pickled_timer_finds_the_device_anew(cupy):
    """A timer that is pickled leaves its events behind."""
    tmr = pickle.loads(pickle.dumps(timer.CPUGPUTimer()))
    assert tmr.device.clock is None
    with tmr.region("work", gpu=True):
        pass
    assert "cuda" == tmr.device.clock.name


def test_asking_a_timer_for_its_device_looks_for_none(monkeypatch):
    """Neither reading ``device`` nor a named timer over it imports CuPy or warns: only ``gpu=True`` looks."""
    looked = []
    monkeypatch.setattr(_clock, "find_clock", lambda: looked.append(1) or "There is none.")
    tmr = timer.CPUGPUTimer()
    named = SynchronizedWallClockTimer(tmr)("forward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (None, True, 0) == (tmr.device.clock, tmr.device.is_null, tmr.device.events)
        named.start()
        named.stop()
        tmr.complete_all()
    assert [] == looked
    forget_warnings()
    with pytest.warns(timer.TimingWarning, match="There is none"), tmr.region("work", gpu=True):
        pass
    assert [1] == looked
