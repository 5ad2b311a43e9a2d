"""A rank that is killed does not keep the others from their summary."""

from __future__ import annotations

import json
import signal
import time

import pytest


def _wait_for(*paths, timeout_s=60):
    until = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"waiting for {paths}"
        time.sleep(0.05)


DEADLINE_S = 4
BUSY_S = 20  # what a machine that does something else may add


def _survivors(processes, tmp_path, victim, how=signal.SIGKILL):
    """What the others report after one of three ranks was killed, or stopped."""
    started = processes("killed.py", 3, str(victim))
    _wait_for(*(tmp_path / f"ready-{rank}" for rank in range(3)))
    started[victim].send_signal(how)
    if how == signal.SIGKILL:
        started[victim].wait()
    (tmp_path / "go").touch()
    others = [rank for rank in range(3) if rank != victim]
    _wait_for(*(tmp_path / f"{rank}.json" for rank in others))
    started[victim].kill()
    started[victim].wait()
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in others]


def test_killed_rank_is_named(processes, tmp_path):
    """The others finish within the deadline, compare among themselves, and name the one that is gone."""
    for found in _survivors(processes, tmp_path, victim=1):
        assert [1] == found["missing_ranks"]
        assert found["took_s"] < DEADLINE_S + BUSY_S
        row = next(row for row in found["stragglers"] if row["op"] == "all_reduce")
        assert [0, 2] == row["ranks"]
        assert 4 == row["count"]
        assert "No report from rank 1 within the deadline" in found["text"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_rank_that_held_the_store(processes, tmp_path, how):
    """With rank 0 goes what the ranks exchange through: the others finish all the same, with what they know."""
    for found in _survivors(processes, tmp_path, 0, how):
        # Nobody could be asked, so nobody is called dead.
        assert [] == found["missing_ranks"]
        assert found["took_s"] < DEADLINE_S + BUSY_S
        assert found["fault"] is not None
        assert ["all_reduce"] == [op["op"] for op in found["ops"]]
