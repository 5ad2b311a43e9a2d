"""Every operation on real gloo ranks: plain results (in the worker), sizes and bandwidths by hand (here)."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

K = 4000  # bytes of the tensors that most operations move: 1000 float32


def _expected(n: int) -> dict[tuple[str, int | None, int], tuple[int, float | None]]:
    """For operation, message size and group size: how often it ran, and busbw / algbw."""
    two_way, one_way = 2 * (n - 1) / n, (n - 1) / n
    uneven = 4 * 10 * n * (n + 1) // 2
    return {
        ("all_reduce", K, n): (2, two_way),
        ("all_reduce", 2 * K, n): (1, two_way),
        ("all_reduce", 1200, 2): (1, 1.0),
        ("all_reduce_coalesced", 6000, n): (2, two_way),
        ("reduce", K, n): (1, 1.0),
        ("broadcast", K, n): (1, 1.0),
        ("all_gather", K * n, n): (1, one_way),
        ("all_gather_into_tensor", K * n, n): (3, one_way),
        ("all_gather_coalesced", 6000 * n, n): (1, one_way),
        ("reduce_scatter", K * n, n): (1, one_way),
        ("reduce_scatter", 2 * K * n, n): (1, one_way),
        ("reduce_scatter_tensor", K * n, n): (3, one_way),
        ("all_to_all", K * n, n): (1, one_way),
        ("all_to_all_single", K * n, n): (1, one_way),
        ("all_to_all_single", uneven, n): (1, one_way),
        ("gather", K * n, n): (1, one_way),
        ("scatter", K * n, n): (1, one_way),
        ("send", K, n): (2, 1.0),
        ("recv", K, n): (2, 1.0),
        ("batch_isend_irecv", K, n): (1, 1.0),
        ("barrier", None, n): (2, None),
        ("monitored_barrier", None, n): (1, None),
        ("all_gather_object", None, n): (1, None),
        ("broadcast_object_list", None, n): (1, None),
        ("gather_object", None, n): (1, None),
        ("scatter_object_list", None, n): (1, None),
        ("send_object_list", None, n): (1, None),
        ("recv_object_list", None, n): (1, None),
    }


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request, torchrun):
    """What each rank recorded."""
    return torchrun("all_ops.py", request.param)


def test_each_operation_is_recorded_once(ranks):
    """Every rank has exactly the operations that ran, each with its own size and the size of its group."""
    expected = {key: count for key, (count, _) in _expected(len(ranks)).items()}
    for result in ranks:
        actual = {(op["op"], op["message_bytes"], op["group_size"]): op["count"] for op in result["recorded"]}
        assert expected == actual
        assert len(expected) == len(result["recorded"])


def test_times_and_bandwidths(ranks):
    """Each took some of the run's time, its mean is that of so many calls, and its bandwidths follow from both."""
    table = _expected(len(ranks))
    for result in ranks:
        assert len(table) == len(result["recorded"])
        for op in result["recorded"]:
            count, factor = table[op["op"], op["message_bytes"], op["group_size"]]
            # Of one or two calls nothing is trimmed.
            mean_s = op["total_s"] / count
            assert 0 < op["total_s"] < result["elapsed_s"]
            assert pytest.approx(mean_s) == op["mean_s"]
            if count == 1:
                assert pytest.approx((mean_s, mean_s)) == (op["p50_s"], op["p95_s"])
            if factor is None:
                assert (None, None) == (op["algbw_gb_per_s"], op["busbw_gb_per_s"])
            else:
                algbw = op["message_bytes"] * count / op["total_s"] / 1e9
                assert pytest.approx((algbw, algbw * factor)) == (op["algbw_gb_per_s"], op["busbw_gb_per_s"])


def test_asynchronous_operations_tell_issue_and_exposed_time(ranks):
    """Where a handle was waited for, there is a time of issue and an exposed time, and nothing is pending."""
    for result in ranks:
        ops = {(op["op"], op["message_bytes"]): op for op in result["recorded"]}
        for key in (("all_reduce", 2 * K), ("all_reduce_coalesced", 6000), ("send", K), ("batch_isend_irecv", K)):
            assert 0 < ops[key]["issue_s"] < result["elapsed_s"]
            assert 0 < ops[key]["exposed_s"] < result["elapsed_s"]
        assert {0} == {op["pending"] for op in result["recorded"]}
        assert {0} == {op["failed"] for op in result["recorded"]}
        assert 0 <= ops["all_reduce", 2 * K]["overlap"] <= 1


def test_times_that_are_upper_bounds_say_so(ranks):
    """Operations with a backend that has no future for them are only known to be done by the end of the wait."""
    upper_bound = {"send", "recv", "batch_isend_irecv", "reduce_scatter"}
    recorded = [op for result in ranks for op in result["recorded"]]
    assert len(ranks) * len(_expected(len(ranks))) == len(recorded)
    for op in recorded:
        if op["upper_bound"]:
            assert op["op"] in upper_bound
            assert op["overlap"] is None
        if op["op"] in upper_bound - {"reduce_scatter"}:
            assert op["upper_bound"]


def test_instrument_counts_each_operation_once(ranks):
    """Patched operations that call each other are counted as the user's call."""
    expected = {
        "all_reduce": 1, "send": 1, "recv": 1, "batch_isend_irecv": 2, "barrier": 2, "monitored_barrier": 1,
        "all_gather_object": 1, "broadcast_object_list": 1, "gather_object": 1, "scatter_object_list": 1,
        "send_object_list": 1, "recv_object_list": 1, "all_gather_into_tensor": 1,
    }  # fmt: skip
    for result in ranks:
        assert expected == {op["op"]: op["count"] for op in result["patched"]}


def test_off_records_nothing(ranks):
    """After ``configure(enabled=False)`` neither the timed module nor ``instrument`` records anything."""
    assert all(result["off"] for result in ranks)


def test_only_rank_0_prints(ranks):
    """The table is printed once, by rank 0."""
    assert "batch_isend_irecv" in ranks[0]["printed"]
    assert {""} == {result["printed"] for result in ranks[1:]}
