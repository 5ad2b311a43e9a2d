"""Which rank this is, as launchers tell, and imports that stay light."""

from __future__ import annotations

import subprocess
import sys
import time
import types

import pytest
from made_stores import Memory

from deep500_timing import Timer, TimingWarning
from deep500_timing._distributed import launchers
from deep500_timing._distributed import launchers as _ranks
from deep500_timing._distributed.exchange import Exchange
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


class Job:
    """Stands for ``torch.distributed`` as one rank of three sees it; real ranks are in tests/torch."""

    def __init__(self, store):
        self.rank = 0
        self.initialized = True
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


class TestInAJob:
    @pytest.fixture
    def store(self):
        """The job's store."""
        return Memory()

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

    def test_with_a_fault_no_rank_is_missing(self, store):
        """A rank that could not be asked is not said to be silent."""
        store.fault = OSError("connection lost\nand more")
        exchange = Exchange("x", str, dict, dict, transport=StoreTransport(store, 0, 3))
        answers = exchange.round("own", 5.0)
        assert ({"0": "own"}, [], "OSError: connection lost") == (answers.result, answers.missing, answers.fault)

    def test_another_process_group_begins_again(self, job, store, monkeypatch):
        """The store of now is asked, and nothing is left in either. The wait is over once it was asked."""
        other, passed_s = Memory(), {}
        clock = types.SimpleNamespace(sleep=time.sleep, monotonic=lambda: time.monotonic() + sum(passed_s.values()))
        for name in ("exchange", "connection"):
            monkeypatch.setattr(f"deep500_timing._distributed.{name}.time", clock)
        store.on_look = lambda _: passed_s.update(first=290.0)
        other.on_look = lambda _: passed_s.update(second=290.0)
        exchange = Exchange("x", str, dict, dict)
        job.rank = 1
        assert [0, 2] == exchange.round("in the first", 300.0).missing
        job.distributed_c10d = types.SimpleNamespace(_get_default_store=lambda: other)
        assert [0, 2] == exchange.round("in the second", 300.0).missing
        assert {} == other.values == store.values
        assert other.asked

    def test_a_job_without_a_store_costs_a_warning(self, job):
        """As on a release of PyTorch that has another name for it."""
        del job.distributed_c10d
        with pytest.warns(TimingWarning, match="store cannot be had"):
            answers = Exchange("x", str, dict, dict).round("own")
        assert ({"0": "own"}, [1, 2]) == (answers.result, answers.missing)
