"""A report of all ranks over every transport, in time, whatever becomes of some of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace
from pathlib import Path

import pytest
import suite_coverage

from deep500_timing import Timer
from deep500_timing._distributed import exchange
from deep500_timing._distributed import gather as _gather
from deep500_timing._distributed import transport as _transport
from deep500_timing._distributed.exchange import line_of
from deep500_timing._distributed.launchers import discover_launch, known_rank_and_world
from deep500_timing.ranks import (
    AloneTransport,
    FolderTransport,
    Gatherer,
    LiveReport,
    MpiTransport,
    StoreTransport,
    check_transport,
    find_transport,
    gather,
)
from deep500_timing.testing import ManualClock

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

WORKERS = Path(__file__).parent / "workers"


class Memory:
    """The least that a store must do; `asked` counts its requests."""

    def __init__(self):
        self.values = {}
        self.asked = 0
        self.lock = threading.Lock()

    def set(self, key, value):
        """Put a value."""
        with self.lock:
            self.asked += 1
            self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        """Get it."""
        with self.lock:
            self.asked += 1
            return self.values[key]

    def check(self, keys):
        """Whether all are there."""
        with self.lock:
            self.asked += 1
            return all(key in self.values for key in keys)

    def delete_key(self, key):
        """Remove one."""
        with self.lock:
            return self.values.pop(key, None) is not None


class Able(Memory):
    """A store that can do all that TCPStore can."""

    def multi_get(self, keys):
        """Get several by one request."""
        with self.lock:
            self.asked += 1
            return [self.values[key] for key in keys]


def of_store(store, world_size):
    """A transport for each rank."""
    return [StoreTransport(store, rank, world_size) for rank in range(world_size)]


def _torch_store(kind, folder):
    plain = pytest.importorskip("torch.distributed")
    if kind == "hash":
        return plain.HashStore()
    if kind == "file":
        return plain.FileStore(str(folder / "store"), 4)
    server = plain.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return plain.PrefixStore("default", server)


@pytest.fixture(params=["least store", "able store", "hash", "tcp", "file", "folder"])
def transports(request, tmp_path):
    """Four ranks that are threads of this process, over each transport that lets them."""
    if request.param == "folder":
        return [FolderTransport(tmp_path / "messages", rank=rank, world_size=4) for rank in range(4)]
    if request.param.endswith("store"):
        return of_store(Memory() if request.param.startswith("least") else Able(), 4)
    return of_store(_torch_store(request.param, tmp_path), 4)


def at_once(work, items):
    """Do something with each of several at the same time; gives what came of it, in order."""
    results, faults = {}, []

    def run(place, item):
        try:
            results[place] = work(item)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(place, item)) for place, item in enumerate(items)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [] == faults
    return [results[place] for place in range(len(threads))]


def snapshot(rank, times_ms=(1.0,)):
    """A snapshot with one region."""
    clock = ManualClock()
    timer = Timer(clock=clock)
    for time_ms in times_ms:
        with timer.region("BATCH"):
            clock.advance(time_ms * 1e-3)
    return replace(timer.snapshot(), host=f"host{rank // 2}")


def test_every_transport_does_what_the_contract_says(transports):
    """Each message arrives once, whole, where it was sent; nothing waits; what is withdrawn is gone."""
    at_once(check_transport, transports)


def test_a_message_that_was_withdrawn_is_gone(transports):
    """Where the sender can still reach it."""
    transports[1].send("t", 0, b"message")
    transports[1].withdraw("t", 0)
    assert {} == transports[0].take("t", 0, range(4))


def test_a_world_of_one_does_so_too():
    """A single process is a world of one."""
    check_transport(AloneTransport())


@pytest.mark.parametrize("transports", ["hash", "tcp"], indirect=True)
def test_a_topic_that_is_used_again_and_again_stays_small(transports):
    """What a store keeps of it, and what each look reads, does not grow with the number of messages."""
    store = transports[0]._store
    before = store.num_keys()
    for number in range(50):
        for senders in ([1], [1, 2, 3]):
            for sender in senders:
                transports[sender].send("ask", 0, b"%d" % number)
            found = transports[0].take("ask", 0, [1, 2, 3])
            assert dict.fromkeys(senders, b"%d" % number) == found
        assert {} == transports[0].take("ask", 0, [1, 2, 3])
    assert before == store.num_keys()


def test_all_ranks_are_in_the_report(transports):
    """Rank 0 has the report, round after round, and the others go on with nothing."""
    gatherers = [Gatherer(transport) for transport in transports]
    for number in range(1, 4):
        found = at_once(lambda g, n=number: g.gather(snapshot(g.transport.rank, [n + g.transport.rank])), gatherers)
        assert [None, None, None] == found[1:]
        assert ((0, 1, 2, 3), (), None) == (found[0].ranks, found[0].missing, found[0].fault)
        assert {rank: pytest.approx((number + rank) * 1e-3) for rank in range(4)} == found[0].of_ranks("BATCH")
        assert ("host0", "host0", "host1", "host1") == found[0].hosts


def test_who_leaves_nothing_is_missing(transports):
    """The deadline holds, and the others are in the report."""
    begun = time.monotonic()
    Gatherer(transports[2]).gather(snapshot(2))
    report = Gatherer(transports[0]).gather(snapshot(0), deadline_s=1.0)
    assert ((0, 2), (1, 3), None) == (report.ranks, report.missing, report.fault)
    assert time.monotonic() - begun < 20


def test_ranks_are_matched_by_step(transports):
    """Where the step is said, a rank that has called once more than the others is in the right report."""
    ahead, root = (Gatherer(transports[rank], ranks=[0, 1]) for rank in (1, 0))
    for step in (10, 20):
        ahead.gather(snapshot(1, [step]), step=step)
    assert ahead.flush(30)
    for step in (10, 20):
        report = root.gather(snapshot(0), step=step)
        assert ({1: pytest.approx(step * 1e-3)}, step) == ({1: report.of_ranks("BATCH")[1]}, report.step)


def test_a_mailbox_that_is_removed_meanwhile(tmp_path, monkeypatch):
    """Who has taken the last message removes the folder that another rank is about to write into: it makes it again."""
    transport = FolderTransport(tmp_path / "messages", rank=1, world_size=2)
    made, makedirs = [], os.makedirs

    def make(path, **settings):
        makedirs(path, **settings)
        made.append(path)
        if len(made) < 3:
            Path(path).rmdir()

    monkeypatch.setattr(os, "makedirs", make)
    transport.send("t", 0, b"message")
    assert {1: b"message"} == transport.take("t", 0, [1])
    monkeypatch.setattr(os, "makedirs", lambda path, **settings: None)
    with pytest.raises(FileNotFoundError):
        transport.send("t", 0, b"message")


def test_a_part_of_the_ranks(transports):
    """Some ranks gather among themselves, such as those of a machine, and the smallest has the report."""
    gatherers = [Gatherer(transports[rank], ranks=[2, 3]) for rank in (2, 3)]
    report, nothing = at_once(lambda g: g.gather(snapshot(g.transport.rank)), gatherers)
    assert ((2, 3), (), None) == (report.ranks, report.missing, nothing)
    with pytest.raises(ValueError, match="this is rank 1, not one of them"):
        Gatherer(transports[1], ranks=[2, 3])


def test_messages_do_not_pile_up():
    """Rank 0 takes what it reads; of a rank whose messages nobody takes a handful stay."""
    store = Able()
    first, second = of_store(store, 2)
    gatherers = [Gatherer(first), Gatherer(second)]
    for _ in range(20):
        at_once(lambda g: g.gather(snapshot(g.transport.rank)), gatherers)
    assert len(store.values) < 10
    for number in range(50):
        gatherers[1].gather(snapshot(1), step=number)
        assert gatherers[1].flush(30)
    assert len(store.values) < 20


class Calls:
    """Two ranks that gather without a step, over a folder, as a script that calls gather() in each step of 100 s."""

    def __init__(self, folder, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr(exchange, "time", types.SimpleNamespace(
            time=lambda: self.now_s, monotonic=time.monotonic, sleep=time.sleep))  # fmt: skip
        self.clock = ManualClock()
        self.timers = [Timer(clock=self.clock) for _ in range(2)]
        self.transports = [FolderTransport(folder, rank=rank, world_size=2) for rank in range(2)]

    def step(self, calls_of_rank_1=1, deadline_s=5.0):
        """Both ranks work for a step; rank 1 gathers so often, then rank 0 does."""
        self.now_s += 100
        for timer in self.timers:
            with timer.region("BATCH"):
                self.clock.advance(1e-3)
        for _ in range(calls_of_rank_1):
            gather(self.timers[1].snapshot(), transport=self.transports[1])
        assert line_of(self.transports[1]).connection.flush(30)
        report = gather(self.timers[0].snapshot(), transport=self.transports[0], deadline_s=deadline_s)
        return report.of_ranks("BATCH", "count"), report.missing, report.ahead


@pytest.mark.parametrize("extra", [2, 0])
def test_a_call_too_many_or_too_few_heals_in_the_next_round(tmp_path, monkeypatch, extra):
    """Without step=, each snapshot counts for its own round, and the report says that the calls differ."""
    calls = Calls(tmp_path, monkeypatch)
    assert ({0: 1, 1: 1}, (), {}) == calls.step()
    found = [calls.step(extra, 0.5), calls.step(), calls.step(), calls.step()]
    if extra:
        assert [({0: n, 1: n}, ()) for n in (2, 3, 4, 5)] == [of[:2] for of in found]
        assert [{1: 1}, {}, {}, {}] == [of[2] for of in found]
    else:
        assert ({0: 2}, (1,), {}) == found[0]
        assert [({0: n, 1: n}, ()) for n in (3, 4, 5)] == [of[:2] for of in found[1:]]
        # Of two ranks, the one that has called more often is ahead.
        assert [{0: 1}, {}, {}] == [of[2] for of in found[1:]]


def test_a_newer_snapshot_is_waited_for_where_the_newest_one_is_old(tmp_path, monkeypatch):
    """A call too many just after a round leaves a snapshot that the next round finds; the right one follows."""
    now = [1000.0]
    monkeypatch.setattr(exchange, "time", types.SimpleNamespace(
        time=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep))  # fmt: skip
    monkeypatch.setattr(exchange, "_PATIENCE_S", 30.0)
    first, second = (exchange.Exchange("x", transport=one) for one in of_store(Able(), 2))

    def post(text):
        second.post(text, to=0)
        assert second.flush(30)

    post(b"1")
    assert b"1" == first.gather(b"own", to=0).reports[1]
    now[0] += 1
    post(b"1 again")
    now[0] += 999  # The interval between two rounds is 1 000 s.
    later = threading.Timer(0.2, post, [b"2"])
    later.start()
    answers = first.gather(b"own", 60.0, to=0)
    later.join()
    assert (b"2", {1: 1}) == (answers.reports[1], answers.ahead)


@pytest.mark.parametrize("interval_s", [0.001, 100.0])
def test_a_rank_that_posts_several_times_in_a_row(monkeypatch, interval_s):
    """Each of its reports answers one round, in their order, however long the rounds before took."""
    now = [1000.0]
    monkeypatch.setattr(exchange, "time", types.SimpleNamespace(
        time=lambda: now[0], monotonic=time.monotonic, sleep=time.sleep))  # fmt: skip
    first, second = (exchange.Exchange("x", transport=one) for one in of_store(Able(), 2))
    begun = time.monotonic()
    for burst in range(3):
        now[0] += interval_s
        for number in range(12):
            second.post(b"%d.%d" % (burst, number), to=0)
        assert second.flush(30)
        for number in range(12):
            now[0] += 1e-3
            assert {0: b"own", 1: b"%d.%d" % (burst, number)} == first.gather(b"own", 60.0, to=0).reports
    assert time.monotonic() - begun < 30


def test_a_killed_rank_costs_the_deadline_twice(tmp_path, monkeypatch):
    """After two silent rounds a rank is looked at without waiting; when it is back, it is in the report at once."""
    calls = Calls(tmp_path, monkeypatch)
    calls.step()
    for _ in range(2):
        assert (1,) == calls.step(0, 0.5)[1]
    begun = time.monotonic()
    assert (1,) == calls.step(0, 60.0)[1]
    assert time.monotonic() - begun < 20
    assert ({0: 5, 1: 5}, ()) == calls.step()[:2]


def test_the_training_thread_does_not_pack(tmp_path):
    """A rank that leaves its snapshot goes on before that is packed; the transport has it a moment later."""
    packed = threading.Event()
    release = threading.Event()

    class Slow(Able):
        def set(self, key, value):
            release.wait(300)
            super().set(key, value)
            packed.set()

    _, second = of_store(store := Slow(), 2)
    gatherer = Gatherer(second)
    assert None is gatherer.gather(snapshot(1))
    assert not packed.is_set()
    release.set()
    assert gatherer.flush(30)
    assert 8000 >= max(map(len, store.values.values()))


def test_a_store_that_fails_costs_a_line():
    """With a fault nobody is called missing, and nothing is raised, on rank 0 and elsewhere."""

    class Broken(Memory):
        def check(self, keys):
            raise OSError("connection lost\nand more")

        set = check

    first, second = of_store(store := Broken(), 2)
    store.set = lambda key, value: store.check(key)
    with pytest.warns(match="OSError: connection lost"):
        gatherer = Gatherer(second)
        assert None is gatherer.gather(snapshot(1))
        assert gatherer.flush(30)
    report = Gatherer(first).gather(snapshot(0))
    assert ((0,), (), "OSError: connection lost") == (report.ranks, report.missing, report.fault)


def test_a_store_that_hangs_keeps_nobody():
    """A request that never ends does not outlast the deadline, and later calls return at once."""
    release = threading.Event()

    class Hanging(Memory):
        def check(self, keys):
            release.wait()
            return False

    (first, _), begun = of_store(Hanging(), 2), time.monotonic()
    gatherer = Gatherer(first)
    for deadline_s in (0.2, 2.0):
        report = gatherer.gather(snapshot(0), deadline_s=deadline_s)
        assert ((0,), (), "the store does not answer") == (report.ranks, report.missing, report.fault)
    assert time.monotonic() - begun < 30
    release.set()


def test_few_requests_however_many_ranks():
    """A thousand ranks that have arrived are read by a handful of requests; polling for two costs a handful each."""
    store = Able()
    transports = of_store(store, 1000)
    for transport in transports[2:]:
        transport.send("t", 0, b"x" * 2000)
    store.asked = 0
    assert 998 == len(transports[0].take("t", 0, range(1000)))
    assert 60 > store.asked
    store.asked = 0
    assert {} == transports[0].take("t", 0, [0, 1])
    assert 5 > store.asked


class TestFindingATransport:
    @pytest.fixture(autouse=True)
    def _nothing_set(self, monkeypatch):
        """No launcher, no folder, nothing remembered."""
        for name in ("RANK", "WORLD_SIZE", "TF_CONFIG", "DEEP500_TIMING_GATHER", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
            monkeypatch.delenv(name, raising=False)
        _gather._forget()
        _transport._forget()

    def test_a_single_process(self):
        """It is a world of one: its report has it, and nobody is missing."""
        report = gather(snapshot(0))
        assert ((0,), 1, (), None) == (report.ranks, report.world_size, report.missing, report.fault)
        assert 1e-3 == pytest.approx(report.get("BATCH").stats.mean)

    def test_a_job_that_nothing_connects(self, monkeypatch):
        """The report has this rank, calls nobody missing, and says what to do."""
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "3")
        report = gather(snapshot(1))
        assert ((1,), (), 3) == (report.ranks, report.missing, report.world_size)
        assert "nothing connects the 3 ranks: pass transport=" in report.fault

    def test_a_folder_by_name(self, monkeypatch, tmp_path):
        """DEEP500_TIMING_GATHER serves where there is no store."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("DEEP500_TIMING_GATHER", str(tmp_path))
        for rank in (1, 0):
            monkeypatch.setenv("RANK", str(rank))
            report = gather(snapshot(rank))
            assert line_of(find_transport()).connection.flush(30)
        assert (0, 1) == report.ranks

    def test_tensorflows_workers(self, monkeypatch, tmp_path):
        """TF_CONFIG tells rank and size; the chief is rank 0, and parameter servers and evaluators are no ranks."""
        cluster = {"chief": ["a:1"], "worker": ["a:2", "b:1", "b:2"], "ps": ["c:1"]}
        for kind, index, expected in (("chief", 0, (0, 4)), ("worker", 2, (3, 4)), ("ps", 0, (None, None))):
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}}))
            assert expected == known_rank_and_world()
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": "2"}}))
        launch = discover_launch()
        assert ("TF_CONFIG", 1, 2, "a") == (
            launch.launcher, launch.local_rank, launch.local_world_size, launch.master)  # fmt: skip
        for broken in ("{", "[]", "{}", '{"cluster": 1, "task": {"type": "worker", "index": 0}}', "null"):
            monkeypatch.setenv("TF_CONFIG", broken)
            assert "none" == discover_launch().launcher

    def test_a_job_of_torch(self, monkeypatch):
        """Its store serves, and is not kept alive by it."""
        stores = [Able()]
        job = types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 2,
            distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: stores[0]),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch.distributed", job)
        gather(snapshot(1))
        assert line_of(find_transport()).connection.flush(30)
        assert any("gather" in key for key in stores[0].values)
        transport = find_transport()
        assert transport is find_transport()
        job.distributed_c10d = types.SimpleNamespace(_get_default_store=Able)
        stores.clear()
        with pytest.raises(RuntimeError, match="process group has been destroyed"):
            transport.take("t", 0, [1])


class TestLive:
    def test_a_report_every_so_many_steps(self, tmp_path):
        """What came since the last one, as a line of a file and to whoever asked."""
        first, second = of_store(Able(), 2)
        clock, reports = ManualClock(), []
        timers = [Timer(clock=clock), Timer(clock=clock)]
        live = [
            LiveReport(timers[0].snapshot, every=10, folder=tmp_path, on_report=reports.append, transport=first),
            LiveReport(timers[1].snapshot, every=10, folder=tmp_path, transport=second),
        ]
        for number in range(1, 31):
            for timer in timers:
                with timer.region("BATCH"):
                    clock.advance(0.001 * number)
            for one in (live[1], live[0]):
                one.step(number)
                assert one.wait(300)
        assert [10, 20, 30] == [report.step for report in reports]
        assert [20, 20, 20] == [report.get("BATCH").stats.count for report in reports]
        assert sum(range(21, 31)) * 2e-3 == pytest.approx(reports[2].get("BATCH").stats.total)
        lines = [json.loads(line) for line in (tmp_path / "gathered-0.jsonl").read_text().splitlines()]
        assert [(10, [0, 1]), (20, [0, 1]), (30, [0, 1])] == [(line["step"], line["ranks"]) for line in lines]
        assert [tmp_path / "gathered-0.jsonl"] == list(tmp_path.iterdir())

    def test_a_report_after_the_process_group_has_begun_anew(self, monkeypatch):
        """Over the store that the job has then; between the two, a report costs a warning."""
        _gather._forget()
        _transport._forget()
        monkeypatch.delenv("DEEP500_TIMING_GATHER", raising=False)
        stores, reports = [Able()], []
        job = types.SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: bool(stores),
            get_rank=lambda: 0, get_world_size=lambda: 2,
            distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: stores[0]),
        )  # fmt: skip
        monkeypatch.setitem(sys.modules, "torch.distributed", job)
        live = LiveReport(lambda: snapshot(0), every=1, on_report=reports.append, deadline_s=5.0)
        for number in (1, 2, 3):
            if stores:
                other = LiveReport(lambda: snapshot(1), every=1, transport=StoreTransport(stores[0], 1, 2))
                other.step(number)
                assert other.wait(300)
                del other
            live.step(number)
            assert live.wait(300)
            stores[:] = [] if number == 1 else [Able()]
        everybody, destroyed = ((0, 1), (), None), "RuntimeError: the process group has been destroyed"
        found = [(report.ranks, report.missing, report.fault) for report in reports]
        assert [everybody, ((0,), (), destroyed), everybody] == found

    def test_a_report_that_fails_costs_a_warning(self):
        """Whatever the fault, the loop goes on, and the next report is made."""
        live = LiveReport(lambda: 1 / 0, every=1)
        with pytest.warns(match="ZeroDivisionError"):
            live.step(1)
            assert live.wait(300)
        live.step(2)
        assert live.wait(300)
        assert 0 == live.skipped

    def test_a_report_that_is_under_way_is_not_waited_for(self):
        """The next one is left out and counted."""
        go, begun = threading.Event(), threading.Event()

        def slow():
            begun.set()
            go.wait(300)
            return snapshot(0)

        live = LiveReport(slow, every=1, transport=AloneTransport())
        live.step(1)
        assert begun.wait(300)
        assert not live.wait(0)
        live.step(2)
        assert 1 == live.skipped
        go.set()
        assert live.wait(300)

    def test_the_ranks_of_a_machine(self, monkeypatch):
        """As the launcher tells, or an error that says what to do."""
        for name, value in (("RANK", 5), ("WORLD_SIZE", 8), ("LOCAL_RANK", 1), ("LOCAL_WORLD_SIZE", 4)):
            monkeypatch.setenv(name, str(value))
        live = LiveReport(lambda: snapshot(0), every=1, ranks="node")
        assert [4, 5, 6, 7] == live._ranks
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        with pytest.raises(ValueError, match="does not tell how many ranks this machine has"):
            LiveReport(lambda: snapshot(0), every=1, ranks="node")
        with pytest.raises(ValueError, match="1 or more"):
            LiveReport(lambda: snapshot(0), every=0)


def why_no_mpi():
    """Return why MPI cannot be tried here, or None."""
    if shutil.which("mpirun") is None:
        return "needs mpirun, as of Debian's openmpi-bin"
    return None


@pytest.mark.slow
def test_ranks_of_mpi(tmp_path):
    """Three processes under mpirun: the contract, reports with all of them, and one that leaves nothing."""
    pytest.importorskip("mpi4py", reason="needs mpi4py")
    if (reason := why_no_mpi()) is not None:
        pytest.skip(reason)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "3", sys.executable]
    environment = {**os.environ, **suite_coverage.of_a_child(), "OMP_NUM_THREADS": "1"}
    command += [str(WORKERS / "mpi_gather.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert [[[0, 1, 2], []]] * 3 + [[[0, 2], [1]]] == found


def test_mpi_without_its_package(monkeypatch):
    """The error names the extra."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", None)
    with pytest.raises(ImportError, match=r"deep500-timing\[mpi\]"):
        MpiTransport()
