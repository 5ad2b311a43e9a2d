"""Which rank this is, as launchers tell, and imports that stay light."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from deep500_timing import Timer, TimingWarning
from deep500_timing._ranks import exchange as _exchange
from deep500_timing._ranks import launchers
from deep500_timing._ranks import place as _ranks

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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (0, "") == (done.returncode, done.stderr)


class Store:
    """A job's store in one process."""

    def __init__(self):
        self.texts = {}
        self.fault = None

    def set(self, key, text):
        """Put a text."""
        if self.fault:
            raise self.fault
        self.texts[key] = text.encode()

    def get(self, key):
        """Get it."""
        return self.texts[key]

    def check(self, keys):
        """Whether all are there."""
        if self.fault:
            raise self.fault
        return all(key in self.texts for key in keys)

    def delete_key(self, key):
        """Remove one."""
        return self.texts.pop(key, None) is not None


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

    def test_texts_are_handed_over(self, job):
        """Who reads has the text of every rank that has posted, its own included."""
        exchanges = [_exchange.Exchange("x") for _ in range(3)]
        for job.rank, exchange in enumerate(exchanges):
            exchange.post(f"text {job.rank}")
        job.rank = 1
        assert exchanges[1].read("own") == {0: "text 0", 1: "own", 2: "text 2"}

    def test_a_silent_rank_is_absent_after_the_deadline(self, job):
        """Waiting has an end."""
        first, second = _exchange.Exchange("x"), _exchange.Exchange("x")
        first.post("text 0")
        job.rank = 1
        second.post("text 1")
        assert second.read("own", deadline_s=0.01) == {0: "text 0", 1: "own"}

    def test_a_late_rank_is_waited_for(self, job, store, monkeypatch):
        """A text that comes within the deadline counts."""
        exchange = _exchange.Exchange("x")
        exchange.post("text 0")

        def come(_):
            for rank in (1, 2):
                store.set(f"deep500_timing/x/1/{rank}", f"text {rank}")

        monkeypatch.setattr(_exchange, "time", types.SimpleNamespace(monotonic=lambda: 0.0, sleep=come))
        assert exchange.read("own") == {0: "own", 1: "text 1", 2: "text 2"}

    def test_old_rounds_leave_the_store(self, job, store):
        """However long the run, a rank has a handful of texts in it."""
        exchange = _exchange.Exchange("x")
        for number in range(100):
            exchange.post(str(number))
        assert len(store.texts) == _exchange._KEPT_ROUNDS
        assert store.texts["deep500_timing/x/100/0"] == b"99"

    def test_a_store_that_fails_costs_a_warning(self, job, store):
        """A report without the others, and no error."""
        store.fault = OSError("connection lost")
        exchange = _exchange.Exchange("x")
        with pytest.warns(TimingWarning, match="Handing times.*connection lost"):
            exchange.post("text")
        with pytest.warns(TimingWarning, match="Asking the other ranks.*connection lost"):
            assert exchange.read("own") == {0: "own"}

    def test_a_job_without_a_store_costs_a_warning(self, job):
        """As on a release of PyTorch that has another name for it."""
        del job.distributed_c10d
        exchange = _exchange.Exchange("x")
        with pytest.warns(TimingWarning, match="store cannot be had"):
            exchange.post("text")
        assert exchange.read("own") == {0: "own"}
