"""A training run with communication, on two gloo ranks under torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from suite_ranks import Job

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_comm.py"


@pytest.fixture(scope="module")
def ranks(torchrun):
    """What each of two ranks recorded in ``workers/scenarios.py``."""
    return torchrun("scenarios.py", 2)


def _only(ops, name):
    found = [op for op in ops if op["op"] == name]
    assert 1 == len(found)
    return found[0]


def test_ddp_losses_are_the_same_to_the_last_bit(ranks):
    """Timing its buckets changes nothing about a training."""
    for result in ranks:
        assert 28 == len(result["plain"])
        assert result["plain"] == result["timed"]
        assert result["plain"][-1] < result["plain"][0]


def test_ddp_buckets_are_seen(ranks):
    """Without a hook nothing is recorded; with it every bucket of every step is, at its size."""
    gradients = 4 * (64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
    for result in ranks:
        assert 0 == result["before"]
        ops = result["ddp"]
        assert {"ddp_all_reduce"} == {op["op"] for op in ops}
        assert len(ops) >= 2
        assert gradients * 28 == sum(op["message_bytes"] * op["count"] for op in ops)
        for op in ops:
            assert op["mean_s"] > 0
            assert op["issue_s"] > 0
            assert pytest.approx(op["message_bytes"] / op["mean_s"] / 1e9) == op["algbw_gb_per_s"]
            # Two ranks: 2(n - 1)/n is 1.
            assert pytest.approx(op["algbw_gb_per_s"]) == op["busbw_gb_per_s"]
            assert 0 == op["pending"]


def test_ddp_exposed_time_is_part_of_the_time(ranks):
    """The wait after the backward pass is known, and no longer than the buckets took."""
    for result in ranks:
        exposed = sum(op["exposed_s"] for op in result["ddp"])
        assert 0 < exposed <= sum(op["total_s"] for op in result["ddp"])
        assert all(0 <= op["overlap"] <= 1 for op in result["ddp"])


def test_a_hook_of_the_user_s_is_timed_as_a_whole(ranks):
    """A hook's messages are its secret: its time is known, its bandwidth is not, and its all_reduce is part of it."""
    for result in ranks:
        (op,) = result["hook"]
        assert ("ddp_hook", 4 * (64 * 10 + 10), 1) == (op["op"], op["message_bytes"], op["count"])
        assert op["mean_s"] > 0
        assert op["busbw_gb_per_s"] is None


def test_fsdp_is_seen_by_instrument(ranks):
    """A library that imports ``torch.distributed`` itself is timed, and computes the same to the last bit."""
    for result in ranks:
        plain, timed = result["sharded"]
        assert 5 == len(plain)
        assert plain == timed
        sizes = {(op["op"], op["message_bytes"]): op["count"] for op in result["fsdp"]}
        # Forward and backward gather the parameters, the backward pass scatters the gradients; 5 steps, 2 layers.
        first, second = 4 * (64 * 64 + 64), 4 * (64 * 10 + 10)
        gathers = {size: count for (op, size), count in sizes.items() if op.startswith("all_gather")}
        scatters = {size: count for (op, size), count in sizes.items() if op.startswith("reduce_scatter")}
        assert {first: 10, second: 10} == gathers
        assert {first: 5, second: 5} == scatters


def test_overlap(ranks):
    """An asynchronous all_reduce under work that outlasts it is not waited for; without, for all of its time."""
    for name, waited_s, overlap in (("without", 0.01, 0.0), ("under work", 0.0, 1.0)):
        op = _only(ranks[0][name], "all_reduce")
        assert (10, 0) == (op["count"], op["pending"])
        assert not op["upper_bound"]
        assert (0.01, 10 * waited_s, overlap) == pytest.approx((op["mean_s"], op["exposed_s"], op["overlap"]))


def test_late_rank_is_named(ranks):
    """The rank that comes 10 ms late is the one that waits least, and the others' waits are counted against it."""
    for result in ranks:
        late = result["late"]
        assert 1 == late["late_rank"]
        assert [] == late["missing_ranks"]
        row = next(row for row in late["stragglers"] if row["op"] == "all_reduce")
        assert (1, 60) == (row["late_rank"], row["count"])
        assert 60 == row["late_count"]
        assert 4000 == row["message_bytes"]
        assert {"0": 60 * 0.01, "1": 0.0} == pytest.approx(row["skew_s"])
        assert 0.0 == row["transfer_s"]
    assert re.search(r"Rank 1 is late: it came last in 100 % of .* \(chance: 50 %\)", ranks[0]["late text"])
    assert "" == ranks[1]["late text"]


def test_comparison_is_the_same_everywhere(ranks):
    """Every rank returns what rank 0 made of the reports."""
    assert ranks[0]["late"]["stragglers"] == ranks[1]["late"]["stragglers"]
    assert ranks[0]["different"]["stragglers"] == ranks[1]["different"]["stragglers"]


def test_ranks_with_different_operations(ranks):
    """Only operations that both have reported are compared, each with the same one; the rest is counted."""
    different = ranks[0]["different"]
    counts = {(row["op"], tuple(row["ranks"])): row["count"] for row in different["stragglers"]}
    assert {("all_reduce", (0, 1)): 3, ("all_gather_into_tensor", (0, 1)): 3} == counts
    # The one that rank 0 alone recorded at first, and the two that either recorded at last.
    assert 3 == different["unmatched"]
    assert 0 == different["mismatched"]
    assert [] == different["missing_ranks"]


def test_one_report_too_many_on_one_rank(ranks):
    """Those after it compare both ranks again, no one is missing, and the first says which rank is a round ahead."""
    for result in ranks:
        first, *later = result["one extra"]
        assert [[], None, [[1, 1]], 1] == first
        assert [[[], None, [], 1]] * 2 == later


def test_example(forks, monkeypatch, tmp_path):
    """The example runs, shows DDP's buckets, and judges the rank with the slow data.

    On a busy machine it may abstain.
    """
    monkeypatch.chdir(tmp_path)
    job = Job(tmp_path, forks.start, [str(EXAMPLE)], 2, agent=True)
    assert [0, 0] == job.wait(300), job.text()
    printed = job.text(0)
    assert "ddp_all_reduce" in printed
    assert "The ranks waited for " in printed
    assert "Judged from 61 steps, by the waits in collective operations." in printed
    assert "COMM" in printed
