"""Operations on a device that is simulated: events on the right streams, read later, and nothing that waits."""

from __future__ import annotations

import pickle
import types
import weakref

import pytest
import torch
import torch.distributed as plain

import deep500_timing_torch as timer
from deep500_timing import CPUGPUTimer
from deep500_timing.devices import EventPool, captures
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock, ManualDeviceClock
from deep500_timing_torch import comm
from deep500_timing_torch.comm import _ddp, _device, _log
from deep500_timing_torch.comm._log import LOG


@pytest.fixture
def device(monkeypatch):
    """A simulated device that holds tensors of PyTorch's ``meta`` device, and a host clock at rest."""
    clock = ManualDeviceClock()
    monkeypatch.setitem(_device._pools, torch.device("meta"), EventPool(clock))
    comm.reset_log()
    comm.configure(timer=timer.Timer(clock=ManualClock()))
    yield clock
    comm.configure(timer=None)
    comm.reset_log()
    LOG.under_way.clear()


def tensor():
    """A million bytes on the device."""
    return torch.empty(250_000, device="meta")


class DeviceWork(plain.Work):
    """The handle of a device's asynchronous operation: waiting makes the current stream wait, not the host.

    Its future completes when the operation is queued, and runs its callbacks on a stream that waits for it.
    """

    def __init__(self, device, seconds):
        super().__init__()
        self.device = device
        current = device._stream_now()
        self.end_ns = max(device._tails.get("comm", 0), device._tails.get(current, 0), device.now_ns)
        self.end_ns += round(seconds * 1e9)
        device._tails["comm"] = self.end_ns

    def wait(self, timeout=None):
        """Let the current stream wait."""
        current = self.device._stream_now()
        self.device._tails[current] = max(self.device._tails.get(current, 0), self.end_ns)
        return True

    def get_future(self):
        """A request makes one of PyTorch's pooled streams wait, or, before 2.10, may end the process."""
        raise SystemError("a future of a device's operation was asked for")


class PooledFuture:
    """What PyTorch makes of a device's operation: a callback runs at once, on the next of 32 streams, which waits."""

    issued = 0

    def __init__(self, work):
        self.work = work

    def add_done_callback(self, callback):
        """As ``ivalue::Future::invokeCallback``, under a stream of the pool that waits for the operation."""
        device, name = self.work.device, f"pool {PooledFuture.issued % 32}"
        PooledFuture.issued += 1
        before = device._stream_now()
        device.use_stream(name)
        device._tails[name] = max(device._tails.get(name, 0), self.work.end_ns)
        callback(self)
        device.use_stream(before)


class PooledWork(DeviceWork):
    """One that would let a request for its future delay the user's stream."""

    def get_future(self):
        """Given to the caller."""
        return PooledFuture(self)


class Ring:
    """PyTorch's flight recorder, which has an entry for each operation from its call on, with times from its end on."""

    def __init__(self, device):
        self.device = device
        self.issued = []  # end on the device, ms
        self.dumps = 0
        self.lost = 0
        self.coalesced = []
        self.destroyed = []
        self.name = "nccl:all_reduce"

    def issue(self, seconds):
        """An asynchronous operation of a group that times its operations."""
        work = DeviceWork(self.device, seconds)
        self.issued.append((work.end_ns, seconds * 1e3))
        return work

    def dump(self, collectives, stacks, active):
        """As ``torch._C._distributed_c10d._dump_nccl_trace``, of PyTorch 2.11."""
        assert (True, False, False) == (collectives, stacks, active)
        self.dumps += 1
        entries = []
        for number, (end_ns, ms) in list(enumerate(self.issued, 1))[self.lost :]:
            over = self.device.now_ns >= end_ns
            entries.append(
                {
                    "process_group": ("", "default_pg"), "collective_seq_id": number, "op_id": number, "is_p2p": False,
                    "profiling_name": self.name, "state": "completed" if over else "scheduled",
                    "retired": over, "duration_ms": ms if over else None,
                }
            )  # fmt: skip
        # A batch of messages has its own entry, with the number of the collective before it.
        entries += [{**entry, "profiling_name": "nccl:coalesced", "op_id": 0} for entry in entries[:1]]
        entries += [{**entries[number - 1], "profiling_name": "nccl:coalesced"} for number in self.coalesced]
        entries.sort(key=lambda entry: entry["op_id"])
        return pickle.dumps({"entries": [*self.destroyed, *entries]})

    def destroy(self):
        """Destroy the group and make another of its name: the entries stay, and its operations count from 1."""
        self.destroyed += pickle.loads(self.dump(True, False, False))["entries"]
        self.issued.clear()


@pytest.fixture
def ring(device, monkeypatch):
    """A flight recorder that is on, and the counting of the group that it follows."""
    found = Ring(device)
    monkeypatch.setattr(_device.FlightRecorder, "enable", lambda self, group, process_group, where: True)
    monkeypatch.setattr(_device, "_dump_function", lambda: found.dump)
    group = types.SimpleNamespace(_get_sequence_number_for_group=lambda: len(found.issued))
    monkeypatch.setattr(LOG.alone, "reference", lambda: group)
    yield found
    _device.RECORDER._pending.clear()
    _device.RECORDER.is_empty = False


@pytest.fixture
def recorded(ring):
    """An asynchronous all_reduce of 10 ms that the flight recorder times."""
    return comm.timed_op(lambda tensor, op=None, group=None, async_op=False: ring.issue(0.010), name="all_reduce")


@pytest.fixture
def all_reduce(device):
    """An all_reduce that takes 10 ms on the device."""

    def run(tensor, op=None, group=None, async_op=False):
        if async_op:
            return DeviceWork(device, 0.010)
        device.launch(0.010)
        return None

    return comm.timed_op(run, name="all_reduce")


def test_blocking_operation_takes_as_long_as_the_device(device, all_reduce):
    """Its time is from the event before it to the one after it, however early the call returns."""
    device.launch(1.0)  # earlier work is not its time
    all_reduce(tensor())
    assert (0, 1) == ((op := comm.summary().find("all_reduce")).count, op.pending)
    device.finish()
    op = comm.summary().find("all_reduce")
    assert (1, 0, "GPU") == (op.count, op.pending, op.device)
    assert (pytest.approx(0.010), pytest.approx(0.1)) == (op.mean_s, op.algbw_gb_per_s)
    assert 0 == device.calls["wait"]


def test_asynchronous_operation_under_work(device, all_reduce):
    """Done when its stream is done; exposed is the pause of the current stream, here 10 ms less 8 of work."""
    work = all_reduce(tensor(), async_op=True)
    device.launch(0.008)
    work.wait()
    device.finish()
    op = comm.summary().find("all_reduce")
    assert (1, pytest.approx(0.010)) == (op.count, op.mean_s)
    assert pytest.approx(0.002) == op.exposed_s
    assert pytest.approx(0.8) == op.overlap
    assert 0 == device.calls["wait"]


def test_asynchronous_operation_without_work(device, all_reduce):
    """With nothing to do meanwhile, all of it is exposed."""
    all_reduce(tensor(), async_op=True).wait()
    device.finish()
    op = comm.summary().find("all_reduce")
    assert (pytest.approx(0.010), pytest.approx(0.0)) == (op.exposed_s, op.overlap)


def test_events_are_used_again(device, all_reduce):
    """A thousand operations need as many events as are on their way at once, and never wait."""
    for _ in range(1000):
        all_reduce(tensor())
        all_reduce(tensor(), async_op=True).wait()
        device.finish()
    assert 2000 == comm.summary().find("all_reduce").count
    assert device.calls["new_event"] <= 128
    assert 0 == device.calls["wait"]


def test_timer_gets_device_times(device, all_reduce):
    """A ``CPUGPUTimer`` has communication on the device next to that on the host."""
    tmr = CPUGPUTimer(device_clock=device)
    comm.configure(timer=tmr)
    all_reduce(tensor())
    device.finish()
    comm.summary()
    assert [pytest.approx(0.010)] == tmr.get_time(timer.TimeType.COMM, gpu=True)
    assert 1 == len(tmr.get_time(timer.TimeType.COMM))


@pytest.mark.parametrize("timed", [False, True])
def test_a_side_stream_of_the_users_waits_for_nothing(device, timed):
    """A copy on a stream of PyTorch's pool is done as early as it is untimed, with any pending operations."""

    def run(tensor, op=None, group=None, async_op=False):
        return PooledWork(device, 0.010)

    comm.configure(enabled=timed)
    operation = comm.timed_op(run, name="all_reduce")
    works = [operation(tensor(), async_op=True) for _ in range(64)]
    device.use_stream("pool 5")
    device.launch(0.001)
    assert 1_000_000 == device._tails["pool 5"]
    device.use_stream("stream 0")
    for work in works:
        work.wait()
    comm.configure(enabled=True)


def test_operations_that_are_done_hold_no_events(device):
    """Two thousand, each done before the next: no more events than a stream has to spare, none pending."""

    def run(tensor, op=None, group=None, async_op=False):
        return PooledWork(device, 0.001)

    operation = comm.timed_op(run, name="all_reduce")
    for _ in range(2000):
        operation(tensor(), async_op=True).wait()
        device.finish()
    op = comm.summary(wait=True).find("all_reduce")
    assert (2000, 0) == (op.count, op.pending)
    assert device.calls["new_event"] <= 128


def test_captured_operations_are_counted(device, all_reduce):
    """While a graph is captured no event is recorded; the operation is counted as captured."""
    device.capturing = True
    all_reduce(tensor())
    device.capturing = False
    op = comm.summary().find("all_reduce")
    assert (0, 1, 0, 0) == (op.count, op.captured, op.failed, op.untimed)
    assert 0 == device.calls["record"]


def test_faults_of_the_device_cost_the_time_only(device, all_reduce):
    """An event that cannot be recorded costs one warning; the operation runs."""
    device.fail("record", RuntimeError("untimed"))
    with pytest.warns(timer.TimingWarning, match="untimed"):
        all_reduce(tensor())
    assert 1 == comm.summary().find("all_reduce").failed
    device.fail("record", None)
    all_reduce(tensor())
    device.finish()
    assert 1 == comm.summary().find("all_reduce").count


def test_a_wait_that_cannot_be_timed(device):
    """It is counted next to the operation, with a known time; how much of that was exposed is not."""

    class Work(DeviceWork):
        def wait(self, timeout=None):
            device.fail("record", None)
            return super().wait(timeout)

    def run(tensor, op=None, group=None, async_op=False):
        return Work(device, 0.010)

    work = comm.timed_op(run, name="all_reduce")(tensor(), async_op=True)
    device.fail("record", RuntimeError("not now"))
    with pytest.warns(timer.TimingWarning, match="not now"):
        work.wait()
    device.finish()
    op = comm.summary().find("all_reduce")
    assert (1, 1, 0, None) == (op.count, op.untimed, op.pending, op.overlap)
    assert pytest.approx(0.010) == op.mean_s


def test_a_failed_operation_gives_its_event_back(device):
    """Its exception reaches the caller and its event the pool."""

    def broken(tensor, op=None, group=None, async_op=False):
        raise ValueError("no")

    operation = comm.timed_op(broken, name="all_reduce")
    for _ in range(100):
        with pytest.raises(ValueError, match="no"):
            operation(tensor())
    assert 100 == comm.summary().find("all_reduce").failed
    assert device.calls["new_event"] <= 2


class TestIssuedTogether:
    def test_each_has_its_own_time(self, device, all_reduce):
        """Of six operations of 10 ms on one stream each takes 10 ms, not what all before it took as well."""
        works = [all_reduce(tensor(), async_op=True) for _ in range(6)]
        for work in works:
            work.wait()
        device.finish()
        op = comm.summary().find("all_reduce")
        assert (6, pytest.approx(0.010), pytest.approx(0.1)) == (op.count, op.mean_s, op.algbw_gb_per_s)
        assert pytest.approx(0.010) == op.p95_s

    def test_without_a_backend_that_tells_it_is_an_upper_bound(self, device, all_reduce):
        """Where only the wait tells of the end, work that outlasts it counts as well; the summary says so."""
        work = all_reduce(tensor(), async_op=True)
        device.launch(0.015)
        work.wait()
        device.finish()
        op = comm.summary().find("all_reduce")
        assert (pytest.approx(0.015), True) == (op.mean_s, op.upper_bound)

    def test_the_flight_recorder(self, device, ring, recorded):
        """Each has NCCL's own time, however much computing lies before its wait; no handle is kept, and no event."""
        works = [recorded(tensor(), async_op=True) for _ in range(6)]
        device.launch(0.100)
        for work in works:
            work.wait()
        watched = [weakref.ref(work) for work in works]
        del work, works
        assert [None] * 6 == [reference() for reference in watched]
        found = comm.summary()
        assert 6 == found.find("all_reduce").pending
        assert [1, 2, 3, 4, 5, 6] == [op.sequence for op in found.unfinished]
        device.finish()
        op = (found := comm.summary()).find("all_reduce")
        assert (6, pytest.approx(0.010), False) == (op.count, op.mean_s, op.upper_bound)
        assert [] == found.unfinished
        assert 0 == device.calls["wait"]

    def test_a_capture_is_left_alone(self, device, ring, recorded):
        """While a capture is under way the recorder is not read, which would ask CUDA for events."""
        recorded(tensor(), async_op=True)
        device.finish()
        graph = comm.configure  # anything that can be referred to
        captures.begin(graph)
        comm.summary()
        captures.end(graph)
        assert 0 == ring.dumps
        assert 1 == comm.summary().find("all_reduce").count

    @pytest.mark.parametrize(("count", "blocks"), [(1, []), (3, []), (3, [3]), (1, [1])])
    def test_a_group_made_anew_under_the_same_name(self, device, ring, recorded, count, blocks):
        """Its operations have the numbers of those of the destroyed group, with entries and times that stay."""
        for _ in range(count):
            ring.issue(0.5)
        ring.coalesced = blocks
        device.finish()
        ring.destroy()
        ring.coalesced = []
        for _ in range(2):
            recorded(tensor(), async_op=True)
        assert 2 == comm.summary().find("all_reduce").pending
        device.finish()
        op = comm.summary().find("all_reduce")
        assert (2, pytest.approx(0.010), 0) == (op.count, op.mean_s, op.untimed)

    def test_operations_in_a_coalescing_block(self, device, ring, recorded):
        """NCCL launches them at the end of the block, behind their own events, with times that say nothing."""
        for _ in range(2):
            recorded(tensor(), async_op=True)
        device.finish()
        ring.coalesced = [2]
        op = comm.summary().find("all_reduce")
        assert (1, 1, 0) == (op.count, op.untimed, op.pending)

    def test_a_call_of_several_operations(self, device, ring, recorded):
        """PyTorch times a gather of unequal sizes on the group's stream, where a blocking one does not run."""
        ring.name = "nccl:ALLGATHER_coalesced"
        recorded(tensor(), async_op=True)
        comm.timed_op(lambda tensor, op=None, group=None: ring.issue(0.010) and None, name="all_reduce")(tensor())
        device.finish()
        op = comm.summary().find("all_reduce")
        assert (1, pytest.approx(0.010), 1, 0) == (op.count, op.mean_s, op.untimed, op.pending)

    def test_entries_that_were_overwritten(self, device, ring, recorded):
        """Operations that are older than the ring have no time, and are counted so."""
        for _ in range(5):
            recorded(tensor(), async_op=True)
        device.finish()
        ring.lost = 3
        op = comm.summary().find("all_reduce")
        assert (2, 3, 0) == (op.count, op.untimed, op.pending)

    def test_a_recorder_that_is_off(self, device, ring, recorded):
        """With TORCH_FR_BUFFER_SIZE=0 there are no entries: nothing is pending for ever, and the summary says why."""
        recorded(tensor(), async_op=True)
        ring.lost = 1
        found = comm.summary()
        assert (1, 0) == ((op := found.find("all_reduce")).untimed, op.pending)
        assert "the flight recorder is empty" in str(found)

    def test_it_is_read_before_the_ring_overflows(self, device, ring, recorded, monkeypatch):
        """Every thousand operations a thread reads it; the training thread does not."""
        started = []
        monkeypatch.setattr(_device.threading, "Thread", lambda **options: started.append(options) or options_thread)
        options_thread = types.SimpleNamespace(start=lambda: started[-1]["target"]())
        for _ in range(1001):
            recorded(tensor(), async_op=True).wait()
            device.finish()
        assert (1, 1) == (len(started), ring.dumps)

    def test_the_flush_of_a_run_reads_it(self, device, ring, recorded, monkeypatch, tmp_path):
        """A run has the durations without a summary. Reads that take too much of the time wait for the run's end."""
        clock = ManualClock()
        monkeypatch.setattr(_device.time, "monotonic", lambda: clock.now_ns() / 1e9)
        monkeypatch.setattr(_device.RECORDER, "_next_read", 0.0)
        dump = ring.dump

        def slow(*asked):
            clock.advance(0.020)
            return dump(*asked)

        ring.dump = slow
        with timer.Timer(run=RunLog(tmp_path, rank=0, flush_s=None)).run as log:
            for reads in (1, 1, 2):
                recorded(tensor(), async_op=True)
                device.finish()
                log.flush()
                assert reads == ring.dumps
                clock.advance(1.5)
            recorded(tensor(), async_op=True)
            device.finish()
            log.close()
        assert 3 == ring.dumps
        rows = Run.open(tmp_path).table("collectives").rows()
        assert [1, 2, 3, 4] == [row["sequence"] for row in rows]

    def test_a_handle_that_nobody_waits_for(self, device, all_reduce):
        """It is counted as not timed when it is dropped, and its event serves again."""
        for _ in range(50):
            all_reduce(tensor(), async_op=True)
        op = comm.summary().find("all_reduce")
        assert (0, 50, 0) == (op.count, op.untimed, op.pending)
        assert device.calls["new_event"] <= 3

    def test_a_batch_of_handles(self, device):
        """Several handles of one call end with the wait for the last of them."""
        batch = comm.timed_op(
            lambda tensor, group=None: [DeviceWork(device, 0.010), DeviceWork(device, 0.010)],
            name="batch",
            size=lambda tensor, group=None: tensor.nbytes,
        )
        for work in batch(tensor()):
            work.wait()
        device.finish()
        op = comm.summary().find("batch")
        assert (1, pytest.approx(0.020)) == (op.count, op.mean_s)


class ProcessGroupNCCL:
    """PyTorch's class of that name, for the name."""


class NcclGroup:
    """A group of NCCL's. The method that switches its timing on is the group's, not the backend's (PyTorch 2.11)."""

    def __init__(self, backend):
        self.backend, self.enabled = backend, 0

    def _get_backend(self, device):
        if self.backend is None:
            raise RuntimeError("no backend for it")
        return self.backend

    def _enable_collectives_timing(self):
        self.enabled += 1


def test_the_stand_in_has_pytorch_s_methods():
    """They are where PyTorch has them."""
    assert hasattr(plain.ProcessGroup, "_enable_collectives_timing")
    assert hasattr(plain.ProcessGroup, "_get_backend")
    backend = torch._C._distributed_c10d.Backend
    assert not hasattr(backend, "_enable_collectives_timing")


class TestEnabling:
    @pytest.fixture
    def recorder(self, monkeypatch):
        """A recorder that knows no group, in a PyTorch that has the flight recorder."""
        monkeypatch.setattr(_device, "_dump_function", lambda: bytes)
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
        yield _device.FlightRecorder()
        comm.configure(device_times="auto")

    def test_once_for_each_group(self, recorder):
        """A group of NCCL's is named once; one of another backend, or without one for the device, is not."""
        nccl, other, none = (NcclGroup(backend) for backend in (ProcessGroupNCCL(), object(), None))
        groups = [(_log.Group(each, "0", 2, 0, [0, 1]), each) for each in (nccl, other, none)]
        for _ in range(2):
            assert [True, False, False] == [recorder.enable(*group, "cuda:0") for group in groups]
        assert (1, 0, 0) == (nccl.enabled, other.enabled, none.enabled)
        assert "by PyTorch's flight recorder" in recorder.description()

    def test_not_where_it_would_change_the_overlap(self, recorder, monkeypatch):
        """With CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL's timed events end the overlap; one may ask for them by name."""
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        group = NcclGroup(ProcessGroupNCCL())
        assert not recorder.enable(_log.Group(group, "0", 2, 0, [0, 1]), group, "cuda:0")
        assert "(CUDA_DEVICE_MAX_CONNECTIONS=1)" in recorder.description()
        comm.configure(device_times="flight_recorder")
        assert recorder.enable(_log.Group(group, "1", 2, 0, [0, 1]), group, "cuda:0")
        assert 1 == group.enabled

    def test_not_if_events_are_asked_for(self, recorder):
        """``configure(device_times="stream_events")`` leaves NCCL as it is."""
        comm.configure(device_times="stream_events")
        group = NcclGroup(ProcessGroupNCCL())
        enabled = recorder.enable(_log.Group(group, "0", 2, 0, [0, 1]), group, "cuda:0")
        assert (False, 0) == (enabled, group.enabled)
        with pytest.raises(ValueError, match="choose one of auto, flight_recorder, stream_events"):
            comm.configure(device_times="own")


def test_the_device_of_the_tensor(monkeypatch):
    """An operation is marked on its tensor's device, whichever device is current: each has its own pool."""
    made = []

    class Clock(ManualDeviceClock):
        def __init__(self, device):
            super().__init__(device)
            made.append(device)

    monkeypatch.setattr(timer, "CudaEventClock", Clock)
    monkeypatch.setattr(_device, "_pools", {})
    names = ("cuda:0", "cuda:1", "cuda:1", "cpu")
    tensors = [types.SimpleNamespace(device=torch.device(name), is_cpu=name == "cpu") for name in names]
    pools = [_device.pool_for(each) for each in tensors]
    assert (["cuda:0", "cuda:1"], True, None) == (made, pools[1] is pools[2] is not pools[0], pools[3])


class Bucket:
    """One of DDP's, of a million bytes."""

    def __init__(self, index, last):
        self._index, self._last = index, last

    def index(self):
        """Its number."""
        return self._index

    def is_last(self):
        """Whether the backward pass ends with it."""
        return self._last

    def buffer(self):
        """Its gradients."""
        return tensor()


class TestBuckets:
    @pytest.fixture
    def backward(self, device, monkeypatch):
        """Runs a backward pass of two buckets of 10 ms each with that much computing between and after, in ms."""
        calls, works = [], []
        issue = [lambda seconds: DeviceWork(device, seconds)]
        monkeypatch.setattr(
            torch.autograd.Variable, "_execution_engine", types.SimpleNamespace(queue_callback=calls.append)
        )
        monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 1)

        class Future:
            def then(self, done):
                self.value = lambda: None
                done(self)
                return self

        def launch(_state, bucket):
            works.append(issue[0](0.010))
            return Future()

        send = _ddp._timed_hook(None, launch, None)

        def run(between, after, ring=None):
            if ring is not None:
                issue[0] = ring.issue
            send(None, Bucket(0, False))
            device.launch(between / 1e3)
            send(None, Bucket(1, True))
            device.launch(after / 1e3)
            while calls:
                call = calls.pop(0)
                call()
                if len(calls) == 1:
                    for work in works:
                        work.wait()
            device.finish()
            return [op for op in comm.summary(wait=True).ops if op.op == "ddp_hook"]

        return run

    @pytest.mark.parametrize(
        ("between", "after", "exposed"), [(12, 0, 10), (12, 4, 6), (12, 10, 0), (0, 0, 20), (0, 15, 5)]
    )
    def test_overlap(self, backward, ring, between, after, exposed):
        """Two buckets of 10 ms: their part behind the computing is exposed, the rest is overlap."""
        (op,) = backward(between, after, ring)
        assert (2, pytest.approx(0.010)) == (op.count, op.mean_s)
        assert pytest.approx(exposed / 1e3) == op.exposed_s
        assert pytest.approx(1 - exposed / 20) == op.overlap

    def test_a_backend_that_does_not_tell(self, backward):
        """Then the time of a bucket is not known, the total wait is, and no overlap is claimed."""
        (op,) = backward(12, 0)
        assert (0, 2, 0, None) == (op.count, op.untimed, op.pending, op.overlap)
        assert pytest.approx(0.010) == op.exposed_s
