"""Real DDP of four gloo ranks: who is late, and in what, also where every rank's times read the same."""

from __future__ import annotations

import pytest

from deep500_timing.ranks import find_stragglers
from deep500_timing.runs import Run

pytestmark = [pytest.mark.slow, pytest.mark.real_time]

PLACES = ["IO", "FORWARD", "BACKWARD", "optimizer"]


@pytest.fixture(scope="module")
def runs_of(torchrun, tmp_path_factory):
    """Leave a run for each place that rank 2 is slow in, by one start of the ranks; gives their folder."""

    def start(places, delay_s):
        folder = tmp_path_factory.mktemp("late")
        torchrun("ddp_late.py", 4, LATE_RUNS=str(folder), LATE_PLACES=" ".join(places), LATE_S=str(delay_s))
        return folder

    return start


@pytest.fixture(scope="module")
def runs(runs_of):
    """All places, with a delay of 40 ms."""
    return runs_of(PLACES, 0.04)


@pytest.mark.parametrize("place", PLACES)
def test_the_late_rank_and_its_cause_are_named(runs, runs_of, place):
    """A delay in the loader, forward, backward or the optimizer of rank 2 is found there, and nowhere else.

    What a busy machine adds to every rank's steps may hide it, and nobody is named; that does not grow with the delay.
    """
    for delay_s in (0.04, 0.16):
        folder = runs if delay_s == 0.04 else runs_of([place], delay_s)
        with Run.open(folder / place) as run:
            found = find_stragglers(run)
            if not found.ranks:
                continue
            if place == "BACKWARD":
                # What was timed does not tell: the wait for rank 2 is inside of everybody's backward.
                query = "select rank, median(dur_ns) / 1e6 as ms from intervals where region = 'BACKWARD' group by rank"
                times = [row["ms"] for row in run.sql(query).rows()]
                assert min(times) > 0.8 * max(times)
        break
    expected = {"IO": "IO"}.get(place, "compute")
    assert ((2,), place, expected) == (found.ranks, found.region, found.cause)
    assert delay_s == pytest.approx(found.lateness_s, rel=0.5)
    assert "collective operations" == found.met_at
