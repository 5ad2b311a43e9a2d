"""The bandwidth formulas, and the sizes that are read from arguments, against numbers worked out by hand."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as plain
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch.comm._ops import OPS, bandwidths

RANKS = st.integers(1, 10_000)
SIZED = sorted(name for name, op in OPS.items() if op.factor is not None)


@pytest.mark.parametrize(
    ("op", "busbw"),
    [
        ("all_reduce", 175.0),
        ("inference_all_reduce", 175.0),
        ("all_reduce_coalesced", 175.0),
        ("reduce_scatter", 87.5),
        ("reduce_scatter_single", 87.5),
        ("all_gather", 87.5),
        ("all_gather_into_tensor", 87.5),
        ("all_to_all", 87.5),
        ("all_to_all_single", 87.5),
        ("gather", 87.5),
        ("scatter", 87.5),
        ("broadcast", 100.0),
        ("reduce", 100.0),
        ("send", 100.0),
        ("irecv", 100.0),
        ("batch_isend_irecv", 100.0),
    ],
)
def test_eight_ranks_one_gigabyte_ten_milliseconds(op, busbw):
    """The example of nccl-tests' document, for each kind of operation."""
    algbw, actual = bandwidths(1_000_000_000, 8, 0.010, OPS[op].factor)
    assert pytest.approx(100.0) == algbw
    assert pytest.approx(busbw) == actual


@given(st.sampled_from(SIZED), st.integers(0, 2**50), st.floats(1e-9, 1e5))
def test_one_rank_has_no_bus(op, nbytes, seconds):
    """With one rank nothing is moved, and nothing is divided by zero."""
    assert 0.0 == bandwidths(nbytes, 1, seconds, OPS[op].factor)[1]


@given(st.sampled_from(SIZED), RANKS, st.integers(0, 2**50), st.floats(1e-9, 1e5))
def test_bandwidths_are_finite_and_follow_from_each_other(op, ranks, nbytes, seconds):
    """Time times algbw is the message; busbw is at most twice algbw and never negative."""
    algbw, busbw = bandwidths(nbytes, ranks, seconds, OPS[op].factor)
    assert pytest.approx(nbytes) == algbw * seconds * 1e9
    assert 0 <= busbw <= 2 * algbw


@given(RANKS, st.floats(max_value=0.0))
def test_what_cannot_be_known_is_none(ranks, seconds):
    """No size, no time or no factor: no bandwidth, rather than 0 or infinity."""
    factor = OPS["all_reduce"].factor
    assert (None, None) == bandwidths(None, ranks, 1.0, factor)
    assert (None, None) == bandwidths(100, ranks, seconds, factor)
    assert (1e-7, None) == bandwidths(100, ranks, 1.0, None)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8))
def test_uneven_parts_add_up(counts):
    """A list of tensors of different lengths is as large as all of them, whichever operation sends or receives it."""
    parts = [torch.zeros(count) for count in counts]
    whole = 4 * sum(counts)
    one = torch.zeros(1)
    assert whole == OPS["all_gather"].describe(parts, one)[0]
    assert whole == OPS["reduce_scatter"].describe(one, parts)[0]
    assert whole == OPS["all_to_all"].describe([one] * len(parts), input_tensor_list=parts)[0]
    assert whole == OPS["all_reduce_coalesced"].describe(parts)[0]
    assert whole == OPS["all_gather_coalesced"].describe([parts], [one])[0]
    send = torch.zeros(sum(counts))
    assert whole == OPS["all_to_all_single"].describe(one, send, [1], counts)[0]


def test_gather_counts_every_rank_s_share():
    """The root knows the list; the others know their own share, and that there is one for each rank."""
    share = torch.zeros(10, dtype=torch.float64)
    parts = [torch.zeros(10, dtype=torch.float64)] * 4
    assert (320, False) == OPS["gather"].describe(share, parts)[:2]
    assert (80, True) == OPS["gather"].describe(share, dst=1)[:2]
    assert (320, False) == OPS["scatter"].describe(share, scatter_list=parts)[:2]
    assert (80, True) == OPS["scatter"].describe(share)[:2]


@pytest.mark.parametrize("name", ["all_gather_object", "broadcast_object_list", "gather_object", "send_object_list"])
def test_object_operations_have_no_size(name):
    """How many bytes an object is on the wire is not known without pickling it."""
    assert None is OPS[name].describe([1], 0)[0]


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
        "recv_object_list",
    ],
)  # fmt: skip
def test_the_group_of_object_operations(name):
    """The group is found where PyTorch's own signature has it, and by name; without one it is that of the world."""
    position = list(inspect.signature(getattr(plain, name)).parameters).index("group")
    before, group = [object() for _ in range(position)], object()
    assert (None, False, group, None) == OPS[name].describe(*before, group)
    assert (None, False, group, None) == OPS[name].describe(*before, group=group)
    assert (None, False, None, None) == OPS[name].describe(*before)
