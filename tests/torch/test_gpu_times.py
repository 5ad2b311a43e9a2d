"""GPU times on the test device: real PyTorch events, a clock that moves when told to, and counters."""

from __future__ import annotations

import os
import threading
import warnings

import pytest

pytest.importorskip("torch")

import torch

import deep500_timing_torch as timer
from deep500_timing.devices import _pool as _device

MS = 1_000_000
BATCH = timer.TimeType.BATCH

pytestmark = pytest.mark.torch_device


@pytest.fixture
def tmr(dev):
    """A timer on the test device."""
    return timer.CPUGPUTimer()


def gpu(tmr, key=BATCH):
    """The snapshot of a region on the device."""
    return tmr.snapshot().get(key, "GPU")


class TestTimes:
    def test_is_the_work_of_the_region(self, dev, tmr):
        """A region's GPU time is that of the work queued in it, and no other."""
        dev.launch(7 * MS)
        with tmr.region(BATCH, gpu=True):
            dev.launch(5 * MS)
        dev.launch(9 * MS)
        dev.drain()
        assert [0.005] == tmr.get_time(BATCH, gpu=True)

    def test_nested_regions(self, dev, tmr):
        """Each of nested regions has the time of the work within it."""
        tmr.start(BATCH, gpu=True)
        dev.launch(1 * MS)
        with tmr.region("inner", gpu=True):
            dev.launch(2 * MS)
        dev.launch(4 * MS)
        tmr.end(BATCH, gpu=True)
        dev.drain()
        assert [0.007] == tmr.get_time(BATCH, gpu=True)
        assert [0.002] == tmr.get_time("inner", gpu=True)

    def test_without_gpu_touches_no_device(self, dev, tmr):
        """A region without gpu=True makes no call to the device and has no GPU time."""
        with tmr.region(BATCH):
            pass
        assert 0 == sum(dev.counters())
        assert [] == tmr.get_time(BATCH, gpu=True)

    def test_as_a_float32(self, dev, tmr):
        """A time that the device hands out as a float32 of milliseconds is that float32, to the nanosecond."""
        dev.set_float32_elapsed(True)
        with tmr.region(BATCH, gpu=True):
            dev.launch(8_388_607_900)
        dev.drain()
        (measured,) = tmr.get_time(BATCH, gpu=True)
        exact_ms = torch.tensor(8388.6079, dtype=torch.float32).item()
        assert round(exact_ms * 1e6) == round(measured * 1e9)

    def test_snapshot_does_not_wait(self, dev, tmr):
        """A snapshot says the pending times, and reports it once the device is there."""
        with tmr.region(BATCH, gpu=True):
            dev.launch(5 * MS)
        assert (1, None) == (gpu(tmr).pending, gpu(tmr).stats)
        dev.drain()
        assert (0, 1) == (gpu(tmr).pending, gpu(tmr).stats.count)
        assert 0 == dev.counters().synchronizes

    def test_complete_all_waits(self, dev, tmr):
        """complete_all waits, by one synchronize of one event, for all that has ended."""
        for _ in range(3):
            with tmr.region(BATCH, gpu=True):
                dev.launch(5 * MS)
        tmr.complete_all()
        assert 1 == dev.counters().event_synchronizes
        assert [0.005] * 3 == tmr.get_time(BATCH, gpu=True)

    def test_timed_and_iterate(self, dev, tmr):
        """The decorator and the iterator time the device as well."""

        @tmr.timed("step", gpu=True)
        def step():
            dev.launch(3 * MS)

        def batches():
            for _ in range(2):
                dev.launch(1 * MS)
                yield

        for _ in tmr.iterate(batches(), gpu=True):
            step()
        dev.drain()
        assert [0.003] * 2 == tmr.get_time("step", gpu=True)
        assert [0.001] * 2 == tmr.get_time(timer.TimeType.IO, gpu=True)


class TestStreamsAndDevices:
    def test_side_stream(self, dev, tmr):
        """A region on a side stream has that stream's time, for any work of the others."""
        side = torch.Stream()
        dev.launch(50 * MS)
        with side, tmr.region(BATCH, gpu=True):
            dev.launch(2 * MS)
        dev.drain()
        assert [0.002] == tmr.get_time(BATCH, gpu=True)

    def test_switched_inside(self, dev, tmr):
        """A region that ends on another stream lasts from where it began to where that one is then."""
        side = torch.Stream()
        dev.launch(3 * MS)
        with tmr.region(BATCH, gpu=True):
            dev.launch(10 * MS, side)
            torch.accelerator.set_stream(side)
        dev.drain()
        assert [0.007] == tmr.get_time(BATCH, gpu=True)

    def test_ended_before_it_began(self, dev, tmr):
        """Where the second stream was there before the first, there is no time: it is failed, with one warning."""
        side = torch.Stream()
        with pytest.warns(timer.TimingWarning, match="ended before it began") as caught:
            for _ in range(3):
                dev.launch(3 * MS)
                tmr.start(BATCH, gpu=True)
                with side:
                    tmr.end(BATCH, gpu=True)
            dev.drain()
            assert [] == tmr.get_time(BATCH, gpu=True)
        assert 1 == len(caught)
        assert 3 == gpu(tmr).failed

    def test_two_devices(self, dev, tmr):
        """Regions follow the current device."""
        with tmr.region(BATCH, gpu=True):
            dev.launch(1 * MS)
        with torch.accelerator.device_index(1), tmr.region(BATCH, gpu=True):
            dev.launch(2 * MS)
        dev.drain()
        assert [0.001, 0.002] == sorted(tmr.get_time(BATCH, gpu=True))

    def test_one_device_by_number(self, dev):
        """A timer for one device times that, whichever is current."""
        tmr = timer.CPUGPUTimer(device="testdev:1")
        with tmr.region(BATCH, gpu=True):
            dev.launch(5 * MS)
            with torch.accelerator.device_index(1):
                dev.launch(2 * MS)
        dev.drain()
        assert [0.002] == tmr.get_time(BATCH, gpu=True)

    def test_one_device_by_number_is_captured(self, dev):
        """A timer for one device sees a capture there, and none elsewhere."""
        tmr = timer.CPUGPUTimer(device="testdev:1")
        with tmr.region("before", gpu=True):
            pass
        dev.set_capturing(True, torch.accelerator.current_stream(0))
        with tmr.region("elsewhere", gpu=True):
            pass
        dev.set_capturing(False)
        dev.set_capturing(True, torch.accelerator.current_stream(1))
        with tmr.region("there", gpu=True):
            pass
        dev.set_capturing(False)
        assert [0.0] == tmr.get_time("elsewhere", gpu=True)
        assert [] == tmr.get_time("there", gpu=True)
        assert 1 == gpu(tmr, "there").captured

    def test_device_switched_inside(self, dev, tmr):
        """Between two devices there is no time: it is failed, with one warning that says why."""
        with pytest.warns(timer.TimingWarning, match="counted as failed") as caught:
            for _ in range(3):
                tmr.start(BATCH, gpu=True)
                with torch.accelerator.device_index(1):
                    tmr.end(BATCH, gpu=True)
            dev.drain()
            assert [] == tmr.get_time(BATCH, gpu=True)
        assert 1 == len(caught)
        assert 3 == gpu(tmr).failed
        with tmr.region(BATCH, gpu=True):
            dev.launch(1 * MS)
        dev.drain()
        assert [0.001] == tmr.get_time(BATCH, gpu=True)


class TestCapture:
    def test_records_and_queries_nothing(self, dev, tmr):
        """While the stream is captured nothing is recorded or asked, and regions are counted as captured."""
        for _ in range(40):
            with tmr.region("before", gpu=True):
                dev.launch(1 * MS)
        dev.drain()
        dev.set_capturing(True)
        for _ in range(40):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1 * MS)
        tmr.snapshot()
        tmr.complete_all()
        assert [] == tmr.get_time(BATCH, gpu=True)
        dev.set_capturing(False)
        counters = dev.counters()
        assert (0, 0, 0) == (
            counters.records_while_capturing,
            counters.queries_while_capturing,
            counters.synchronizes_while_capturing,
        )
        assert 40 == gpu(tmr).captured
        assert [0.001] * 40 == tmr.get_time("before", gpu=True)

    @pytest.mark.parametrize("begins", [True, False])
    def test_across_the_edge_of_a_capture(self, dev, tmr, begins):
        """A region with one end in a capture is counted as captured; its event serves again."""
        for _ in range(5):
            dev.set_capturing(begins)
            tmr.start(BATCH, gpu=True)
            dev.set_capturing(not begins)
            tmr.end(BATCH, gpu=True)
            dev.set_capturing(False)
        assert 0 == dev.counters().records_while_capturing
        assert dev.counters().events_created <= 2  # one is the stream's anchor
        assert 5 == gpu(tmr).captured
        assert [] == tmr.get_time(BATCH, gpu=True)

    def test_ordinary_times_go_on(self, dev, tmr):
        """CPU times are taken during a capture, GPU times after it."""
        dev.set_capturing(True)
        with tmr.region(BATCH, gpu=True):
            pass
        dev.set_capturing(False)
        with tmr.region(BATCH, gpu=True):
            dev.launch(2 * MS)
        dev.drain()
        assert 2 == len(tmr.get_time(BATCH))
        assert [0.002] == tmr.get_time(BATCH, gpu=True)


class TestFaults:
    @pytest.mark.parametrize("kind", ["record", "stream_lookup"])
    @pytest.mark.parametrize("at", ["start", "end"])
    def test_recording_fails(self, dev, tmr, kind, at):
        """A fault at either end costs one warning and that GPU time; CPU times and later ones are there."""
        with tmr.region("warm", gpu=True):
            pass
        created = dev.counters().events_created
        with pytest.warns(timer.TimingWarning, match=f"the {at} of region 'BATCH'") as caught:
            for _ in range(5):
                if at == "start":
                    dev.fail_next(kind)
                tmr.start(BATCH, gpu=True)
                if at == "end":
                    dev.fail_next(kind)
                tmr.end(BATCH, gpu=True)
        with tmr.region(BATCH, gpu=True):
            dev.launch(1 * MS)
        dev.drain()
        assert 1 == len(caught)
        assert 6 == len(tmr.get_time(BATCH))
        assert [0.001] == tmr.get_time(BATCH, gpu=True)
        assert 5 == gpu(tmr).failed
        # Their events serve again.
        assert dev.counters().events_created - created <= 2

    def test_querying_fails(self, dev, tmr):
        """A query that fails loses no time: it is asked for again later."""
        with pytest.warns(timer.TimingWarning, match="how far it is"):
            for _ in range(60):
                dev.fail_next("query")
                with tmr.region(BATCH, gpu=True):
                    dev.launch(1 * MS)
            dev.fail_next("query", 0)
        dev.drain()
        assert [0.001] * 60 == tmr.get_time(BATCH, gpu=True)

    def test_reading_fails(self, dev, tmr):
        """An elapsed time that cannot be read is counted as failed, with one warning, and the next is read."""
        for _ in range(3):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1 * MS)
        dev.drain()
        dev.fail_next("elapsed", 2)
        with pytest.warns(timer.TimingWarning, match="counted as failed") as caught:
            assert [0.001] == tmr.get_time(BATCH, gpu=True)
        assert 1 == len(caught)
        assert 2 == gpu(tmr).failed

    def test_waiting_fails(self, dev, tmr):
        """A wait that fails is said once; pending events stays pending."""
        with tmr.region(BATCH, gpu=True):
            dev.launch(1 * MS)
        dev.fail_next("synchronize")
        with pytest.warns(timer.TimingWarning, match="Waiting for the device"):
            tmr.complete_all()
        assert 1 == gpu(tmr).pending
        dev.drain()
        assert [0.001] == tmr.get_time(BATCH, gpu=True)

    def test_exception_in_a_region(self, dev, tmr):
        """A region that an exception ends has no GPU time, and its event serves again."""
        for _ in range(10):
            with pytest.raises(ValueError, match="of the user"), tmr.region(BATCH, gpu=True):
                raise ValueError("of the user")
        assert (10, None) == (gpu(tmr).failed, gpu(tmr).stats)
        assert 2 == dev.counters().events_created  # one is the stream's anchor

    def test_discard(self, dev, tmr):
        """A region that is forgotten has no GPU time, and its event serves again."""
        for _ in range(10):
            tmr.start(BATCH, gpu=True)
            tmr.discard(BATCH)
        assert 10 == gpu(tmr).discarded
        assert 2 == dev.counters().events_created


class TestNumbers:
    @pytest.mark.parametrize(
        ("lag", "regions"), [(0, 10_000), (1, 10_000), (3, 100_000), (10, 10_000), (40, 10_000), (300, 10_000)]
    )
    def test_a_hundred_thousand_batches(self, dev, lag, regions):
        """No synchronize, two records a region, few queries, and events bounded by twice the work in flight."""
        tmr = timer.CPUGPUTimer(keep_last=100)
        for index in range(regions):
            tmr.start(BATCH, gpu=True)
            dev.launch(1000)
            tmr.end(BATCH, gpu=True)
            if index >= lag:
                dev.advance(1000)
        counters = dev.counters()
        assert 0 == counters.synchronizes
        assert 2 * regions == counters.records
        assert counters.own_queries <= regions // 7
        # A region in flight holds two events; twice that, and a stream's first events to begin with.
        assert counters.events_alive <= 4 * lag + 40
        assert 0 == counters.events_destroyed
        dev.drain()
        stats = tmr.get_time_stats(BATCH, gpu=True)
        assert (regions, 1e-6, 1e-6) == (stats.count, stats.min, stats.max)

    def test_a_device_far_behind_does_not_stall_the_loop(self, dev, tmr):
        """A backlog that is done all of a sudden is read in portions, not at the end of one region."""
        for _ in range(1000):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1000)
        dev.drain()
        largest = before = 0
        for _ in range(2000):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1000)
            after = dev.counters().elapsed_calls
            largest, before = max(largest, after - before), after
        assert before >= 500
        assert largest <= 32

    def test_a_loop_with_nested_regions(self, dev, tmr):
        """With regions within regions queries stay below one a region, and events bounded."""
        for index in range(10_000):
            tmr.start(BATCH, gpu=True)
            for key in (timer.TimeType.FORWARD, timer.TimeType.BACKWARD, timer.TimeType.COMM):
                tmr.start(key, gpu=True)
                dev.launch(1000)
                tmr.end(key, gpu=True)
            tmr.end(BATCH, gpu=True)
            if index >= 5:
                dev.advance(3000)
        counters = dev.counters()
        assert (0, 80_000) == (counters.synchronizes, counters.records)
        assert counters.own_queries <= 40_000 // 7
        assert counters.events_alive <= 4 * 5 * 4 + 60
        dev.drain()
        assert 10_000 == len(tmr.get_time(BATCH, gpu=True))

    @pytest.mark.parametrize("back", [True, False])
    def test_streams_switched_inside_every_region(self, dev, back):
        """Regions that begin on one stream and end on another exhaust the events of neither."""
        tmr = timer.CPUGPUTimer(keep_last=10)
        here, side = torch.accelerator.current_stream(), torch.Stream()
        for index in range(20_000):
            first, second = (side, here) if back and index % 2 else (here, side)
            torch.accelerator.set_stream(first)
            tmr.start(BATCH, gpu=True)
            dev.launch(1000, first)
            second.wait_stream(first)
            torch.accelerator.set_stream(second)
            tmr.end(BATCH, gpu=True)
            dev.advance(1000)
        torch.accelerator.set_stream(here)
        counters = dev.counters()
        assert 0 == counters.synchronizes
        assert counters.own_queries <= 20_000
        assert _device.pool_of(timer.CudaEventClock()).events <= 100
        dev.drain()
        assert 20_000 == tmr.get_time_stats(BATCH, gpu=True).count

    def test_two_devices_and_side_streams(self, dev):
        """Regions that go round over four streams of two devices are bounded as those on one are."""
        tmr = timer.CPUGPUTimer(keep_last=10)
        streams = [torch.Stream(f"testdev:{index}") for index in (0, 1, 0, 1)]
        for index in range(20_000):
            with streams[index % 4], tmr.region(BATCH, gpu=True):
                dev.launch(1000)
            dev.advance(1000)
        counters = dev.counters()
        assert (0, 40_000) == (counters.synchronizes, counters.records)
        assert counters.own_queries <= 20_000 // 7
        assert counters.events_alive <= 4 * 40
        dev.drain()
        assert 20_000 == tmr.get_time_stats(BATCH, gpu=True).count

    def test_one_look_up_for_each_record(self, dev, tmr):
        """An event costs one look-up of the stream, and one of the current device."""
        with tmr.region("warm", gpu=True):
            pass
        dev.reset_counters()
        for _ in range(10):
            with tmr.region(BATCH, gpu=True):
                pass
        counters = dev.counters()
        assert (20, 20, 20) == (counters.records, counters.stream_lookups, counters.device_lookups)


class TestThreads:
    def test_regions_of_other_threads(self, dev, tmr):
        """Threads that share a stream, as those of autograd do, lose no region and mix none up."""

        def work(name):
            for _ in range(500):
                with tmr.region(name, gpu=True):
                    pass

        threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert 0 == dev.counters().synchronizes
        dev.drain()
        assert [500] * 4 == [len(tmr.get_time(f"thread {index}", gpu=True)) for index in range(4)]

    def test_reports_while_another_thread_records(self, dev, tmr):
        """Snapshots that another thread takes all the while lose and double nothing."""
        done = threading.Event()
        seen = []

        def report():
            while not done.is_set():
                times = gpu(tmr)
                if times is not None and times.stats is not None:
                    seen.append(times.stats.count)

        thread = threading.Thread(target=report)
        thread.start()
        for _ in range(3000):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1000)
            dev.advance(1000)
        done.set()
        thread.join()
        dev.drain()
        assert [1e-6] * 3000 == tmr.get_time(BATCH, gpu=True)
        assert seen == sorted(seen)

    def test_backward_hooks(self, dev, tmr):
        """A region begun and ended in hooks of a backward pass is timed on any thread runs them."""
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: (tmr.start("node", gpu=True), dev.launch(2 * MS), grad)[-1])
        x.register_hook(lambda grad: (tmr.end("node", gpu=True), grad)[-1])
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()
        dev.drain()
        assert [0.002] == tmr.get_time("node", gpu=True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
class TestFork:
    def test_child_starts_with_nothing(self, dev, tmr):
        """A forked worker destroys none of the parent's events, and times its own regions with new ones."""
        for _ in range(20):
            with tmr.region(BATCH, gpu=True):
                dev.launch(1 * MS)
        tmr.start("open", gpu=True)
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # The pytest process has threads, says Python 3.12.
            child = os.fork()
        if child == 0:
            verdict = b"raised"
            try:
                destroyed = dev.counters().events_destroyed
                with tmr.region(BATCH, gpu=True):
                    dev.launch(3 * MS)
                dev.drain()
                times = tmr.get_time(BATCH, gpu=True)
                verdict = repr((times, dev.counters().events_destroyed - destroyed)).encode()
            finally:
                os.write(write, verdict)
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as pipe:
            said = pipe.read().decode()
        os.waitpid(child, 0)
        assert "([0.003], 0)" == said
        tmr.end("open", gpu=True)
        dev.drain()
        assert 20 == len(tmr.get_time(BATCH, gpu=True))

    def test_data_loader_workers(self, dev, tmr):
        """A data set that times itself works in forked workers, and the parent's times are its own."""

        class Data(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                with tmr.region("item", gpu=True):
                    return torch.tensor(index)

        loader = torch.utils.data.DataLoader(Data(), num_workers=2, multiprocessing_context="fork")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            items = [int(item) for item in tmr.iterate(loader)]
        assert list(range(8)) == items
        assert 8 == len(tmr.get_time(timer.TimeType.IO))
        assert [] == tmr.get_time("item")
