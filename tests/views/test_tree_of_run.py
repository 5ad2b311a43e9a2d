"""The tree of a run: nesting, shares, rests, trends and the spread over ranks."""

from __future__ import annotations

import pytest
from made_runs import made_rank

from deep500_timing import Timer
from deep500_timing._views.table import over_ranks
from deep500_timing.runs import Run, RunLog
from deep500_timing.runs._tree import tree_of_run
from deep500_timing.testing import ManualClock


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A rank that trains two epochs of ten steps, the first step slow, and fails once."""
    folder = tmp_path_factory.mktemp("tree") / "run"
    with made_rank(folder) as made:
        for epoch in range(2):
            with made.region("EPOCH", 0.5):
                for step in range(10):
                    with made.region("BATCH", 0.01):
                        made.spend("IO", 0.02)
                        made.spend("FORWARD", 0.9 if (epoch, step) == (0, 0) else 0.07)
                made.spend("IO", 0.03)
        with pytest.raises(OSError), made.region("IO", 0.5):
            raise OSError
    with Run.open(folder) as run:
        return tree_of_run(run, rank=0, buckets=4)


def test_nodes_are_what_lies_in_what(tree):
    """Depth first, siblings by falling total, the rest last; a name may be at several places."""
    expected = [
        ("EPOCH",),
        ("EPOCH", "BATCH"),
        ("EPOCH", "BATCH", "FORWARD"),
        ("EPOCH", "BATCH", "IO"),
        ("EPOCH", "BATCH", "the rest"),
        ("EPOCH", "IO"),
        ("EPOCH", "the rest"),
    ]
    order = [node.path for node in tree.walk()]
    assert expected[:5] == order[:5]
    assert {*expected} == {*order}
    assert [("EPOCH", "BATCH", "IO"), ("EPOCH", "IO")] == [node.path for node in tree.named("IO")]


def test_shares_and_rests_add_up(tree):
    """What lies inside a region and the rest of it are the region."""
    for node in tree.walk():
        if node.children:
            assert pytest.approx(1.0) == sum(child.share for child in node.children)
            assert pytest.approx(node.total_s) == sum(child.total_s for child in node.children)
    assert pytest.approx(0.2) == tree.at(("EPOCH", "BATCH")).rest_s


def test_first_and_trend(tree):
    """The first interval stands apart, and the trend has the mean of each stretch."""
    forward = tree.at(("EPOCH", "BATCH", "FORWARD"))
    assert 0.9 == forward.first_s
    assert pytest.approx((20 * 0.07 + 0.83) / 20) == forward.mean_s
    assert forward.trend[0] > 0.15
    assert [pytest.approx(0.07)] * 3 == list(forward.trend[1:])
    assert 4 == len(forward.trend)


def test_failures_are_counted_where_the_region_took_most(tree):
    """A region that an exception ended is in no time, and counted once."""
    assert [1, 0] == [node.failed for node in tree.named("IO")]
    assert {("IO", "CPU"): {"failed": 1}} == tree.counters


def test_the_spread_over_ranks(tmp_path):
    """Each region has the smallest, median and largest total of the ranks; a region of one rank has none."""
    for rank, length_s in enumerate((0.3, 0.1, 0.2)):
        clock = ManualClock()
        tmr = Timer(clock=clock)
        with RunLog(tmp_path, tmr, rank=rank, flush_s=None), tmr.region("BATCH"):
            clock.advance(length_s)
            if rank == 1:
                with tmr.region("checkpoint"):
                    clock.advance(0.05)
    with Run.open(tmp_path) as run:
        tree = tree_of_run(run, rank=0)
        assert pytest.approx((0.15, 0.2, 0.3)) == tree.at(("BATCH",)).over_ranks_s
        assert "150 / 200 / 300 ms" == over_ranks(tree.at(("BATCH",)))
        assert tree_of_run(run, rank=1).at(("BATCH", "checkpoint")).over_ranks_s is None
