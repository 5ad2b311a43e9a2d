"""Transfer and skew from the reports of several ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch.comm._straggler import compare

SYNCHRONIZES = {"all_reduce": True, "broadcast": False}


def _compare(reports, synchronizes=SYNCHRONIZES, groups=None):
    return compare(reports, groups or {"world": sorted(reports)}, synchronizes)


def _times(*durations, op="all_reduce"):
    return {"world": [(sequence, op, 100, ns) for sequence, ns in enumerate(durations)]}


def test_the_rank_that_waits_least_is_late():
    """Rank 2 comes 50 ms after the others: they wait for it, and it waits for nobody."""
    late = 50_000_000
    reports = {0: _times(late + 10, late + 10), 1: _times(late + 30, late + 10), 2: _times(10, 10)}
    (row,) = _compare(reports).rows
    assert (2, 2, 2) == (row.late_rank, row.late_count, row.count)
    assert pytest.approx(20e-9) == row.transfer_s
    assert {0: 0.1, 1: pytest.approx(0.10000002), 2: 0.0} == row.skew_s
    assert pytest.approx(0.10000001) == row.late_s


def test_nobody_is_late_in_an_operation_that_may_be_left_early():
    """The root of a broadcast is done first because it is the root."""
    (row,) = _compare({0: _times(5, op="broadcast"), 1: _times(5000, op="broadcast")}).rows
    assert row.late_rank is None
    assert pytest.approx(5e-9) == row.transfer_s


def test_nobody_is_late_by_a_hair():
    """Differences of a few percent are noise."""
    assert _compare({0: _times(1000, 1050), 1: _times(1050, 1000)}).rows[0].late_rank is None


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
    found = compare(reports, {"a": [0, 1, 2], "b": [2, 3], "c": [3]}, SYNCHRONIZES)
    assert [("a", (0, 1))] == [(row.group, row.ranks) for row in found.rows]
    assert 0 == found.unmatched


def test_sizes_that_differ_between_ranks_are_one_operation():
    """An uneven all_to_all is the same operation although every rank sends another amount."""
    reports = {rank: {"world": [(1, "all_reduce", 8 * rank, 10)]} for rank in range(3)}
    assert [(16, 1)] == [(row.message_bytes, row.count) for row in _compare(reports).rows]


@given(st.lists(st.lists(st.integers(1, 10**9), min_size=3, max_size=3), min_size=1, max_size=20))
def test_transfer_and_skew_make_up_each_rank_s_own_time(durations):
    """For every rank: what it spent is what all spend, and what it waited; the last to come waited for nobody."""
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
    assert [row.to_dict() for row in one.rows] == [row.to_dict() for row in other.rows]
