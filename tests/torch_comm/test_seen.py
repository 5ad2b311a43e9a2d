"""Every way in which PyTorch communicates, on two ranks: seen by the kernel as by PyTorch's profiler, or unseen."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = pytest.mark.slow

PROGRAMS = [
    "ddp", "ddp_hook", "ddp_no_sync", "ddp_fp16", "fsdp1", "fsdp2", "zero", "tensor_parallel", "functional", "compiled",
    "point_to_point", "pipeline", "objects", "subgroups", "mixture", "coalescing_block", "coalesced", "checkpoint",
    "averaging", "uneven", "by_the_group",
]  # fmt: skip
NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_base_": "all_to_all_single",
    "gather_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
}
# The profiler tells how many elements, not of which type: floats, but for pickled objects and their sentence.
OTHER_TYPES = {"ddp_fp16", "pipeline", "objects", "checkpoint", "uneven"}


# The profiler shows the messages of a batch, and the kernel counts the batch.
BATCHED = ["point_to_point", "pipeline"]


@pytest.fixture(scope="module")
def ranks(torchrun, kernel):
    """What each of two ranks counted in ``workers/seen.py``."""
    return torchrun("seen.py", 2, timeout_s=200, DEEP500_TIMING_COMM_KERNEL="on")


@pytest.mark.parametrize("program", [program for program in PROGRAMS if program not in BATCHED])
def test_the_kernel_counts_what_the_profiler_counts(ranks, program):
    """Operations, counts and sizes are those of PyTorch's profiler, nothing is left over, and nothing is unseen."""
    for result in ranks:
        found = result["kernel"][program]
        counts, sizes = Counter(), Counter()
        for operator, elements, count in found["torch"]:
            name = NAMES[operator]
            counts[name] += count
            sizes[name, 0 if "barrier" in name else elements] += count
        own_counts, own_sizes = Counter(), Counter()
        for name, nbytes, count, pending, failed in found["ours"]:
            assert (0, 0) == (pending, failed)
            own_counts[name] += count
            width = 4
            if program in OTHER_TYPES and nbytes is not None:
                width = next(width for width in (4, 8, 1, 2) if sizes.get((name, nbytes / width)))
            own_sizes[name, (nbytes or 0) / width] += count
        assert counts == own_counts
        assert sizes == own_sizes
        assert 0 == found["unseen"]


@pytest.mark.parametrize("program", BATCHED)
def test_the_kernel_counts_a_batch_as_one(ranks, program):
    """A batch of messages has one row, as with patched functions, and leaves nothing unseen."""
    for rank, result in enumerate(ranks):
        found = result["kernel"][program]
        counts = Counter()
        for name, _, count, pending, failed in found["ours"]:
            assert (0, 0) == (pending, failed)
            counts[name] += count
        assert 0 == found["unseen"]
        assert counts["batch_isend_irecv"] > 0
        if program == "point_to_point":
            assert {"batch_isend_irecv": 4, ("send", "recv")[rank]: 3} == counts


@pytest.mark.parametrize(
    ("program", "unseen"),
    [("ddp", 5), ("ddp_hook", 2), ("functional", 10), ("objects", 0), ("coalescing_block", 0), ("by_the_group", 3)],
)
def test_what_patched_functions_do_not_see_is_counted(ranks, program, unseen):
    """Without the kernel, messages of the reducer and the dispatcher is counted from the group's number, and said."""
    for result in ranks:
        found = result["patched"][program]
        assert unseen == found["unseen"]
        assert (f"{unseen} operations of group '0' were issued by code that is not timed." in found["text"]) == (
            unseen > 0
        )
        if unseen:
            assert "it is not at work because instrument(kernel=False) was asked for" in found["text"]


def test_patched_functions_that_are_made_of_several_operations(ranks):
    """A plain operation that the backend carries out as several does not leave any unseen."""
    for result in ranks:
        assert result["patched"]["mixture"]["advanced"] > 27
        assert 0 == result["patched"]["mixture"]["unseen"]


def test_uneven_steps_under_join(ranks):
    """A rank that has run out of data shadows the others' buckets through the hook, and both ranks end well."""
    for rank, result in enumerate(ranks):
        found = {name: count for name, _, count, *_ in result["patched"]["uneven"]["ours"]}
        assert 4 == found["ddp_all_reduce"], rank
        assert 3 == result["patched"]["uneven"]["unseen"]
