"""The section of goodput and its account, of a job that was started twice."""

from __future__ import annotations

import pytest
from made_runs import made_rank

from deep500_timing._views.page._context import Context
from deep500_timing._views.page._goodput import goodput
from deep500_timing.runs import Run


def test_the_section_shows_every_part_and_its_lost_work(tmp_path):
    """Ten steps, of which the second start computes four again; the parts of the table add up."""
    for first in (0, 6):
        with made_rank(tmp_path / "run", 0) as made:
            for step in range(first, first + 10):
                made.tmr.step(step)
                made.spend("BATCH", 1.0)
    with Run.open(tmp_path / "run") as run:
        account = run.goodput()
        content = goodput(Context(run))
    assert content is not None
    [figure] = content.figures
    assert [row[0] for row in figure.rows] == [bucket.title for bucket in account.buckets]
    assert account.seconds("lost") == pytest.approx(4.0)
    assert account.goodput == pytest.approx(16 / 20)
    assert "16 steps count, 4 were lost" in str(account)
