"""Regions, captures and whole trainings on PyTorch's CUDA code, and the tests that are marked ``gpu``."""

from __future__ import annotations

import subprocess
import sys

import pytest
from suite_rehearsal import ROOT, environment, run_program


def test_regions_never_wait():
    """No synchronization and no allocation in 2 000 regions; 300 000 more need at most 40 events."""
    found = run_program("regions", "300000", timeout_s=600)
    assert {0} == set(found["waits"].values())
    assert found["events"] <= 40
    assert 1 == found["contexts"]


def test_a_small_gpt():
    """Regions, snapshots from another thread, layers and checkpointing: nothing fails, hangs or warns."""
    found = run_program("train")
    assert [] == found["said"]
    for how in ("regions", "snapshots", "layers", "checkpointed"):
        assert (6, 0, 0, 0) == tuple(found[how][key] for key in ("count", "pending", "failed", "captured")), how
    assert found["regions"]["events"] <= 40
    assert found["layers"]["layers"] > 40
    assert 0 == found["layers"]["faults"] + found["checkpointed"]["faults"]


def test_a_gpt_under_fsdp2(kernel):
    """Gathers and reductions of FSDP2, layers and regions at once, on two ranks."""
    found = run_program("fsdp_gpt", ranks=2)
    assert [] == found["said"]
    assert {} == found["unseen"]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        count, *others = found["ops"][name]
        assert count > 0
        assert [0, 0, 0, False] == others, name
    assert "flight recorder" in found["device_times"]
    for counts in found["regions"].values():
        assert [0, 0, 0] == counts[1:]
    assert found["layers"] > 4


def test_a_region_whose_first_use_lies_in_a_capture():
    """It counts as captured, and the regions after it are timed."""
    found = run_program("captures", "regions")
    assert {"count": 0, "captured": 1, "pending": 0, "failed": 0} == found["in"]
    assert {"count": 3, "captured": 0, "pending": 0, "failed": 0} == found["after"]
    assert [] == found["said"]


def test_collectives_whose_first_use_lies_in_a_capture():
    """They count as captured, whatever the replays, and those after it are timed."""
    found = run_program("captures", "collectives")
    assert (6, 2, 0, 0, 0) == tuple(found[key] for key in ("count", "captured", "pending", "failed", "untimed"))
    assert pytest.approx(0.68, abs=0.05) == found["mean_ms"]
    assert [] == found["said"]


def test_what_is_marked_gpu():
    """GPU tests of the suite that need no values, true prices or Triton pass; the clock contract is one."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *SELECTED]
    found = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=600)
    assert 0 == found.returncode, found.stdout[-6000:]


CUDA = "tests/torch/test_cuda.py"
SELECTED = [
    "tests/torch/test_clock_contract.py",
    "tests/torch_comm/test_comm_gpu.py",
    "tests/torch/test_named_timers_gpu.py::test_memory_is_the_allocators_and_peaks_stay",
    f"{CUDA}::TestTimes::test_launching_is_not_running",
    f"{CUDA}::TestTimes::test_side_stream",
    f"{CUDA}::TestTimes::test_backward_on_autograds_thread",
    f"{CUDA}::TestNeverInTheWay",
]
