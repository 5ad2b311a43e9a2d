"""The parts of an adapter: the pool, the null device, a device that is looked for late, clocks by name."""

from __future__ import annotations

import copy
import importlib.metadata
import pickle
import sys
import warnings

import pytest

from deep500_timing import CPUGPUTimer, DeviceUnavailableError, Timer, TimingWarning, devices
from deep500_timing._base import plugins
from deep500_timing.devices import NULL_DEVICE, EventPair, EventPool, clocks, lazy_device, pool_of
from deep500_timing.devices._device import NullDevice
from deep500_timing.devices._lazy import device_of
from deep500_timing.exceptions import MissingPackageError
from deep500_timing.testing import ManualClock, ManualDeviceClock
from deep500_timing.wallclock import SynchronizedWallClockTimer


def test_names():
    """``__all__`` is sorted and each name is there; ``dir`` shows them."""
    assert sorted(devices.__all__, key=lambda name: (not name.isupper(), name)) == devices.__all__
    assert all(getattr(devices, name) is not None for name in devices.__all__)
    assert set(devices.__all__) <= set(dir(devices))
    with pytest.raises(AttributeError, match="no attribute 'Ledger'"):
        devices.Ledger  # noqa: B018


class TestNullDevice:
    def test_is_every_timers_without_one(self):
        """A timer without a device has the null device, which says so and counts nothing."""
        tmr = Timer()
        assert tmr.device is NULL_DEVICE
        for null in (tmr.device, NullDevice()):
            assert (True, False) == (null.is_null, null.is_lazy)
            assert (None, 0, 0) == (null.clock, null.events, null.uncertainty_ns)
            assert null is null.find() is null.find_for_regions()

    def test_is_what_a_timer_gets_that_is_given_none(self):
        """None is no device; a clock is its pool, for every timer the same."""
        device = ManualDeviceClock()
        pool = device_of(device)
        assert (NULL_DEVICE, pool_of(device)) == (device_of(None), pool)
        assert (False, False) == (pool.is_null, pool.is_lazy)

    def test_takes_whatever_a_pool_does(self):
        """It has every public method of a pool, and does nothing in each."""
        public = {name for name in dir(EventPool) if not name.startswith("_")} - {"abandon"}
        assert public <= set(dir(NULL_DEVICE))
        pair = EventPair("a")
        NULL_DEVICE.begin(pair)
        NULL_DEVICE.end(pair, None, 0, 0)
        NULL_DEVICE.drop(pair)
        NULL_DEVICE.collect(wait=True)
        NULL_DEVICE.collect_for(None)
        assert {} == NULL_DEVICE.pending()


class TestFindLate:
    def test_only_a_region_on_the_device_searches(self):
        """Making, reading, snapshots and host regions look for nothing; the first ``gpu=True`` looks, once."""
        device, looked = ManualDeviceClock(), []
        tmr = Timer(device_clock=lazy_device(lambda: looked.append(1) or device))
        with tmr.region("a"):
            pass
        tmr.snapshot()
        tmr.complete_all()
        assert ([], True, None) == (looked, tmr.device.is_null, tmr.device.clock)
        for _ in range(3):
            with tmr.region("a", gpu=True):
                device.launch(1)
        assert ([1], [1.0] * 3) == (looked, tmr.get_time("a", gpu=True))
        assert tmr.device is pool_of(device)

    def test_timers_that_share_one_search_share_the_device(self):
        """What one timer found, another with the same search does not look for again."""
        device, looked = ManualDeviceClock(), []
        late = lazy_device(lambda: looked.append(1) or device)
        one, two = Timer(device_clock=late), Timer(device_clock=late)
        for tmr in (one, two):
            with tmr.region("a", gpu=True):
                device.launch(2)
        assert ([1], [2.0], [2.0]) == (looked, one.get_time("a", gpu=True), two.get_time("a", gpu=True))
        assert one.device is two.device

    def test_none_there_is_said_once(self):
        """A reason instead of a clock is one warning; CPU times go on, and nothing looks again."""
        looked = []
        tmr = Timer(clock=ManualClock(), device_clock=lazy_device(lambda: looked.append(1) or "No GPU is plugged in."))
        with pytest.warns(TimingWarning) as said:
            for _ in range(3):
                with tmr.region("a", gpu=True):
                    pass
        assert ["Timing a region with gpu=True: No GPU is plugged in."] == [str(warning.message) for warning in said]
        assert ([1], 3, []) == (looked, len(tmr.get_time("a")), tmr.get_time("a", gpu=True))
        assert tmr.device is NULL_DEVICE

    def test_a_search_that_raises_leaves_the_region_closed(self):
        """A named device that is missing is an error of the call that needs it, each time; nothing stays open."""

        def search():
            raise DeviceUnavailableError("GPU 7 is not there")

        tmr = Timer(device_clock=lazy_device(search))
        for _ in range(2):
            with pytest.raises(DeviceUnavailableError, match="GPU 7"):
                tmr.start("a", gpu=True)
        tmr.start("a")
        tmr.end("a")
        assert 1 == len(tmr.get_time("a"))

    def test_it_says_what_it_knows(self):
        """It stands for no device, before the search and after it; a device that was found gives no warning."""
        device = ManualDeviceClock()
        late = lazy_device(lambda: device)
        assert "" == late.reason
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert late.find_for_regions() is late.find() is pool_of(device)
        assert (True, None, 0, {}) == (late.is_null, late.clock, late.events, late.pending())

    def test_threads_that_search_at_once_get_one_device(self):
        """Each may find another clock; the first one found serves all."""

        def search():
            if meanwhile:
                found.append(meanwhile.pop()())
            return ManualDeviceClock()

        meanwhile, found = [], []
        late = lazy_device(search)
        meanwhile.append(late.find)
        found.append(late.find())
        assert [late.find()] * 2 == found

    def test_equal_ones_make_the_same_search(self):
        """Two timers that were asked for the same are settings for the same."""
        one, same, other = lazy_device(_nothing), lazy_device(_nothing), lazy_device(lambda: "no")
        assert one == same
        assert one != other
        assert one != _nothing
        assert 2 == len({one, same, other})

    def test_a_copy_is_for_the_same_timers(self):
        """Whether named timers are to look for it is copied and pickled with the search."""
        for wanted in (True, False):
            late = lazy_device(_nothing, for_named_timers=wanted)
            assert [wanted] * 2 == [
                made.for_named_timers for made in (copy.copy(late), pickle.loads(pickle.dumps(late)))
            ]

    @pytest.mark.parametrize("make", [copy.copy, copy.deepcopy])
    def test_a_copy_looks_anew(self, make):
        """A copied timer was asked for the same, and finds the device that is there then."""
        device = ManualDeviceClock()
        tmr = Timer(device_clock=lazy_device(_Search(device)))
        with tmr.region("a", gpu=True):
            pass
        made = make(tmr)
        assert made.device.clock is None or make is copy.copy
        with made.region("a", gpu=True):
            pass
        assert made.device.clock is not None

    def test_a_pickle_holds_the_search(self):
        """A pickle holds the request."""
        tmr = pickle.loads(pickle.dumps(Timer(device_clock=lazy_device(_nothing))))
        with pytest.warns(TimingWarning, match="nothing here"), tmr.region("a", gpu=True):
            pass

    @pytest.mark.parametrize("for_named_timers", [True, False])
    def test_named_timers(self, for_named_timers):
        """Named timers look at their first start, or never where that would cost what no one asked for."""
        device, looked = ManualDeviceClock(), []
        tmr = Timer(
            device_clock=lazy_device(lambda: looked.append(1) or device, for_named_timers=for_named_timers),
            clock=ManualClock(),
        )
        named = SynchronizedWallClockTimer(tmr)("forward")
        assert [] == looked
        for _ in range(2):
            named.start()
            device.launch(0.5)
            named.stop()
        assert (1000.0 if for_named_timers else 0.0) == named.elapsed()
        assert ([1] if for_named_timers else []) == looked
        assert for_named_timers == (tmr.device is pool_of(device))

    def test_named_timers_say_nothing_where_there_is_none(self):
        """Named timers have the host's times then, without a warning: they never asked for others."""
        clock = ManualClock()
        named = SynchronizedWallClockTimer(Timer(device_clock=lazy_device(_nothing), clock=clock))("forward")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            named.start()
            clock.advance(1)
            named.stop()
        assert 1000.0 == named.elapsed()
        with pytest.warns(TimingWarning, match="nothing here"), named._timer.region("a", gpu=True):
            pass


class _Search:
    """A search that can be copied."""

    def __init__(self, device):
        self.device = device

    def __call__(self):
        return self.device


def _nothing():
    return "There is nothing here."


class FakeClock(ManualDeviceClock):
    """A clock with a device, or not."""

    reason: str | None = None

    @classmethod
    def why_unavailable(cls):
        """The reason that the test gave."""
        return cls.reason


@pytest.fixture
def registered(monkeypatch):
    """Register clocks in the place of the real ones: ``registered(name="package.module:Class")``."""

    def register(**points):
        found = [importlib.metadata.EntryPoint(name, value, clocks.GROUP) for name, value in points.items()]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found if group == clocks.GROUP else [])

    return register


class TestClocks:
    def test_the_built_in_ones(self):
        """Device clocks are registered and nothing else: each has what the timer calls, none is a host clock."""
        assert {"cupy", "torch"} <= set(clocks.all())
        assert "host" not in clocks.all()
        for name in ("cupy",):
            assert {"record", "is_done", "elapsed_ns", "why_unavailable"} <= set(dir(clocks.get(name)))

    def test_a_third_partys(self, registered):
        """A third party's clock is found by its name and serves a timer."""
        registered(worker=f"{__name__}:FakeClock")
        sys.modules.setdefault(__name__, sys.modules[type(self).__module__])
        assert (("worker",), ("worker",)) == (clocks.all(), clocks.available())
        device = clocks.get("worker")()
        tmr = CPUGPUTimer(device_clock=device)
        with tmr.region("a", gpu=True):
            device.launch(1)
        assert [1.0] == tmr.get_time("a", gpu=True)

    def test_without_a_device_it_is_not_available(self, registered, monkeypatch):
        """``available`` asks each for a reason why not, and ``all`` does not."""
        monkeypatch.setattr(FakeClock, "reason", "no device")
        registered(worker=f"{__name__}:FakeClock", simple="deep500_timing.testing:ManualDeviceClock")
        assert (("simple", "worker"), ("simple",)) == (clocks.all(), clocks.available())

    def test_one_that_fails_costs_a_warning(self, registered, monkeypatch):
        """A clock that cannot be imported or asked is left out and named; a missing framework is no fault."""

        def fail():
            raise MissingPackageError("needs torch")

        registered(broken="no_such_package:Clock", worker=f"{__name__}:FakeClock")
        monkeypatch.setattr(FakeClock, "why_unavailable", fail)
        with pytest.warns(TimingWarning, match="'broken' whether it has a device failed") as said:
            assert () == clocks.available()
        assert 1 == len(said)

    def test_an_unknown_name(self):
        """Asking for a clock that no one registers says which there are."""
        with pytest.raises(LookupError, match=r"'tpu' among deep500_timing\.clocks.*'cupy'"):
            clocks.get("tpu")
