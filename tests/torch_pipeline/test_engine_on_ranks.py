"""The engine on real gloo ranks, against the model that is not cut."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
# Of ranks that two busy cores share; alone they take a tenth of it.
pytestmark = pytest.mark.timeout(240)

SINGLE = ["GPipe", "1F1B"]
SEVERAL = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.fixture(scope="module")
def two(ranks):
    """What each of two ranks found of every schedule."""
    return ranks("schedules.py", 2, *SINGLE, *SEVERAL).results()


@pytest.fixture(scope="module")
def four(ranks):
    """The same of four ranks, and of two replicas of two."""
    return ranks("schedules.py", 4, *SINGLE, *SEVERAL, "1F1B:2", "Interleaved1F1B:2").results()


def _check(results, replicas=1):
    for found in results:
        assert 1e-6 > found["wrong"]["loss"]
        assert 1e-6 > found["wrong"]["parameters"]
        assert 1e-6 > found["wrong"]["eval"]
        assert 1e-6 > found["wrong"]["logits"]
        assert 0 == found["faults"]
    # Each of the model's tensors was compared on one rank of each replica: parameters, running statistics, a count.
    assert 18 * replicas == sum(found["names"] for found in results)


@pytest.mark.parametrize("schedule", SINGLE + SEVERAL)
@pytest.mark.parametrize("world", ["two", "four"])
def test_a_schedule_trains_as_the_model_does_that_is_not_cut(request, world, schedule):
    """Losses, parameters and evaluation over batches of changing size, clipped, with running statistics."""
    results = [found[schedule] for found in request.getfixturevalue(world)]
    _check(results)


@pytest.mark.parametrize("schedule", ["1F1B 2x2", "Interleaved1F1B 2x2"])
def test_replicas_of_a_pipeline_train_as_one_model(four, schedule):
    """Two replicas of two stages, each with data of its own."""
    _check([found[schedule] for found in four], replicas=2)


@pytest.mark.parametrize("world", ["two", "four"])
def test_every_action_is_timed(request, world):
    """Passes by stage, loading, issue of messages and waits for them, reduction and step."""
    everywhere = {"BATCH", "pipeline reduce", "pipeline step", "pipeline setup", "pipeline evaluation"}
    for schedule in SINGLE + SEVERAL:
        results = [found[schedule] for found in request.getfixturevalue(world)]
        for found in results:
            assert everywhere <= set(found["regions"])
        regions = set().union(*(found["regions"] for found in results))
        stages = len(results) * (1 if schedule in SINGLE else 2)
        assert {f"stage {stage} forward" for stage in range(stages)} <= regions
        passes = ["backward input", "backward weight"] if "Zero" in schedule else ["backward"]
        assert {f"stage {stage} {one}" for stage in range(stages) for one in passes} <= regions
        for one in ("load", "loss", "send activation", "send gradient", "receive activation", "receive gradient"):
            assert f"pipeline {one}" in regions
        assert {"pipeline wait for activation", "pipeline wait for gradient"} <= regions


def test_the_bubble_is_the_same_on_every_rank(four):
    """It is worked out of the actions of all ranks, with its causes and the schedule's ideal."""
    for schedule in SINGLE + SEVERAL:
        bubbles = {found[schedule]["bubble"] for found in four}
        assert 1 == len(bubbles)
        assert 0 < bubbles.pop() < 1
        for found in four:
            assert pytest.approx(found[schedule]["bubble"]) == found[schedule]["causes"]
    assert pytest.approx(3 / 11) == four[0]["1F1B"]["ideal"]


def test_a_batch_that_exchanges_shapes_is_warm_up(two):
    """The first, and each with another number of micro-batches; the one after it is not."""
    for found in two:
        assert [True, True, True, False] == found["1F1B"]["warm"]
