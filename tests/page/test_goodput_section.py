"""The section of goodput and its account, of a job that was started twice."""

from __future__ import annotations

import pytest
from made_runs import made_rank

from deep500_timing._views.page._job import goodput
from deep500_timing._views.page._section import Context
from deep500_timing.runs import Run


def test_the_section_shows_every_part_and_its_lost_work(tmp_path):
    """Ten steps, of which the second start computes four again; the table has all parts, the summary row the result."""
    for first in (0, 6):
        with made_rank(tmp_path / "run", 0) as made:
            for step in range(first, first + 10):
                made.tmr.step(step)
                made.spend("BATCH", 1.0)
                made.log.sample("throughput.mfu", 0.4 + step / 1000)
                made.log.sample("throughput.samples_per_s", 32.0)
    with Run.open(tmp_path / "run") as run:
        account = run.goodput()
        context = Context(run)
        content, summary = goodput(context), dict(context.summary)
    assert content is not None
    [figure] = content.figures
    assert [row[0] for row in figure.rows] == [bucket.title for bucket in account.buckets]
    assert account.seconds("lost") == pytest.approx(4.0)
    assert account.goodput == pytest.approx(16 / 20)
    assert {
        "samples a second, all ranks": "32",
        "MFU": "41 %",
        "of the wall clock is goodput": "80 %",
    }.items() <= summary.items()
    assert "16 steps count, 4 were lost" in str(account)
