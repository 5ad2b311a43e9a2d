"""Transfer and skew from the reports of several ranks."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch.comm._ops import OPS
from deep500_timing_torch.comm._straggler import compare, exchange


def _compare(reports, groups=None):
    return compare(reports, groups or {"world": sorted(reports)})


def _times(*durations, op="all_reduce"):
    return {"world": [(sequence, op, 100, int(ns)) for sequence, ns in enumerate(durations)]}


def _jitter(seed, count=100):
    return np.random.default_rng(seed).integers(0, 1000, count)


def test_the_rank_that_waits_least_is_late():
    """Rank 2 comes 50 ms after the others: they wait for it, and it waits for no one."""
    late = 50_000_000
    reports = {0: _times(*(late + _jitter(0))), 1: _times(*(late + _jitter(1))), 2: _times(*[1000] * 100)}
    found = _compare(reports)
    (row,) = found.rows
    assert (2, 100, 100) == (row.late_rank, row.late_count, row.count)
    assert pytest.approx(100e-6) == row.transfer_s
    assert {0: pytest.approx(5, rel=1e-3), 1: pytest.approx(5, rel=1e-3), 2: 0.0} == row.skew_s
    assert pytest.approx(5, rel=1e-3) == row.late_s
    said = found.lateness["world"]
    test = said.operations
    assert ((2,), [0, 1, 2], 100, 100, True, 1.0) == (
        said.ranks, [*said.lateness], test.operations, test.judged, test.enough, said.last_share
    )  # fmt: skip
    assert pytest.approx(0.05, rel=1e-3) == test.cost_s


@pytest.mark.parametrize("late", range(4))
def test_any_rank_may_be_the_late_one(late):
    """Row and group name the rank that came last, whichever it is, with its own count and time."""
    others = [rank for rank in range(4) if rank != late]
    reports = {rank: _times(*(20_000_000 + _jitter(rank))) for rank in others}
    # Three of a hundred times another one is last.
    own = [40_000_000 if number in (10, 50, 90) else 1000 for number in range(100)]
    found = _compare({**reports, late: _times(*own)})
    (row,), said = found.rows, found.lateness["world"]
    assert (late, 97, (late,)) == (row.late_rank, row.late_count, said.ranks)
    assert pytest.approx(97 * 0.02, rel=1e-3) == row.late_s


def test_two_equal_ranks_take_turns():
    """Some rank waits least in any noise: no one is named, in the row nor in the group, and every field says so."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        came = rng.random((300, 2))
        waits = ((came.max(axis=1, keepdims=True) - came + 1) * 1e6).astype(int)
        found = _compare({rank: _times(*map(int, waits[:, rank])) for rank in range(2)})
        (row,), said = found.rows, found.lateness["world"]
        assert (None, 0, 0.0) == (row.late_rank, row.late_count, row.late_s)
        test = said.operations
        assert ((), True, 0.0, 0.0, 0.0) == (said.ranks, test.enough, said.last_share, test.cost_s, said.lateness_s)
        assert pytest.approx(waits.mean() / 1e9 - 1e-3) == test.waiting_s


def test_all_operations_of_a_group_tell_together():
    """Operations of several sizes, too few of each, are evidence together."""
    rng = np.random.default_rng(0)
    reports = {rank: {"world": []} for rank in range(2)}
    for sequence in range(80):
        for rank in range(2):
            wait = int(rng.integers(0, 1000)) + (50_000_000 if rank == 0 else 0)
            reports[rank]["world"].append((sequence, "all_reduce", sequence % 8, wait + 1000))
    said = _compare(reports).lateness["world"]
    assert ((1,), 80) == (said.ranks, said.operations.operations)


@pytest.mark.parametrize("name", sorted(OPS))
def test_which_operations_no_rank_leaves_early(name):
    """Collectives with a result that needs every rank, and no other, tell who is late."""
    everybody = {
        "all_reduce", "inference_all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_single",
        "all_gather_into_tensor", "allgather_fn", "all_gather_coalesced", "reduce_scatter", "reduce_scatter_single",
        "reduce_scatter_tensor", "reduce_scatter_fn", "all_to_all", "all_to_all_single", "barrier", "all_gather_object",
    }  # fmt: skip
    assert (name in everybody) == OPS[name].synchronizes


def test_different_operations_are_not_compared():
    """Where ranks took part in the same collective by different names, or only one reported it, it is counted."""
    reports = {
        0: {"world": [(1, "all_reduce", 8, 10), (2, "broadcast", 8, 10), (3, "all_reduce", 8, 20)]},
        1: {"world": [(2, "all_reduce", 8, 10), (3, "all_reduce", 8, 30), (4, "all_reduce", 8, 30)]},
    }
    found = _compare(reports)
    assert (2, 1) == (found.unmatched, found.mismatched)
    assert [(1, 20e-9)] == [(row.count, row.transfer_s) for row in found.rows]


def test_groups_are_compared_among_their_members():
    """A rank that is in no group with another is in no comparison, and a dead one does not keep the others from it."""
    reports = {
        0: {"a": [(1, "all_reduce", 8, 10)]},
        1: {"a": [(1, "all_reduce", 8, 20)]},
        3: {"b": [(1, "all_reduce", 8, 10)], "c": [(1, "all_reduce", 8, 7)]},
    }
    found = compare(reports, {"a": [0, 1, 2], "b": [2, 3], "c": [3]})
    assert [("a", (0, 1))] == [(row.group, row.ranks) for row in found.rows]
    assert 0 == found.unmatched


def test_sizes_that_differ_between_ranks_are_one_operation():
    """An uneven all_to_all is the same operation although every rank sends another amount."""
    reports = {rank: {"world": [(1, "all_reduce", 8 * rank, 10)]} for rank in range(3)}
    assert [(16, 1)] == [(row.message_bytes, row.count) for row in _compare(reports).rows]


@given(st.lists(st.lists(st.integers(1, 10**9), min_size=3, max_size=3), min_size=1, max_size=20))
def test_transfer_and_skew_make_up_each_rank_s_own_time(durations):
    """For every rank: its time is the time of all, and its wait; the last to come waited for no one."""
    reports = {rank: _times(*(times[rank] for times in durations)) for rank in range(3)}
    (row,) = _compare(reports).rows
    for rank in range(3):
        own_s = sum(times[rank] for times in durations) / 1e9
        assert pytest.approx(own_s) == row.transfer_s + row.skew_s[rank]
        assert row.skew_s[rank] >= 0
    assert pytest.approx(sum(map(min, durations)) / 1e9) == row.transfer_s


@given(st.permutations(range(4)), st.permutations(range(10)))
def test_the_order_of_reports_does_not_matter(rank_order, entry_order):
    """Reports come in any order, and so do the operations in them."""
    entries = {rank: [(i, "all_reduce", 64, 1000 * (i + 1) * (rank + 1)) for i in range(10)] for rank in range(4)}
    shuffled = {rank: {"world": [entries[rank][i] for i in entry_order]} for rank in rank_order}
    ordered = {rank: {"world": entries[rank]} for rank in range(4)}
    groups = {"world": [0, 1, 2, 3]}
    one, other = _compare(shuffled, groups=groups), _compare(ordered, groups=groups)
    assert one.rows == other.rows
    assert 1 == len(one.rows)
    assert one.lateness == other.lateness
    assert "all_reduce" == one.rows[0].to_dict()["op"]


@pytest.mark.parametrize(
    "report",
    [
        [],
        {"world [0, 1]": [[0, 1], [[1, "all_reduce", 8]]]},
        {"world [0, 1]": [[0, 1], [[1, "all_reduce", 8, "x"]]]},
        {"world [0, 1]": [[0, 1], [[1, "all_reduce", 8, 10**30]]]},
        {"world [0, 1]": [[0, 1], [[1, "all_reduce", 8, None]]]},
        {"world [0, 1]": [[0, 1], [[1, ["all_reduce"], 8, 1.5]]]},
        {"world [0, 1]": [[0, 1, 2], []]},
        {"world [1, 1]": [[1, 1], []]},
        {"world x": ["x", []]},
    ],
)
def test_a_report_that_is_none_is_not_compared(report):
    """It is another process's: the exchange leaves that rank out and says why."""
    good = {"world [0, 1]": [[0, 1], [[1, "all_reduce", 8, 10]]]}
    assert good == exchange._read(good)
    with pytest.raises((AttributeError, TypeError, ValueError)):
        exchange._read(report)


def test_a_comparison_arrives_as_it_was_made():
    """Rank 0's, in JSON, is the same on each of the other ranks."""
    reports = {rank: _times(*(20_000_000 * (rank == 0) + _jitter(rank))) for rank in range(3)}
    found = _compare(reports)
    assert found == exchange._opened(json.loads(json.dumps(asdict(found))))
    assert found.rows
    assert (1,) != found.lateness["world"].ranks
