"""Memory at the end of regions."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import threading
import warnings

import pytest

from deep500_timing import InvalidKeyError, MissingPackageError, RegionNotOpenError, Timer, TimingWarning
from deep500_timing._base.memory_usage import MemorySamples, RegionMemory
from deep500_timing.memory import HostMemory, MemoryReader, MemoryTimer, MemoryUsage, format_usage
from deep500_timing.wallclock import SynchronizedWallClockTimer

GIB = 1024**3


class Readings:
    """Reads the test's values, the last for ever."""

    def __init__(self, *usages):
        self.usages = list(usages)
        self.reads = 0

    def read(self):
        """The next reading."""
        self.reads += 1
        return self.usages.pop(0) if len(self.usages) > 1 else self.usages[0]


class Broken:
    """Cannot read."""

    def read(self):
        """Fail."""
        raise OSError("no /proc")


USAGE = MemoryUsage(
    host_rss_bytes=3 * GIB,
    host_used_percent=12.5,
    swap_used_percent=0.0,
    device="cuda:0",
    device_allocated_bytes=GIB,
    device_peak_allocated_bytes=2 * GIB,
    device_reserved_bytes=GIB // 2,
    device_peak_reserved_bytes=4 * GIB,
)
MORE = MemoryUsage(host_rss_bytes=2 * GIB, device="cuda:0", device_allocated_bytes=3 * GIB)


def _samples(tmr, name):
    memory = tmr.snapshot().get(name).memory
    return None if memory is None else memory.samples


@pytest.fixture
def make(clock):
    """Makes a timer with such readings."""

    def make(*usages, **settings):
        return MemoryTimer(memory=Readings(*usages), clock=clock, **settings)

    return make


class TestRegions:
    def test_memory_is_read_at_each_end(self, make):
        """The last reading and the largest are kept with the region's CPU times."""
        tmr = make(USAGE, MORE)
        for _ in range(2):
            with tmr.region("FORWARD"):
                pass
        memory = tmr.snapshot().get("FORWARD").memory
        assert (memory.samples, memory.last) == (2, MORE)
        assert (memory.max_host_rss_bytes, memory.max_device_allocated_bytes) == (3 * GIB, 3 * GIB)
        assert memory.max_device_reserved_bytes == GIB // 2

    def test_it_is_read_after_the_time_was_taken(self, make, clock):
        """Reading is no part of the region's time."""
        tmr = make(USAGE)
        tmr._memory.read = lambda: clock.advance(1.0) or USAGE
        tmr.start("x")
        clock.advance(0.5)
        tmr.end("x")
        assert tmr.get_time("x") == [pytest.approx(0.5)]

    def test_only_regions_that_were_named(self, make):
        """``memory_keys`` leaves the others alone."""
        tmr = make(USAGE, memory_keys=["FORWARD"])
        for key in ("FORWARD", "BACKWARD"):
            with tmr.region(key):
                pass
        assert tmr.snapshot().get("FORWARD").memory.samples == 1
        assert tmr.snapshot().get("BACKWARD").memory is None

    def test_every_way_to_time_counts(self, make, device, clock):
        """start/end, handles, decorators and iteration, on a device too."""
        tmr = MemoryTimer(memory=Readings(USAGE), clock=clock, device_clock=device)
        tmr.start("a", gpu=True)
        tmr.end("a", gpu=True)
        handle = tmr.region("b", gpu=True)
        handle.start()
        handle.end()
        tmr.timed("c")(lambda: None)()
        assert list(tmr.iterate([1, 2], "d")) == [1, 2]
        snapshot = tmr.snapshot()
        assert [snapshot.get(name).memory.samples for name in "abc"] == [1, 1, 1]
        assert snapshot.get("d").memory.samples >= 2
        assert snapshot.get("a", "GPU").memory is None

    def test_a_failed_region_is_not_read(self, make):
        """An exception leaves neither time nor memory."""
        tmr = make(USAGE)
        with pytest.raises(KeyError), tmr.region("x"):
            raise KeyError
        assert tmr.snapshot().get("x").memory is None
        assert tmr.snapshot().get("x").failed == 1

    def test_a_disabled_timer_reads_nothing(self, make):
        """``enabled=False`` costs nothing."""
        tmr = make(USAGE, enabled=False)
        with tmr.region("x"):
            pass
        assert tmr._memory.reads == 0

    def test_a_reset_forgets_it(self, make):
        """With the times."""
        tmr = make(USAGE)
        with tmr.region("x"):
            pass
        tmr.reset()
        assert tmr.snapshot().get("x") is None

    def test_a_reader_that_fails_costs_one_warning(self, clock):
        """Times go on without the memory."""
        tmr = MemoryTimer(memory=Broken(), clock=clock)
        tmr.start("x")
        with pytest.warns(TimingWarning, match="no /proc"):
            tmr.end("x")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(2):
                with tmr.region("x"):
                    clock.advance(1.0)
        assert tmr.snapshot().get("x").stats.count == 3
        assert tmr.snapshot().get("x").memory is None

    def test_ordinary_timers_have_none(self, clock):
        """Nothing is read unless it was asked for."""
        tmr = Timer(clock=clock)
        with tmr.region("x"):
            pass
        assert tmr.snapshot().get("x").memory is None

    def test_a_snapshot_with_memory_is_plain_data(self, make):
        """It goes into JSON under the names of the fields."""
        tmr = make(USAGE)
        with tmr.region("x"):
            pass
        region = json.loads(json.dumps(tmr.snapshot().to_dict()))["regions"][0]
        assert region["memory"]["last"]["device_peak_reserved_bytes"] == 4 * GIB
        assert region["memory"]["last"]["device"] == "cuda:0"

    def test_a_copy_is_a_timer_of_its_own(self, clock):
        """Checkpoints of objects that hold one work."""
        pytest.importorskip("psutil")
        tmr = MemoryTimer(memory_keys=["x"])
        again = copy.deepcopy(tmr)
        with again.region("x"):
            pass
        assert again.snapshot().get("x").memory.samples == 1
        assert tmr.snapshot().get("x") is None

    def test_a_copy_keeps_its_reader(self, clock):
        """Every setting is carried, by a deep copy and by a pickle."""
        tmr = MemoryTimer(memory=Readings(USAGE), memory_keys=["x"], keep_last=3)
        for again in (copy.deepcopy(tmr), pickle.loads(pickle.dumps(tmr))):
            assert isinstance(again._memory, Readings)
            with again.region("x"), again.region("y"):
                pass
            memory = again.snapshot().get("x").memory
            assert (1, USAGE) == (memory.samples, memory.last)
            assert again.snapshot().get("y").memory is None

    def test_samples_of_many_threads_add_up(self, clock, switching):
        """Each end counts, however the threads take turns."""
        tmr = MemoryTimer(memory=Readings(USAGE), clock=clock)

        def work():
            for _ in range(300):
                with tmr.region("x"):
                    pass

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = tmr.snapshot().get("x")
        assert (2400, 2400) == (found.stats.count, found.memory.samples)

    def test_a_sample_amid_a_sample_counts(self):
        """A signal handler or finalizer on the same thread neither waits for ever nor is lost."""
        samples = MemorySamples()

        class Entering(RegionMemory):
            __slots__ = ()

            def then(self, usage):
                if not entered:
                    entered.append(True)
                    samples.add(MORE)
                return super().then(usage)

        entered = []
        samples._total = Entering(0, USAGE)
        samples.add(USAGE)
        assert (2, MORE, 3 * GIB) == (samples.total().samples, samples.total().last, samples.total().max_host_rss_bytes)

    def test_the_end_of_a_discarded_region_is_none(self, make):
        """An open region that is forgotten has no end at which memory would be read."""
        tmr = make(USAGE)
        with tmr.region("x"):
            tmr.discard("x")
        found = tmr.snapshot().get("x")
        assert (1, None) == (found.discarded, found.memory)

    @pytest.mark.parametrize("gpu", [False, True])
    @pytest.mark.parametrize("memory_keys", [None, ["x"], ["y"]], ids=["all", "this one", "another"])
    def test_handles_are_those_of_other_timers(self, make, device, gpu, memory_keys):
        """There are two kinds, of the host and of the device as well; memory makes no third one."""
        tmr = make(USAGE, memory_keys=memory_keys, device_clock=device)
        handle = tmr.region("x", gpu)
        assert type(Timer().region("x", gpu)) is type(handle)
        assert tmr.region("x", gpu) is handle
        assert ("x", "x", False) == (handle.key, handle.name, handle.is_open)
        with tmr.region("x", gpu) as region:
            assert region is handle
            assert region.is_open
        assert "'x'" in repr(handle)
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                duplicate(handle)
        assert (None if memory_keys == ["y"] else 1) == _samples(tmr, "x")

    def test_a_handle_serves_other_threads(self, make, in_thread):
        """Each end on a thread that the handle was not made on reads the memory as well."""
        tmr = make(USAGE)
        handle = tmr.region("x")

        def work():
            with handle:
                pass
            handle.start()
            handle.end()

        in_thread(work)
        assert (2, False) == (_samples(tmr, "x"), handle.is_open)

    @pytest.mark.parametrize("gpu", [False, True])
    def test_regions_within_regions_read_at_each_end(self, make, device, gpu):
        """The inner one's reading is part of the outer one's time, and both have one."""
        tmr = make(USAGE, MORE, device_clock=device)
        with tmr.region("outer", gpu), tmr.region("inner", gpu):
            pass
        regions = tmr.snapshot()
        assert (USAGE, MORE) == (regions.get("inner").memory.last, regions.get("outer").memory.last)

    @pytest.mark.parametrize("gpu", [False, True])
    def test_a_second_entry_has_an_end_of_its_own(self, make, clock, device, gpu):
        """What interrupts an open region under its key reads at its end, and leaves it open to read at its own."""
        tmr = make(USAGE, device_clock=device)

        class Finalized:
            def __del__(self):
                with tmr.region("x", gpu):
                    clock.advance(1)
                found.append((_samples(tmr, "x"), tmr.region("x", gpu).is_open))

        found = []
        with tmr.region("x", gpu):
            clock.advance(1)
            Finalized()
            clock.advance(1)
        assert [(1, True)] == found
        assert (2, False, [1.0, 3.0]) == (_samples(tmr, "x"), tmr.region("x", gpu).is_open, tmr.get_time("x"))

    def test_a_captured_region_reads_the_memory(self, make, device):
        """The host's time and the memory are had, though the device's time is not."""
        tmr = make(USAGE, device_clock=device)
        device.capturing = True
        with tmr.region("x", gpu=True):
            pass
        device.capturing = False
        assert (1, 1) == (_samples(tmr, "x"), tmr.snapshot().get("x", "GPU").captured)

    def test_it_is_read_after_the_device_was_marked(self, make, device):
        """Reading is no part of the time on the device either."""
        tmr = make(USAGE, device_clock=device)
        tmr._memory.read = lambda: device.advance(1.0) or USAGE
        with tmr.region("x", gpu=True):
            device.advance(0.5)
        assert [0.5] == tmr.get_time("x", gpu=True)

    @pytest.mark.parametrize("gpu", [False, True])
    def test_an_interrupt_in_the_reading_loses_nothing(self, make, device, gpu):
        """Ctrl-C while the memory is read: the region has ended, and its times are kept."""
        tmr = make(USAGE, device_clock=device)

        def read():
            raise KeyboardInterrupt

        tmr._memory.read = read
        tmr.start("x", gpu)
        with pytest.raises(KeyboardInterrupt):
            tmr.end("x", gpu)
        times = tmr.snapshot().get("x")
        assert (1, 0, 0, None) == (times.stats.count, times.failed, times.running, times.memory)
        assert gpu == len(tmr.get_time("x", gpu=True))

    def test_what_is_no_end_reads_nothing(self, make):
        """The ignored end of a discarded region, one that failed, and one that had been switched off meanwhile."""
        tmr = make(USAGE)
        tmr.start("x")
        tmr.fail("x")
        tmr.start("x")
        tmr.enabled = False
        tmr.enabled = True
        tmr.end("x")
        tmr.start("x")
        tmr.discard("x")
        tmr.end("x")
        with pytest.raises(RegionNotOpenError):
            tmr.end("x")
        assert 0 == tmr._memory.reads

    def test_a_key_that_is_none_is_refused_at_once(self):
        """A timer that would read after no region is not made."""
        with pytest.raises(InvalidKeyError, match=r"Reading memory after 3: a key is a TimeType"):
            MemoryTimer(memory=Readings(USAGE), memory_keys=[3])

    def test_named_timers_read_the_hosts_where_nothing_else_is_said(self, clock, monkeypatch):
        """``memory=True`` is the host's memory, or the adapter's reading."""
        pytest.importorskip("psutil")
        timers = SynchronizedWallClockTimer(clock=clock, memory=True)
        timers("fwd").start()
        timers("fwd").stop()
        assert timers.timer.snapshot().get("fwd").memory.last.host_rss_bytes > 0
        monkeypatch.setattr(SynchronizedWallClockTimer, "memory_reader", Readings(USAGE))
        timers = SynchronizedWallClockTimer(clock=clock, memory=True)
        timers("fwd").start()
        timers("fwd").stop()
        assert USAGE == timers.timer.snapshot().get("fwd").memory.last

    def test_named_timers_read_it_at_each_stop(self, clock):
        """``memory=`` of a group of named timers does the same."""
        timers = SynchronizedWallClockTimer(clock=clock, memory=Readings(USAGE))
        timers("fwd").start()
        timers("fwd").stop()
        assert timers.timer.snapshot().get("fwd").memory.last == USAGE


class TestReports:
    """Tables and files have tests next to theirs."""

    def test_trackers_get_the_largest(self, make):
        """W&B and MLflow are given the known numbers next to the times, in bytes."""
        from deep500_timing.exporters._trackers import TrackerExporter

        class Tracker(TrackerExporter):
            package = "json"

            def _export(self, snapshot, step):
                """Write nothing."""

        tmr = make(MORE)
        with tmr.region("FORWARD"):
            pass
        metrics = {m.name: m.value for m in Tracker("train")._metrics(tmr.snapshot())}
        assert metrics == {
            "train/CPU/FORWARD": 0.0,
            "train/CPU/FORWARD/max_host_rss_bytes": 2.0 * GIB,
            "train/CPU/FORWARD/max_device_allocated_bytes": 3.0 * GIB,
        }

    def test_the_printed_table_tells_it(self, make):
        """The terminal's report has a line for each region's memory."""
        import io

        tmr = make(USAGE)
        with tmr.region("FORWARD"):
            pass
        out = io.StringIO()
        tmr.print_all_time_stats(out)
        assert "3.00 GiB resident" in out.getvalue()
        assert "1.00 GiB allocated on cuda:0" in out.getvalue()


class TestReading:
    def test_the_hosts_memory(self):
        """The numbers are psutil's of this process and machine; nothing of a device."""
        pytest.importorskip("psutil")
        usage = HostMemory().read()
        assert usage.host_rss_bytes > 2**20
        assert 0.0 < usage.host_used_percent <= 100.0
        assert 0.0 <= usage.swap_used_percent <= 100.0
        assert usage.device is None
        assert usage.device_allocated_bytes is None

    def test_a_timer_reads_the_hosts_memory_by_itself(self):
        """Without a reader it is the host's."""
        pytest.importorskip("psutil")
        tmr = MemoryTimer()
        with tmr.region("x"):
            pass
        assert tmr.snapshot().get("x").memory.last.host_rss_bytes > 2**20

    def test_without_psutil_the_error_names_it(self, monkeypatch):
        """Asking for the host's memory without psutil names the package."""
        monkeypatch.setitem(sys.modules, "psutil", None)
        with pytest.raises(MissingPackageError, match=r"HostMemory requires psutil; pip install"):
            HostMemory()

    def test_readers_are_known_by_their_method(self):
        """Anything with ``read`` serves."""
        assert isinstance(Readings(USAGE), MemoryReader)
        assert not isinstance(object(), MemoryReader)


class TestLine:
    def test_it_has_the_originals_numbers(self):
        """DeepSpeed's four numbers come first, in units of 1024³ bytes."""
        assert format_usage(USAGE) == (
            " | mem_allocated: 1.0000 GB | max_mem_allocated: 2.0000 GB | cache_allocated: 0.5000 GB"
            " | max_cache_allocated: 4.0000 GB | host_rss: 3.0000 GB | host_used: 12.5 %"
        )

    def test_what_is_unknown_is_left_out(self):
        """Missing is not zero."""
        assert format_usage(MORE) == " | mem_allocated: 3.0000 GB | host_rss: 2.0000 GB"
        assert format_usage(MemoryUsage()) == " | memory: n/a"

    def test_memory_usage_needs_no_group(self):
        """It is called on the class as well, as in the original."""
        pytest.importorskip("psutil")
        assert SynchronizedWallClockTimer.memory_usage().startswith(" | host_rss: ")
