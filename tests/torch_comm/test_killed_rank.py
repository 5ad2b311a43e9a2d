"""A rank that is killed does not keep the others from their summary."""

from __future__ import annotations

import json
import signal

import pytest

pytestmark = pytest.mark.slow

# The victim, the signal, and the deadline in seconds. Without it the summary would never end.
VICTIMS = {
    "killed": (1, signal.SIGKILL, 600),
    "store killed": (0, signal.SIGKILL, 1),
    "store stopped": (0, signal.SIGSTOP, 1),
}


@pytest.fixture(scope="module")
def survivors(jobs):
    """The others' reports after one of three ranks was killed, or stopped; all wait for it at the same time."""
    started = {
        case: jobs("killed.py", 3, str(victim), str(deadline_s)) for case, (victim, _, deadline_s) in VICTIMS.items()
    }
    for job in started.values():
        job.wait_for(f"ready-{rank}" for rank in range(3))
    for case, (victim, how, _) in VICTIMS.items():
        process = started[case].processes[victim]
        process.send_signal(how)
        if how == signal.SIGKILL:
            process.wait()
        (started[case].folder / "go").touch()
    found = {}
    for case, (victim, *_) in VICTIMS.items():
        reports = [f"{rank}.json" for rank in range(3) if rank != victim]
        started[case].wait_for(reports)
        found[case] = [json.loads((started[case].folder / report).read_text()) for report in reports]
        started[case].kill()
    return found


def test_killed_rank_is_named(survivors):
    """The others finish within the deadline, compare among themselves, and name the one that is gone."""
    for found in survivors["killed"]:
        assert [1] == found["missing_ranks"]
        row = next(row for row in found["stragglers"] if row["op"] == "all_reduce")
        assert [0, 2] == row["ranks"]
        assert 4 == row["count"]
        assert "No report from rank 1 within the deadline" in found["text"]


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_rank_that_held_the_store(survivors, how):
    """With rank 0 goes the ranks' store: the others finish all the same, with their own data."""
    for found in survivors[f"store {how}"]:
        # No rank could be asked, so none is called dead.
        assert [] == found["missing_ranks"]
        assert found["fault"] is not None
        assert ["all_reduce"] == [op["op"] for op in found["ops"]]
