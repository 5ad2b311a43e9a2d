"""Ranks that wait for each other inside another region: the account takes what ``stragglers`` finds."""

from __future__ import annotations

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing.ranks import find_stragglers
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

STEPS = 60


def train(folder, rank, late_ms):
    """Steps of a rank without timed communication: what is late elsewhere is waited for in BACKWARD."""
    clock = ManualClock(10**9)
    tmr = Timer(clock=clock)
    with RunLog(folder, tmr, rank=rank, flush_s=None):
        for step in range(STEPS):
            with tmr.region(TimeType.BATCH):
                for key, ms in ((TimeType.IO, 2 + late_ms), (TimeType.BACKWARD, 22 - late_ms)):
                    with tmr.region(key):
                        clock.advance_ns(round(1e6 * ms) + 997 * ((step + rank) % 7))


@pytest.mark.parametrize("late_ms", [5, 20])
def test_waits_inside_another_region(tmp_path, late_ms):
    """They count as waiting, no longer as productive, and the parts still add up."""
    for rank in range(4):
        train(tmp_path, rank, late_ms * (rank == 1))
    with Run.open(tmp_path) as run:
        found, account = find_stragglers(run), run.goodput()
    assert found.ranks == (1,)
    assert account.seconds("stragglers") == pytest.approx(STEPS * late_ms / 1e3, abs=0.01)
    assert account.seconds(*(part.name for part in account.buckets)) == pytest.approx(account.wall_s)
    assert "as `stragglers` found it" in str(account)
