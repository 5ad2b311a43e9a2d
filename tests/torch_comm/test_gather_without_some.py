"""A report of all ranks when some are dead and some stand still: in time, with both named, and nobody else waits."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from deep500_timing.runs import Run


def _wait_for(*paths, timeout_s=90):
    until = time.monotonic() + timeout_s
    while not all(path.exists() for path in paths):
        assert time.monotonic() < until, f"waiting for {paths}"
        time.sleep(0.05)


# Ranks over a folder import no framework, so that many cost little.
@pytest.mark.parametrize(
    ("ranks", "kind", "killed", "stopped"), [(2, "folder", 1, None), (4, "store", 2, 1), (8, "folder", 5, 3)]
)
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="stops a process as POSIX systems do")
def test_the_dead_and_the_stopped_are_named(processes, tmp_path, ranks, kind, killed, stopped):
    """Rank 0's report comes within its deadline; ranks that live are in it; the dead rank's log is read to its end."""
    victims = [rank for rank in (killed, stopped) if rank is not None]
    started = processes("gather_killed.py", ranks, kind, *map(str, victims))
    _wait_for(*(tmp_path / f"ready-{rank}" for rank in range(ranks)))
    started[killed].kill()
    started[killed].wait()
    if stopped is not None:
        os.kill(started[stopped].pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    living = [rank for rank in range(ranks) if rank not in victims]
    _wait_for(*(tmp_path / f"{rank}.json" for rank in living))
    for rank in victims:
        started[rank].kill()
        started[rank].wait()
    found = {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in living}
    everybody = [list(range(ranks)), [], None]
    assert [everybody, everybody, [living, sorted(victims), None]] == found[0]["reports"]
    assert 4.0 > found[0]["took_s"]
    assert [[]] * (len(living) - 1) == [found[rank]["reports"] for rank in living[1:]]
    assert all(found[rank]["took_s"] < 2.5 for rank in living[1:])
    with Run.open(tmp_path / "run") as run:
        counts = {row["rank"]: row["count"] for row in run.regions(by_rank=True).rows()}
    assert dict.fromkeys(victims, 20) == {rank: counts[rank] for rank in victims}
