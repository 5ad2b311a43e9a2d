"""Real DDP of four gloo ranks: who is late, and in what, also where every rank's times read the same."""

from __future__ import annotations

import pytest

from deep500_timing.ranks import find_stragglers
from deep500_timing.runs import Run

pytestmark = pytest.mark.slow

PLACES = ["IO", "FORWARD", "BACKWARD", "optimizer"]


@pytest.fixture(scope="module")
def runs(torchrun, tmp_path_factory):
    """The folder with a run for each place in which rank 2 is slow by 40 ms of the ranks' common clock."""
    folder = tmp_path_factory.mktemp("late")
    torchrun("ddp_late.py", 4, LATE_RUNS=str(folder))
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_the_late_rank_and_its_cause_are_named(runs, place):
    """A delay in the loader, forward, backward or the optimizer of rank 2 is found there, and nowhere else."""
    with Run.open(runs / place) as run:
        found = find_stragglers(run)
        if place == "BACKWARD":
            # Its times do not tell: the wait for rank 2 is inside every rank's backward.
            query = "select rank, median(dur_ns) / 1e6 as ms from intervals where region = 'BACKWARD' group by rank"
            times = [row["ms"] for row in run.sql(query).rows()]
            assert 38 < max(times) < 1.1 * min(times)
    expected = {"IO": "IO"}.get(place, "compute")
    assert ((2,), place, expected) == (found.ranks, found.region, found.cause)
    assert found.lateness_s == pytest.approx(0.04, rel=0.05)
    assert "collective operations" == found.met_at
