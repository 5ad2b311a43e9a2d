"""A rank that is killed does not keep the others from their summary."""

from __future__ import annotations

import json
import time


def _wait_for(*paths, timeout_s=60):
    until = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"waiting for {paths}"
        time.sleep(0.05)


def test_killed_rank_is_named(processes, tmp_path):
    """The others finish within the deadline, compare among themselves, and name the one that is gone."""
    started = processes("killed.py", 3)
    _wait_for(*(tmp_path / f"ready-{rank}" for rank in range(3)))
    started[1].kill()
    started[1].wait()
    (tmp_path / "go").touch()
    _wait_for(tmp_path / "0.json", tmp_path / "2.json")
    for rank in (0, 2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert [1] == found["missing_ranks"]
        assert found["took_s"] < 4.5
        row = next(row for row in found["stragglers"] if row["op"] == "all_reduce")
        assert [0, 2] == row["ranks"]
        assert 4 == row["count"]
        assert "No report from rank 1 within the deadline" in found["text"]
