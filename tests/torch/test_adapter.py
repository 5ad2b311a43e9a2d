"""The adapter's public face, the devices that it finds, and copies of its timers."""

from __future__ import annotations

import copy
import pickle
import warnings
from importlib.metadata import entry_points

import pytest

pytest.importorskip("torch")

import torch

import deep500_timing
import deep500_timing_torch as timer

BATCH = timer.TimeType.BATCH


class TestPublicFace:
    def test_names(self):
        """It has every public name of the core, and its own, sorted."""
        own = {"CudaEventClock", "CudaEventTimer"}
        assert sorted({*deep500_timing.__all__, *own}) == sorted(timer.__all__)
        assert [name for name in timer.__all__ if not hasattr(timer, name)] == []
        assert len(set(timer.__all__)) == len(timer.__all__)

    def test_same_objects(self):
        """Shared names are the core's, but for the timers that find the device."""
        other = [name for name in deep500_timing.__all__ if getattr(timer, name) is not getattr(deep500_timing, name)]
        assert ["CPUGPUTimer", "global_timer"] == other
        assert issubclass(timer.CPUGPUTimer, deep500_timing.CPUGPUTimer)

    def test_entry_point(self, dev):
        """The clock is found under its entry point, and is a device clock."""
        (found,) = [entry for entry in entry_points(group="deep500_timing.clocks") if entry.name == "torch"]
        clock = found.load()()
        assert isinstance(clock, timer.CudaEventClock)
        assert isinstance(clock, timer.DeviceClock)

    @pytest.mark.parametrize(
        ("missing", "said"),
        [
            (
                "torch",
                "MissingPackageError import deep500_timing_torch requires torch; pip install 'deep500-timing[torch]'",
            ),
            ("typing_extensions", "ModuleNotFoundError No module named 'typing_extensions'"),
        ],
    )
    def test_without_torch(self, missing, said, run_alone):
        """The import says what to install. A torch that is there and does not import is not called missing."""
        program = f"""
import sys
class Without:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named '{missing}'", name="{missing}")
sys.meta_path.insert(0, Without())
try:
    import deep500_timing_torch
except ImportError as error:
    print(type(error).__name__, error)
"""
        assert said == run_alone(program).stdout.strip()


class TestNoAccelerator:
    def test_times_the_cpu(self, run_forked):
        """CPUGPUTimer times the CPU, says once that there are no GPU times, and gives an empty list for them."""
        program = """
import warnings
import deep500_timing_torch as timer
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tmr, other = timer.CPUGPUTimer(), timer.CPUGPUTimer()
    with tmr.region("quiet"):
        pass
    print(len(caught))
    for each in (tmr, other):
        for _ in range(3):
            each.start(timer.TimeType.BATCH, gpu=True)
            each.end(timer.TimeType.BATCH, gpu=True)
    print(len(caught), caught[0].category.__name__, caught[0].message)
print(len(tmr.get_time(timer.TimeType.BATCH)), tmr.get_time(timer.TimeType.BATCH, gpu=True))
print([(region.name, region.device) for region in tmr.snapshot()])
tmr.complete_all()
"""
        said = run_forked(program).splitlines()
        assert "0" == said[0]
        assert said[1].startswith("1 TimingWarning Timing a region with gpu=True: PyTorch")
        assert "sees no accelerator, so GPU times will be empty" in said[1]
        assert "3 []" == said[2]
        assert "[('BATCH', 'CPU'), ('quiet', 'CPU')]" == said[3]

    def test_device_by_name(self, run_forked):
        """Asking for CUDA is an error that names the request, the present devices and the remedy."""
        program = """
import deep500_timing_torch as timer
for make in (lambda: timer.CPUGPUTimer(device="cuda"), timer.CudaEventClock):
    try:
        make()
    except timer.DeviceUnavailableError as error:
        print(error)
"""
        by_name, any_device = run_forked(program).splitlines()
        assert by_name.startswith("Timing on the device 'cuda': this PyTorch (")
        assert "it is not built for 'cuda'. Leave `device` out" in by_name
        assert any_device.startswith("Timing on an accelerator: this PyTorch (")

    @pytest.mark.parametrize("available", [True, False])
    def test_not_available(self, dev, available):
        """A backend without an available device counts as none."""
        dev.set_available(available)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tmr = timer.CPUGPUTimer()
            with tmr.region(BATCH, gpu=True):
                pass
        assert (0 if available else 1) == len(caught)
        assert (2 if available else 0) == dev.counters().records

    def test_checkpoint_from_a_gpu_machine(self, run_forked, dev):
        """A timer that was made for a device loads where there is none, with one warning, and times the CPU."""
        stored = pickle.dumps(timer.CPUGPUTimer("testdev", skip_first=2))
        program = f"""
import pickle, warnings
import deep500_timing_torch as timer
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    tmr = pickle.loads({stored!r})
print(tmr.skip_first, [str(w.message)[:57] for w in caught])
with tmr.region("own"):
    pass
print(len(tmr.get_time("own")))
"""
        said = run_forked(program).splitlines()
        assert ["2 ['Loading a timer: GPU times will be empty, CPU times go on']", "1"] == said


@pytest.mark.torch_device
class TestDevices:
    def test_finds_the_accelerator(self, dev):
        """None and the accelerator's own type, as text or torch.device, give its one clock."""
        clock = timer.CudaEventClock()
        assert "testdev" == clock.name
        assert clock is timer.CudaEventClock("testdev")
        assert clock is timer.CudaEventClock(torch.device("testdev"))
        assert clock is not timer.CudaEventClock("testdev:1")
        assert timer.CudaEventClock("testdev:1") is timer.CudaEventClock("testdev:1")

    @pytest.mark.parametrize(
        ("device", "text"),
        [
            ("xpu", "'xpu': this PyTorch .* the accelerator that it can use is 'testdev'"),
            ("testdev:2", "there are 2 of that type here, numbered from 0"),
            ("gpu", "'gpu': PyTorch knows no such device"),
        ],
    )
    def test_other_devices(self, dev, device, text):
        """A device that is not there is an error that says the present ones."""
        with pytest.raises(timer.DeviceUnavailableError, match=text):
            timer.CPUGPUTimer(device).start(BATCH, gpu=True)

    def test_a_device_that_is_not_there_leaves_the_region_closed(self, dev, monkeypatch):
        """A device that the first gpu=True did not find leaves nothing open: the region is timed on the CPU as ever."""
        monkeypatch.setattr(dev, "is_initialized", lambda: False, raising=False)
        tmr = timer.CPUGPUTimer("testdev:2")
        for _ in range(2):
            with pytest.raises(timer.DeviceUnavailableError, match="there are 2 of that type"):
                tmr.start(BATCH, gpu=True)
        tmr.start(BATCH)
        tmr.end(BATCH)
        assert 1 == len(tmr.get_time(BATCH))

    def test_a_device_that_is_started_is_checked_at_once(self, dev, monkeypatch):
        """Where PyTorch has started the device already, asking costs nothing, and the constructor tells."""
        monkeypatch.setattr(dev, "is_initialized", lambda: True, raising=False)
        with pytest.raises(timer.DeviceUnavailableError, match="there are 2 of that type"):
            timer.CPUGPUTimer("testdev:2")

    def test_cpu_by_name(self, dev):
        """A timer for the CPU leaves the accelerator alone."""
        tmr = timer.CPUGPUTimer(torch.device("cpu"))
        with pytest.warns(timer.TimingWarning, match="made for the CPU"), tmr.region(BATCH, gpu=True):
            pass
        assert [] == tmr.get_time(BATCH, gpu=True)
        assert 0 == sum(dev.counters())

    def test_constructing_starts_no_device(self, dev, monkeypatch):
        """Neither a timer nor its clock touches the device before the first region on it."""
        monkeypatch.setattr("deep500_timing_torch._clock._clocks", {})
        tmr = timer.CPUGPUTimer()
        with tmr.region(BATCH):
            pass
        tmr.snapshot()
        assert 0 == sum(dev.counters())

    def test_a_clock_of_your_own(self, dev):
        """A device clock that is passed is the one that is used."""
        from deep500_timing.testing import ManualDeviceClock

        clock = ManualDeviceClock()
        tmr = timer.CPUGPUTimer(device_clock=clock)
        with tmr.region(BATCH, gpu=True):
            clock.launch(0.25)
        clock.finish()
        assert [0.25] == tmr.get_time(BATCH, gpu=True)
        assert 0 == sum(dev.counters())


@pytest.mark.torch_device
class TestOtherBackends:
    """The clock where PyTorch, or a backend, offers less."""

    @pytest.fixture(autouse=True)
    def _new_clocks(self, dev, monkeypatch):
        """Clocks that look at the device again."""
        monkeypatch.setattr("deep500_timing_torch._clock._clocks", {})

    def check(self, dev, device=None):
        """Time a region on each device and one that is captured; return how many were."""
        tmr = timer.CPUGPUTimer(device)
        with tmr.region(BATCH, gpu=True):
            dev.launch(2_000_000)
        dev.set_capturing(True)
        with tmr.region(BATCH, gpu=True):
            pass
        dev.set_capturing(False)
        with torch.accelerator.device_index(1), tmr.region("other", gpu=True):
            dev.launch(3_000_000)
        dev.drain()
        assert [0.002 if device is None else 0.0] == tmr.get_time(BATCH, gpu=True)
        assert [0.003] == tmr.get_time("other", gpu=True)
        return tmr.snapshot().get(BATCH, "GPU").captured

    def test_capture_asked_of_the_stream(self, dev, monkeypatch):
        """A backend with a module that says nothing of captures is asked by its stream."""
        monkeypatch.delattr(dev, "is_current_stream_capturing")
        assert 1 == self.check(dev)

    def test_streams_that_cannot_say(self, dev, monkeypatch):
        """Where streams cannot say (PyTorch before 2.12) the module is asked for the current device."""
        dev.set_streams_tell_captures(False)
        assert 1 == self.check(dev)

    def test_streams_of_another_device_that_cannot_say(self, dev):
        """For another device than the current one, captures are seen as they begin."""
        dev.set_streams_tell_captures(False)
        tmr = timer.CPUGPUTimer("testdev:1")
        with tmr.region(BATCH, gpu=True):
            pass
        graph = dev.TestGraph()
        graph.capture_begin(torch.Stream("testdev:1"))
        with tmr.region(BATCH, gpu=True):
            pass
        graph.capture_end()
        assert ([0.0], 1) == (tmr.get_time(BATCH, gpu=True), tmr.snapshot().get(BATCH, "GPU").captured)

    def test_a_capture_that_nobody_told_of(self, dev):
        """A pair that was recorded in one cannot be read: those before it are, and it stays pending for a while."""
        dev.set_streams_tell_captures(False)
        tmr = timer.CPUGPUTimer("testdev:1")
        with tmr.region(BATCH, gpu=True):
            pass
        dev.set_capturing(True)
        with tmr.region(BATCH, gpu=True):
            pass
        dev.set_capturing(False)
        with pytest.warns(timer.TimingWarning):
            assert [0.0] == tmr.get_time(BATCH, gpu=True)
            assert (1, 0) == (tmr.snapshot().get(BATCH, "GPU").pending, tmr.snapshot().get(BATCH, "GPU").failed)
            for _ in range(20):
                tmr.snapshot()
        assert (0, 1) == (tmr.snapshot().get(BATCH, "GPU").pending, tmr.snapshot().get(BATCH, "GPU").failed)

    def test_a_backend_without_captures(self, dev, monkeypatch):
        """A backend that knows no captures is never captured."""
        self.blind(monkeypatch)
        monkeypatch.delattr(dev, "is_current_stream_capturing")
        tmr = timer.CPUGPUTimer()
        with tmr.region(BATCH, gpu=True):
            dev.launch(2_000_000)
        dev.drain()
        assert [0.002] == tmr.get_time(BATCH, gpu=True)

    def blind(self, monkeypatch):
        """Let the clock see streams that cannot say whether they are captured."""
        from deep500_timing_torch import _clock

        real = _clock._capture_function

        def without(stream):
            class Stream:
                def is_capturing(self):
                    raise NotImplementedError

            return real(Stream)

        monkeypatch.setattr(_clock, "_capture_function", without)


@pytest.mark.torch_device
class TestCopies:
    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda clock: pickle.loads(pickle.dumps(clock))])
    @pytest.mark.parametrize("device", [None, "testdev:1"])
    def test_clock_is_copied_by_reference(self, dev, make, device):
        """Every copy of a clock is the one clock of that device."""
        clock = timer.CudaEventClock(device)
        assert clock is make(clock)

    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda tmr: pickle.loads(pickle.dumps(tmr))])
    @pytest.mark.parametrize("device", [None, "testdev", "testdev:1", "cpu"])
    def test_timer_is_copied_with_its_settings(self, dev, make, device):
        """A copy has the settings, the same device and no times, and works."""
        tmr = timer.CPUGPUTimer(device, keep_last=7, skip_first=1, enabled=True)
        with tmr.region(BATCH):
            pass
        made = make(tmr)
        assert type(tmr) is type(made)
        assert tmr._settings() == made._settings()
        assert [] == made.get_time(BATCH)
        if device != "cpu":
            for each in (tmr, made):
                with each.region("on both", gpu=True):
                    pass
            assert tmr.device is made.device
            assert 4 == dev.counters().records

    def test_in_a_checkpoint(self, dev, tmp_path):
        """A module that holds a timer goes through torch.save and torch.load."""

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(2, 2)
                self.tmr = timer.CPUGPUTimer()

        net = copy.deepcopy(Net())
        torch.save(pickle.dumps(net.tmr), tmp_path / "timer.pt")
        torch.save(net.state_dict(), tmp_path / "net.pt")
        loaded = pickle.loads(torch.load(tmp_path / "timer.pt", weights_only=False))
        assert net.tmr._settings() == loaded._settings()

    def test_device_clock_of_your_own_stays(self, dev):
        """A copy keeps a device clock that was passed."""
        from deep500_timing.testing import ManualDeviceClock

        clock = ManualDeviceClock()
        assert clock is copy.copy(timer.CPUGPUTimer(device_clock=clock)).device.clock
