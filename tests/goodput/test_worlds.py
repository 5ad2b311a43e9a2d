"""The account of random jobs: it adds up, equals the truth, and loses no step."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
from goodput_worlds import World

from deep500_timing.runs import Run
from deep500_timing.runs._goodput import checkpoint_interval

QUICK, MORE = 20, 40


def check(folder, world):
    """Compare the account of a world with the truth; returns both."""
    world.write(folder)
    with Run.open(folder) as run:
        found = run.goodput()
    wall = (world.span[1] - world.span[0]) / 1e9
    assert found.wall_s == pytest.approx(wall, abs=1e-9)
    leaves = [part for bucket in found.buckets for part in (bucket.parts or (bucket,))]
    assert all(leaf.seconds is None or leaf.seconds >= 0 for leaf in leaves)
    assert sum(leaf.seconds or 0.0 for leaf in leaves) == pytest.approx(wall, abs=1e-6)
    assert found.lost_steps == len(world.lost_steps())
    for rank, account in found.ranks.items():
        truth = {name: ns / 1e9 for name, ns in world.account(rank).items()}
        mine = dict(account)
        mine["communication"] += mine.pop("stragglers")
        mine["absent"] += mine.pop("down")
        assert all(seconds >= 0 for seconds in mine.values())
        for name in mine.keys() | truth.keys():
            assert mine.get(name, 0.0) == pytest.approx(truth.get(name, 0.0), abs=1e-6), (rank, name)
    return found


@pytest.mark.parametrize("number", range(QUICK))
def test_the_account_of_a_random_job_is_exact(tmp_path, number):
    """Its parts add up to the wall clock, equal the truth on each rank, and its lost steps are exact."""
    check(tmp_path / "run", World(number))


@pytest.mark.slow
def test_the_account_of_more_random_jobs_is_exact(tmp_path):
    """As above, for more jobs. A failure names the seed. Seeds 0 to 999 were checked once."""
    for seed in range(QUICK, int(os.environ.get("GOODPUT_WORLDS", MORE))):
        try:
            check(tmp_path / str(seed), World(seed))
        except AssertionError as error:
            raise AssertionError(f"World({seed}): {error}") from error


def test_a_naive_account_is_wrong():
    """Sums of each kind of interval, with the rest clipped at 0 as ml-goodput-measurement does, miss the truth."""
    wrong, clipped = 0, 0
    for seed in range(200):
        world = World(seed)
        found, (low, high) = naive_account(world), world.span
        truth = world.account(world.processes[0].rank)
        truth["productive"] = truth.get("productive", 0) + truth.get("communication", 0)
        off = [abs(found[name] - truth.get(name, 0)) for name in ("productive", "lost", "data", "checkpoint")]
        wrong += max(off) > 0.01 * (high - low)
        clipped += sum(found.values()) > high - low
    assert wrong > 100, (wrong, clipped)


def naive_account(world):
    """Google's manner: each bucket is the sum of its intervals on rank 0, and ``other`` is the rest, but at least 0."""
    own = [process for process in world.processes if process.rank == world.processes[0].rank]
    found = dict.fromkeys(("data", "checkpoint", "evaluation", "restore", "compilation"), 0)
    for process in own:
        for label, begin, end in process.intervals:
            if label in found:
                found[label] += end - begin
    steps = [(n, end - begin) for process in own for n, begin, end in process.steps if end is not None]
    newest = dict(steps)  # of a step that was computed twice the newest time counts
    found["productive"] = sum(newest.values())
    found["lost"] = sum(duration for _, duration in steps) - found["productive"]
    found["down"] = sum(max(after.begin - before.end, 0) for before, after in pairwise(own))
    low, high = world.span
    found["other"] = max(high - low - sum(found.values()), 0)
    return found


@pytest.mark.parametrize(("mtbf_min", "published_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_best_interval_is_the_published_one(mtbf_min, published_min):
    """Figures 3, 4 and 5 of Daly (2006), with dumps of five minutes, round to these minutes."""
    young, daly = checkpoint_interval(5 * 60, mtbf_min * 60)
    assert published_min == pytest.approx(daly / 60, rel=0.006)
    assert young == (2 * 300 * mtbf_min * 60) ** 0.5
