"""A report of all ranks when some are dead and some stand still: in time, with both named, and nobody else waits."""

from __future__ import annotations

import json
import signal

import pytest

from deep500_timing.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

# Ranks over a folder import no framework, so that many cost little.
CASES = [(2, "folder", 1, None), (4, "store", 2, 1), (8, "folder", 5, 3)]


@pytest.fixture(scope="module")
def started(jobs):
    """A job for each case, whose others have all left their report; they waited at the same time."""
    victims = {case: [rank for rank in case[2:] if rank is not None] for case in CASES}
    started = {case: jobs("gather_killed.py", case[0], case[1], *map(str, victims[case])) for case in CASES}
    for (ranks, *_), job in started.items():
        job.wait_for(f"ready-{rank}" for rank in range(ranks))
    for (_, _, killed, stopped), job in started.items():
        job.processes[killed].kill()
        job.processes[killed].wait()
        if stopped is not None:
            job.processes[stopped].send_signal(signal.SIGSTOP)
        (job.folder / "go").touch()
    for case, job in started.items():
        job.wait_for(f"{rank}.json" for rank in range(case[0]) if rank not in victims[case])
        job.kill()
    return started


@pytest.mark.parametrize("case", CASES)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as POSIX systems do")
def test_the_dead_and_the_stopped_are_named(started, case):
    """Rank 0's report comes within its deadline; ranks that live are in it; the dead rank's log is read to its end."""
    ranks, _, *victims = case
    victims = [rank for rank in victims if rank is not None]
    living = [rank for rank in range(ranks) if rank not in victims]
    folder = started[case].folder
    found = {rank: json.loads((folder / f"{rank}.json").read_text()) for rank in living}
    everybody = [list(range(ranks)), [], None]
    assert [everybody, everybody, [living, sorted(victims), None]] == found[0]["reports"]
    assert 4.0 > found[0]["took_s"]
    assert [[]] * (len(living) - 1) == [found[rank]["reports"] for rank in living[1:]]
    assert all(found[rank]["took_s"] < 2.5 for rank in living[1:])
    with Run.open(folder / "run") as run:
        counts = {row["rank"]: row["count"] for row in run.regions(by_rank=True).rows()}
    assert dict.fromkeys(victims, 20) == {rank: counts[rank] for rank in victims}
