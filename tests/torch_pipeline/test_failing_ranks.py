"""A rank that dies, is stopped or fails in a batch: an error on every other rank in time, and nobody is left."""

from __future__ import annotations

import json
import re
import time

import pytest

pytest.importorskip("torch")
# Of ranks that two busy cores share; alone they take a tenth of it.
pytestmark = pytest.mark.timeout(240)


def _found(job, rank):
    return json.loads((job.folder / f"{rank}.json").read_text())


@pytest.fixture(scope="module")
def jobs(ranks):
    """Jobs of three ranks, begun together, of which the second goes wrong."""
    started = {how: ranks("faults.py", 3, how) for how in ("killed", "stopped", "raised")}
    for how, job in started.items():
        others = [job.processes[rank] for rank in ((0, 1, 2) if how == "raised" else (0, 2))]
        for process in others:
            assert 0 == process.wait(120), job.text()
        job.kill()
    return started


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_ranks_that_lose_another_say_so_in_time(jobs, how):
    """Neighbours and those beyond them end with an error that tells which rank says nothing any more."""
    for rank in (0, 2):
        found = _found(jobs[how], rank)
        assert 2 == found["batches"]
        assert "Training a batch" in found["error"]
        silent = re.search(r"ranks \[([\d, ]+)\] say nothing", found["error"])
        assert silent is not None, found["error"]
        assert "1" in silent[1].split(", ")
        # The deadline of 15 s for the message, 10.5 s for finding out who is missing, and what busy cores add to it.
        assert 45 > found["took_s"]


def test_a_layer_that_raises_is_named_on_every_rank(jobs):
    """The rank in which it raised says what; the others say which rank it was."""
    own = _found(jobs["raised"], 1)
    assert "rank 1 failed with ArithmeticError: the layer has failed" in own["error"]
    for rank in (0, 2):
        error = _found(jobs["raised"], rank)["error"]
        assert "another rank failed (rank 1: ArithmeticError: the layer has failed)" in error


def test_an_engine_that_failed_does_not_go_on(jobs):
    """What is left of the messages of a batch would be taken for those of the next one."""
    for rank in (0, 1, 2):
        assert "cannot go on after a rank failed" in _found(jobs["raised"], rank)["again"]


class _SlowStore:
    """A job's store on a machine that has other things to do."""

    def __init__(self, words):
        self.words = words

    def set(self, key, word):
        time.sleep(3)
        self.words[key.rpartition("/")[2]] = word

    def check(self, keys):
        return all(key.rpartition("/")[2] in self.words for key in keys)

    def get(self, key):
        return self.words[key.rpartition("/")[2]]


def test_a_store_that_is_slow_is_waited_for(monkeypatch):
    """It has the word of the rank at fault, so it does not pass for one that is gone."""
    from deep500_timing._ranks.connection import Connection
    from deep500_timing_torch.pipeline import _faults

    store = _SlowStore({"1": b"own ArithmeticError: the layer has failed"})
    connection = Connection(store)
    monkeypatch.setattr(_faults.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(_faults.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(_faults._connection, "connection", lambda: connection)
    error = str(_faults.Faults(1).explain("Training a batch", RuntimeError("Timed out"), own=False))
    assert "another rank failed (rank 1: ArithmeticError: the layer has failed)" in error


def test_nobody_is_left(jobs):
    """Every process of every job has ended."""
    for job in jobs.values():
        assert all(process.poll() is not None for process in job.processes)
