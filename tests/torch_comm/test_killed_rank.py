"""A rank that is killed does not keep the others from their summary."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

DEADLINE_S = 8
BUSY_S = 20  # what a machine that does something else may add
VICTIMS = {"killed": (1, signal.SIGKILL), "store killed": (0, signal.SIGKILL), "store stopped": (0, signal.SIGSTOP)}


@pytest.fixture(scope="module")
def survivors(jobs):
    """What the others report after one of three ranks was killed, or stopped; all wait for it at the same time."""
    started = {case: jobs("killed.py", 3, str(victim)) for case, (victim, _) in VICTIMS.items()}
    for job in started.values():
        job.wait_for(f"ready-{rank}" for rank in range(3))
    for case, (victim, how) in VICTIMS.items():
        process = started[case].processes[victim]
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait()
        (started[case].folder / "go").touch()
    found = {}
    for case, (victim, _) in VICTIMS.items():
        reports = [f"{rank}.json" for rank in range(3) if rank != victim]
        started[case].wait_for(reports)
        found[case] = [json.loads((started[case].folder / report).read_text()) for report in reports]
        started[case].kill()
    return found


def test_killed_rank_is_named(survivors):
    """The others finish within the deadline, compare among themselves, and name the one that is gone."""
    for found in survivors["killed"]:
        assert [1] == found["missing_ranks"]
        assert found["took_s"] < DEADLINE_S + BUSY_S
        row = next(row for row in found["stragglers"] if row["op"] == "all_reduce")
        assert [0, 2] == row["ranks"]
        assert 4 == row["count"]
        assert "No report from rank 1 within the deadline" in found["text"]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_rank_that_held_the_store(survivors, how):
    """With rank 0 goes what the ranks exchange through: the others finish all the same, with what they know."""
    for found in survivors[f"store {how}"]:
        # Nobody could be asked, so nobody is called dead.
        assert [] == found["missing_ranks"]
        assert found["took_s"] < DEADLINE_S + BUSY_S
        assert found["fault"] is not None
        assert ["all_reduce"] == [op["op"] for op in found["ops"]]
