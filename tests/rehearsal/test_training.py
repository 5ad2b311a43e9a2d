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
    records, queries, times, captures = found["calls"].values()
    assert 2 == records
    assert times <= 2  # for the duration and the place
    assert queries < 4.2  # PyTorch asks for both events before it gives a time
    assert captures <= 4
    assert 2000 == found["counted"]
    assert found["events"] <= 40
    assert 1 == found["contexts"]


def test_a_small_gpt():
    """Regions, snapshots from another thread, layers and checkpointing: nothing fails, hangs or warns."""
    found = run_program("train")
    assert [] == found["said"]
    assert found["peak_stays"]
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
    """They count as captured, replays count nothing, and later ones are timed."""
    found = run_program("captures", "collectives")
    assert (6, 2, 0, 0, 0) == tuple(found[key] for key in ("count", "captured", "pending", "failed", "untimed"))
    assert pytest.approx(0.68, abs=0.05) == found["mean_ms"]
    assert [] == found["said"]


def test_a_pipeline():
    """Each forward and backward has a time, nothing fails, and the program's peak of memory is not reset."""
    found = run_program("pipeline", ranks=2)
    assert [] == found["said"]
    assert [8, 8, 8] == found["forward"] == found["backward"]
    assert 0 == found["faults"]
    assert found["peak_stays"]
    assert [True] * 3 == found["peaks"]
    assert {(0, 0, 0)} == {tuple(counts) for counts in found["ops"].values()}


def test_a_timer_of_another_device():
    """Its regions start no context on the current device, which stays the current one."""
    found = run_program("regions", "100", "cuda:1", FAKE_DEVICES="2")
    assert (0b10, 0, 2000) == (found["contexts"], found["current"], found["counted"])


def marked(*args, **variables):
    """Run tests that are marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--timeout", "120", *args]
    env = environment(**variables)
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert 0 == found.returncode, found.stdout[-6000:]


def test_what_is_marked_gpu():
    """The suite's GPU tests pass. The ones that need values, true costs or Triton are skipped with that reason."""
    marked(*MARKED)


def test_what_needs_two_devices():
    """Regions on another device than the current one, and across a change of it."""
    marked(MARKED[0], "-k", "another_device or switched_inside or current_device_stays", FAKE_DEVICES="2")


def test_places_with_clocks_that_drift():
    """Regions stand where they ran on the host's clock, though the device's goes 40 ppm faster."""
    marked(MARKED[0], "-k", "place_of_a_region", FAKE_PPM="40")


# Not CuPy's and TensorFlow's: their packages are not in the rehearsal's environment.
MARKED = [
    "tests/torch/test_cuda.py",
    "tests/torch/test_clock_contract.py",
    "tests/torch/test_named_timers_gpu.py",
    "tests/torch_comm/test_comm_gpu.py",
]
