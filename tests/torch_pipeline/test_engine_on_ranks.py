"""The engine on real gloo ranks: compared with the uncut model, and when a rank dies, stops or fails."""

from __future__ import annotations

import json
import re

import pytest
from scheduled import Clock, schedule_exchanges

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SINGLE = ["GPipe", "1F1B"]
SEVERAL = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


@pytest.fixture(scope="module", autouse=True)
def failing(ranks):
    """Jobs of three ranks, of which the second goes wrong. Waiting takes no processor from the other jobs."""
    return {how: ranks("faults.py", 3, how) for how in ("killed", "stopped", "raised")}


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
    """Two replicas of two stages, each with other data."""
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


# --- a rank that dies, is stopped or fails in a batch: an error on every other rank in time, no process left ----------


def _found(job, rank):
    return json.loads((job.folder / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def failed(failing, two, four):
    """The same jobs, once all that can end has ended; the others have had the time that these wait."""
    for how, job in failing.items():
        others = [job.processes[rank] for rank in ((0, 1, 2) if how == "raised" else (0, 2))]
        for process in others:
            assert 0 == process.wait(300), job.text()
        job.kill()
    return failing


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_ranks_that_lose_another_say_so(failed, how):
    """Neighbours and those beyond them end with an error that tells which rank says nothing any more."""
    for rank in (0, 2):
        found = _found(failed[how], rank)
        assert 2 == found["batches"]
        assert "Training a batch" in found["error"]
        silent = re.search(r"ranks \[([\d, ]+)\] say nothing", found["error"])
        assert silent is not None, found["error"]
        assert "1" in silent[1].split(", ")


def test_a_layer_that_raises_is_named_on_every_rank(failed):
    """Its rank says what, also where the text is like a backend's; the others say which rank it was."""
    own = _found(failed["raised"], 1)
    assert "rank 1 failed with RuntimeError: feature store: could not connect to row 7" in own["error"]
    for rank in (0, 2):
        error = _found(failed["raised"], rank)["error"]
        assert "another rank failed (rank 1: RuntimeError: feature store: could not connect to row 7)" in error


def test_an_engine_that_failed_does_not_go_on(failed):
    """Leftover messages of a batch would be taken for messages of the next one."""
    for rank in (0, 1, 2):
        assert "cannot go on after a rank failed" in _found(failed["raised"], rank)["again"]


class _SlowStore:
    """A job's store on a machine that has other things to do."""

    def __init__(self, schedule, words):
        self.schedule, self.words = schedule, words

    def set(self, key, word):
        self.schedule.pause(3)
        self.words[key.rpartition("/")[2]] = word

    def check(self, keys):
        return all(key.rpartition("/")[2] in self.words for key in keys)

    def get(self, key):
        return self.words[key.rpartition("/")[2]]


def test_a_store_that_is_slow_is_waited_for(monkeypatch):
    """It has the word of the rank at fault, so it does not pass for one that is gone."""
    from deep500_timing._distributed.connection import Connection
    from deep500_timing_deepspeed.pipe import _ranks

    schedule = schedule_exchanges(monkeypatch)
    monkeypatch.setattr(_ranks, "time", Clock(schedule))
    store = _SlowStore(schedule, {"1": b"own ArithmeticError: the layer has failed"})
    connection = Connection(store)
    monkeypatch.setattr(_ranks.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(_ranks.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(_ranks, "store_connection", lambda: connection)
    faults, timed_out = _ranks.Faults(1), RuntimeError("Timed out")
    (error,) = schedule.run_all(lambda: str(faults.explain("Training a batch", timed_out, own=False)))
    assert "another rank failed (rank 1: ArithmeticError: the layer has failed)" in error


def test_nobody_is_left(failed):
    """Every process of every job has ended."""
    for job in failed.values():
        assert all(process.poll() is not None for process in job.processes)
