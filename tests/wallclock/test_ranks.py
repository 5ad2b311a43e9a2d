"""Which rank this is, as launchers tell, and imports that stay light."""

from __future__ import annotations

import subprocess
import sys

import pytest

from deep500_timing import _ranks

LAUNCHERS = [name for pair in _ranks._LAUNCHERS for name in pair]


@pytest.fixture
def environment(monkeypatch):
    """No launcher."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_this_is_the_only_rank(environment):
    """One process: rank 0 of 1."""
    assert _ranks.rank_and_world() == (0, 1)


@pytest.mark.parametrize(("rank", "size"), _ranks._LAUNCHERS)
def test_launchers_are_understood(environment, rank, size):
    """Each launcher's pair of variables serves."""
    environment.setenv(rank, "3")
    environment.setenv(size, "8")
    assert _ranks.rank_and_world() == (3, 8)


def test_torchs_variables_come_first(environment):
    """RANK and WORLD_SIZE are trusted over SLURM's."""
    environment.setenv("SLURM_PROCID", "1")
    environment.setenv("SLURM_STEP_NUM_TASKS", "2")
    environment.setenv("RANK", "5")
    environment.setenv("WORLD_SIZE", "8")
    assert _ranks.rank_and_world() == (5, 8)


@pytest.mark.parametrize(("rank", "size"), [("3", ""), ("x", "8"), ("8", "8"), ("", "4"), ("-1", "4")])
def test_half_a_pair_or_nonsense_is_passed_over(environment, rank, size):
    """What cannot be a rank is none."""
    environment.setenv("RANK", rank)
    environment.setenv("WORLD_SIZE", size)
    assert _ranks.rank_and_world() == (0, 1)


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
