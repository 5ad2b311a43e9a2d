"""NCCL's times on PyTorch's own ProcessGroupNCCL: true or marked as bounds, nothing held, one set of names."""

from __future__ import annotations

import functools

import pytest
from suite_rehearsal import run_program

TRUE_MS = 10.75  # 1 GiB over 100 GB/s and 10 µs


@functools.cache
def paths(how, **variables):
    """What ``nccl_paths.py`` counts, once for each way of timing."""
    return run_program("nccl_paths", how, ranks=2, timeout_s=400, **dict(variables))


@pytest.fixture(params=["functions", "import", "kernel"])
def found(request):
    """What one way of timing counts."""
    if request.param == "kernel":
        request.getfixturevalue("kernel")
    return paths(request.param)


def _only(rows):
    (row,) = rows
    return row


def test_operations_issued_together(found):
    """Six asynchronous operations have their own time each."""
    row = _only(found["together"])
    assert ("all_reduce", 6, 0, 0, 0, False) == tuple(
        row[key] for key in ("op", "count", "pending", "failed", "untimed", "bound")
    )
    assert pytest.approx(TRUE_MS, abs=0.1) == row["mean_ms"]
    assert "flight recorder" in found["device_times"]


def test_an_operation_behind_computing(found):
    """Of 10.75 ms behind 30 ms of computing nothing is exposed, and the time is that of the operation."""
    row = _only(found["behind 30 ms"])
    assert (4, False) == (row["count"], row["bound"])
    assert pytest.approx(TRUE_MS, abs=0.1) == row["mean_ms"]
    assert row["exposed_ms"] < 1
    assert row["overlap"] > 0.95


def test_a_batch_of_messages(found):
    """One row, with a bound as its time; the bandwidth stays below the link's 100 GB/s."""
    row = _only(found["batch"])
    assert ("batch_isend_irecv", 3, 0, True) == (row["op"], row["count"], row["untimed"], row["bound"])
    assert TRUE_MS - 0.1 <= row["mean_ms"] < 3 * TRUE_MS
    assert row["algbw"] < 101


def test_blocking_and_asynchronous_gathers(found):
    """Blocking operations are in the recorder as well."""
    row = _only(found["all_gather"])
    assert ("all_gather", 4, 0, 0, False) == tuple(row[key] for key in ("op", "count", "pending", "untimed", "bound"))


def test_gathers_of_unequal_sizes(found):
    """PyTorch's event times are those of the asynchronous one alone: 12 MiB over 100 GB/s. The others are untimed."""
    row = _only(found["uneven all_gather"])
    assert ("all_gather", 1, 3, 0, 0) == tuple(row[key] for key in ("op", "count", "untimed", "pending", "failed"))
    assert pytest.approx(0.136, abs=0.02) == row["mean_ms"]


def test_a_coalescing_block(found):
    """NCCL launches these operations at the end of the block, so they count as untimed."""
    for row in found["coalesced"]:
        assert (0, 0, 0, None) == (row["count"], row["pending"], row["failed"], row["mean_ms"])
        assert row["untimed"] > 0


def test_ddp(found):
    """Every bucket has its time, and what of it was hidden. Patched functions see none, which the summary says."""
    if found is paths("functions"):
        assert [] == found["ddp"]
        return
    rows = [row for row in found["ddp"] if row["bytes"] == 64 << 20]
    row = _only(rows)
    assert (12, 0, 0, 0) == tuple(row[key] for key in ("count", "pending", "failed", "untimed"))
    assert pytest.approx(0.68, abs=0.05) == row["mean_ms"]
    assert 0 <= row["overlap"] <= 1


def test_captured_operations(found):
    """Two operations in a capture count as captured, the one after it is timed."""
    row = _only(found["captured"])
    assert (1, 2, 0, 0, 0) == tuple(row[key] for key in ("count", "captured", "pending", "failed", "untimed"))


def test_every_operation(kernel):
    """Blocking and asynchronous, none is faster than its link, and the kernel and patched functions see the same."""
    with_kernel, without = (run_program("all_ops", how, ranks=2) for how in ("kernel", "functions"))
    assert len(without) == 15
    for name, rows in without.items():
        assert with_kernel[name].keys() == rows.keys(), name
        for found in (rows, with_kernel[name]):
            for count, untimed, lost, busbw in found.values():
                assert (6, 0, 0) == (count, untimed, lost), name
                assert busbw is None or 0 < busbw < 101, name


@pytest.mark.parametrize("how", ["auto", "stream_events"])
def test_a_second_device(how):
    """Operations on a device that is not current are timed there, and no context is started on the current one."""
    found = run_program("second_device", how, FAKE_DEVICES="2")
    assert (6, 0b10, 0, []) == tuple(found[key] for key in ("count", "contexts", "current", "said"))
    assert pytest.approx(2.695, abs=0.1) == found["mean_ms"]


def test_fsdp_with_the_kernel_and_without(kernel):
    """The same names, counts and times."""
    with_kernel, without = paths("kernel")["fsdp"], paths("functions")["fsdp"]
    assert {"all_gather_into_tensor": 72, "reduce_scatter_tensor": 36} == {
        row["op"]: row["count"] for row in with_kernel
    }
    for one, other in zip(with_kernel, without, strict=True):
        assert (one["op"], one["count"], one["bytes"]) == (other["op"], other["count"], other["bytes"])
        assert pytest.approx(0.7, abs=0.05) == one["mean_ms"]
        assert pytest.approx(0.7, abs=0.05) == other["mean_ms"]


def test_functional_collectives(kernel):
    """Waits in ``wait_tensor`` are seen, and the time is the operation's."""
    row = _only(paths("kernel")["functional"])
    assert (3, 0, False) == (row["count"], row["untimed"], row["bound"])
    assert pytest.approx(TRUE_MS, abs=0.1) == row["mean_ms"]


def test_bounds_where_nccl_is_not_timed():
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 NCCL's events stay as they are, and the times are marked as bounds."""
    found = paths("functions", CUDA_DEVICE_MAX_CONNECTIONS="1")
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in found["device_times"]
    row = _only(found["behind 30 ms"])
    assert row["bound"]
    assert row["mean_ms"] >= TRUE_MS - 0.1


@pytest.mark.parametrize("how", ["timed", "kernel"])
def test_memory_is_that_of_the_untimed_run(how, kernel):
    """24 gathers of 64 MiB while the host is ahead: no output is held on account of the timing."""
    assert run_program("memory", "untimed")["peak_mib"] == run_program("memory", how)["peak_mib"]


@pytest.mark.parametrize("how", ["functions", "kernel"])
def test_two_streams(how, kernel):
    """Operations of one group on two streams in turn take 2.69 ms each."""
    for count, mean_ms, bound in run_program("streams", how).values():
        assert (6, False) == (count, bound)
        assert pytest.approx(2.695, abs=0.05) == mean_ms


@pytest.mark.parametrize("how", ["import", "functions", "kernel"])
def test_batches_of_messages(how, kernel):
    """One, three and six batches: one row each, with a mean at or above the true time."""
    for count, rows in run_program("messages", how).items():
        name, counted, mean_ms, bound = _only(rows)
        assert ("batch_isend_irecv", int(count), True) == (name, counted, bound)
        assert 2.69 <= mean_ms


def test_the_facts_that_this_relies_on():
    """The group switches the timing on, its backend cannot; the ring holds 2 000 entries, all with a duration."""
    found = run_program("backends")
    assert not found["on_backend"]
    assert {"nccl", "cpu:gloo,cuda:nccl", "None"} == found["durations"].keys()
    assert all(0 < duration < 1 for duration in found["durations"].values())
    assert (2000, 2000, 3003) == (found["entries"], found["timed"], found["newest"])
