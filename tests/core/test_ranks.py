"""Which rank this is, as launchers tell, and imports that stay light."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest

from deep500_timing import Timer, TimingWarning
from deep500_timing._distributed import launchers
from deep500_timing._distributed import launchers as _ranks
from deep500_timing._distributed.exchange import Exchange, Report, pack_reports, unpack_reports
from deep500_timing._distributed.transport import StoreTransport

LAUNCHERS = [name for row in launchers._LAUNCHERS for name in (row.rank, row.world_size)]


@pytest.fixture
def environment(monkeypatch):
    """No launcher."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_this_is_the_only_rank(environment):
    """One process: rank 0 of 1, and a snapshot says that nothing tells."""
    assert _ranks.rank_and_world() == (0, 1)
    snapshot = Timer().snapshot()
    assert (None, None) == (snapshot.rank, snapshot.world_size)


@pytest.mark.parametrize(("rank", "size"), [(row.rank, row.world_size) for row in launchers._LAUNCHERS])
def test_launchers_are_understood(environment, rank, size):
    """Each launcher's pair of variables serves; a snapshot bears them."""
    environment.setenv(rank, "3")
    environment.setenv(size, "8")
    assert _ranks.rank_and_world() == (3, 8)
    snapshot = Timer().snapshot()
    assert (3, 8) == (snapshot.rank, snapshot.world_size)


def test_torchs_variables_come_first(environment):
    """RANK and WORLD_SIZE are trusted over SLURM's."""
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("SLURM_STEP_NUM_TASKS", "2")
    environment.setenv("RANK", "5")
    environment.setenv("WORLD_SIZE", "8")
    assert _ranks.rank_and_world() == (5, 8)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("wallclock", ["torch", "numpy", "psutil", "tensorflow"]),
        ("megatron", ["torch", "numpy", "psutil", "tensorflow"]),
        ("throughput", ["torch", "numpy", "psutil", "tensorflow"]),
        ("flops", ["torch", "numpy", "psutil", "tensorflow"]),
        ("memory", ["torch", "numpy", "psutil", "tensorflow"]),
    ],
)
def test_importing_costs_no_framework(module, absent):
    """The modules of the core import neither a framework nor numpy; using the timers does not import torch."""
    program = (
        f"import sys, deep500_timing.{module}\n"
        f"assert not [name for name in {absent!r} if name in sys.modules]\n"
        "from deep500_timing.wallclock import SynchronizedWallClockTimer\n"
        "timers = SynchronizedWallClockTimer()\n"
        "timers('x').start(); timers('x').stop(); timers.log(['x'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert (0, "") == (done.returncode, done.stderr)


class Store:
    """A job's store in one process."""

    def __init__(self):
        self.values = {}
        self.fault = None
        self.on_look = None

    def set(self, key, value):
        """Put a value."""
        if self.fault:
            raise self.fault
        self.values[key] = value

    def get(self, key):
        """Get it."""
        return self.values[key]

    def check(self, keys):
        """Whether all are there."""
        if self.fault:
            raise self.fault
        if self.on_look:
            self.on_look(keys)
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        """Count."""
        if self.fault:
            raise self.fault
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def delete_key(self, key):
        """Remove one."""
        return self.values.pop(key, None) is not None


class Job:
    """Stands for ``torch.distributed`` as one rank of three sees it; real ranks are in tests/torch."""

    def __init__(self, store):
        self.rank = 0
        self.initialized = True
        self.barriers = []
        self.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: store)

    def is_available(self):
        """Always."""
        return True

    def is_initialized(self):
        """As the test says."""
        return self.initialized

    def get_rank(self):
        """The rank that the test looks from."""
        return self.rank

    def get_world_size(self):
        """Three ranks."""
        return 3

    def barrier(self, group=None):
        """Note it."""
        self.barriers.append(group)


def ranks_of(store):
    """The exchange of three ranks over one store."""
    return [Exchange("x", transport=StoreTransport(store, rank, 3, restarts=True)) for rank in range(3)]


class TestInAJob:
    @pytest.fixture
    def store(self):
        """The job's store."""
        return Store()

    @pytest.fixture
    def job(self, store, monkeypatch, environment):
        """A job of three."""
        environment.setenv("RANK", "7")
        environment.setenv("WORLD_SIZE", "8")
        job = Job(store)
        monkeypatch.setitem(sys.modules, "torch.distributed", job)
        return job

    def test_its_rank_is_trusted_over_the_environment(self, job):
        """An initialised job knows best; one that is not initialised says nothing."""
        assert _ranks.rank_and_world() == (0, 3)
        job.initialized = False
        assert _ranks.rank_and_world() == (7, 8)

    def test_a_broken_module_is_none(self, job):
        """What raises when it is asked is passed over."""
        job.is_initialized = lambda: 1 / 0
        assert _ranks.rank_and_world() == (7, 8)

    def test_a_rank_that_cannot_be_had_is_unknown(self, job):
        """A snapshot is taken all the same."""
        job.get_rank = lambda: 1 / 0
        assert (None, None) == _ranks.known_rank_and_world()

    def test_barriers_are_the_jobs(self, job):
        """A barrier waits for the group, and for nobody outside a job."""
        _ranks.wait_for_ranks("group")
        job.initialized = False
        _ranks.wait_for_ranks("group")
        assert job.barriers == ["group"]

    def test_reports_are_handed_over(self, store):
        """A rank that gathers has the report of every rank that has posted, its own included."""
        exchanges = ranks_of(store)
        for rank, exchange in enumerate(exchanges):
            exchange.post(b"report %d" % rank)
        answers = exchanges[1].gather(b"own")
        assert {0: b"report 0", 1: b"own", 2: b"report 2"} == answers.reports
        assert ([], None) == (answers.missing, answers.fault)

    def test_a_silent_rank_is_missing_after_the_deadline(self, store):
        """Waiting has an end."""
        first, second, _ = ranks_of(store)
        first.post(b"report 0")
        second.post(b"report 1")
        answers = second.gather(b"own", deadline_s=2.0)  # A busy machine may need that long for the other one.
        assert ({0: b"report 0", 1: b"own"}, [2]) == (answers.reports, answers.missing)

    def test_a_late_rank_is_waited_for(self, store):
        """A report that comes within the deadline counts."""
        exchanges = ranks_of(store)
        exchanges[0].post(b"report 0")
        looks = iter(range(100))

        def look(key):
            if next(looks) == 6:
                for rank in (1, 2):
                    message = pack_reports([Report(1, time.time(), b"report %d" % rank)])
                    store.set(f"deep500_timing/gather/x/posted/1/report/-1/{rank}", message)

        store.on_look = look
        assert {0: b"own", 1: b"report 1", 2: b"report 2"} == exchanges[0].gather(b"own").reports

    def test_old_reports_leave_the_store(self, store):
        """However long the run, a rank has one report in it; of numbered steps a handful."""
        exchange, *_ = ranks_of(store)
        for number in range(100):
            exchange.post(b"%d" % number)
            exchange.flush(30)
        # That it has begun, and the report.
        assert ["begun", "posted"] == sorted({key.split("/")[2 if "begun" in key else 3] for key in store.values})
        assert 2 == len(store.values)
        for number in range(100):
            exchange.post(b"%d" % number, step=number)
            exchange.flush(30)
        assert 2 + 4 == len(store.values)

    def test_with_a_fault_no_rank_is_missing(self, store):
        """A rank that could not be asked is not said to be silent, in either way to take part."""
        store.fault = OSError("connection lost\nand more")
        exchange, *_ = ranks_of(store)
        with pytest.warns(TimingWarning, match="OSError: connection lost"):
            exchange.post(b"report")
            exchange.flush(30)
        for answers in (exchange.gather(b"own"), exchange.round(b"own", b"".join, 5.0)):
            assert ({0: b"own"}, [], "OSError: connection lost") == (answers.reports, answers.missing, answers.fault)

    def test_another_process_group_begins_again(self, job, store):
        """A store that has seen nothing of the exchange is not asked for the rounds of the one before."""
        exchange = Exchange("x")
        exchange.post(b"in the first")
        assert exchange.flush(30)
        other = Store()
        job.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: other)
        exchange.post(b"in the second")
        assert exchange.flush(30)
        begun, report = other.values
        assert "deep500_timing/gather/begun/x/posted/0" == begun
        assert "deep500_timing/gather/x/posted/1/report/-1/0" == report
        assert [b"in the second"] == [one.payload for one in unpack_reports(other.values[report])]

    def test_a_job_without_a_store_costs_a_warning(self, job):
        """As on a release of PyTorch that has another name for it."""
        del job.distributed_c10d
        exchange = Exchange("x")
        with pytest.warns(TimingWarning, match="store cannot be had"):
            exchange.post(b"report")
        answers = exchange.gather(b"own")
        assert ({0: b"own"}, [1, 2]) == (answers.reports, answers.missing)
        assert b"own" == exchange.round(b"own", lambda reports: reports[0], 5.0).combined
