"""The bandwidth formulas, and the sizes that are read from arguments, against numbers worked out by hand."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as plain
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing_torch.comm._ops import BY_OPERATOR, OPS, _table, bandwidths, unknown

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
    describe = _table()[name].describe
    assert (None, False, group, None) == describe(*before, group)
    assert (None, False, group, None) == describe(*before, group=group)
    assert (None, False, None, None) == describe(*before)
    # What PyTorch has behind the group is not taken for it.
    assert (None, False, group, None) == describe(*before, group, object(), object())


# Of nccl-tests' document (PERFORMANCE.md): busbw / algbw of four ranks. Who can leave only when all have come is from
# what each operation is: a rank of these needs something of every other.
TABLE = {
    "all_reduce": (1.5, True),
    "inference_all_reduce": (1.5, True),
    "all_reduce_coalesced": (1.5, True),
    "reduce": (1.0, False),
    "broadcast": (1.0, False),
    "all_gather": (0.75, True),
    "all_gather_single": (0.75, True),
    "all_gather_into_tensor": (0.75, True),
    "allgather_fn": (0.75, True),
    "all_gather_coalesced": (0.75, True),
    "reduce_scatter": (0.75, True),
    "reduce_scatter_single": (0.75, True),
    "reduce_scatter_tensor": (0.75, True),
    "reduce_scatter_fn": (0.75, True),
    "all_to_all": (0.75, True),
    "all_to_all_single": (0.75, True),
    "gather": (0.75, False),
    "scatter": (0.75, False),
    "send": (1.0, False),
    "recv": (1.0, False),
    "isend": (1.0, False),
    "irecv": (1.0, False),
    "batch_isend_irecv": (1.0, False),
    "barrier": (None, True),
    "monitored_barrier": (None, False),
    "all_gather_object": (None, True),
    "broadcast_object_list": (None, False),
    "gather_object": (None, False),
    "scatter_object_list": (None, False),
    "send_object_list": (None, False),
    "recv_object_list": (None, False),
}


def test_the_table_of_operations():
    """Each operation's factor, and whether a rank that waits least in it may be called late."""
    found = _table()
    assert {
        name: (op.factor(4) if op.factor is not None else None, op.synchronizes) for name, op in found.items()
    } == TABLE
    assert found.keys() == OPS.keys()


def test_one_operation_under_several_names():
    """Functions for one operation share its name in the log, those of PyTorch 2.13, of DeepSpeed and of the kernel."""
    assert {name: op.name for name, op in _table().items() if op.name != name} == {
        "all_gather_single": "all_gather_into_tensor",
        "allgather_fn": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "reduce_scatter_fn": "reduce_scatter_tensor",
        "inference_all_reduce": "all_reduce",
        "isend": "send",
        "irecv": "recv",
    }
    assert {name for name, _, _ in BY_OPERATOR.values()} <= set(OPS)


def test_two_ranks_move_the_whole_message():
    """The smallest group that moves anything."""
    assert (1.0, 1.0, 0.5) == tuple(OPS[name].factor(2) for name in ("broadcast", "all_reduce", "all_gather"))


GROUP = object()
TENSOR = torch.zeros(3)  # 12 bytes
PAIR = [torch.zeros(5), torch.zeros(2)]  # 28 bytes


@pytest.mark.parametrize(
    ("name", "args", "settings", "nbytes", "device"),
    [
        ("all_reduce", (TENSOR, "SUM", GROUP), {}, 12, TENSOR),
        ("all_reduce_coalesced", (PAIR, "SUM", GROUP), {}, 28, PAIR[0]),
        ("all_reduce_coalesced", (TENSOR, "SUM", GROUP), {}, 12, TENSOR),
        ("broadcast", (TENSOR, 0, GROUP), {}, 12, TENSOR),
        ("reduce", (TENSOR, 0, "SUM", GROUP), {}, 12, TENSOR),
        ("all_gather", (PAIR, TENSOR, GROUP), {}, 28, TENSOR),
        ("all_gather_single", (PAIR[0], TENSOR, GROUP), {}, 20, TENSOR),
        ("allgather_fn", (PAIR[0], TENSOR, GROUP), {}, 20, TENSOR),
        ("all_gather_coalesced", ([PAIR, PAIR], [TENSOR, PAIR[0]], GROUP), {}, 56, TENSOR),
        ("reduce_scatter", (TENSOR, PAIR, "SUM", GROUP), {}, 28, TENSOR),
        ("reduce_scatter_single", (TENSOR, PAIR[0], "SUM", GROUP), {}, 20, TENSOR),
        ("reduce_scatter_fn", (TENSOR, PAIR[0], "SUM", GROUP), {}, 20, TENSOR),
        ("all_to_all", ([TENSOR, PAIR[1]], PAIR, GROUP), {}, 28, TENSOR),
        ("all_to_all_single", (TENSOR, PAIR[0], None, None, GROUP), {}, 20, TENSOR),
        ("gather", (TENSOR, PAIR, 0, GROUP), {}, 28, TENSOR),
        ("scatter", (TENSOR, PAIR, 0, GROUP), {}, 28, TENSOR),
        ("send", (TENSOR, 1, GROUP), {}, 12, TENSOR),
        ("irecv", (TENSOR, 1, GROUP), {}, 12, TENSOR),
        ("barrier", (GROUP,), {}, None, None),
        ("monitored_barrier", (GROUP, 30.0), {"wait_all_ranks": True}, None, None),
    ],
)
def test_what_each_operations_arguments_tell(name, args, settings, nbytes, device):
    """Its bytes, its group by position and by name, and the tensor on the device."""
    found = OPS[name].describe(*args, **settings)
    assert (nbytes, False) == found[:2]
    assert GROUP is found[2]
    assert device is found[3]
    before = args[: [value is GROUP for value in args].index(True)]
    assert GROUP is OPS[name].describe(*before, group=GROUP)[2]
    assert None is OPS[name].describe(*before)[2]


def test_the_group_and_device_of_one_ranks_share():
    """A rank that gives its share alone tells its group and device as the root does."""
    for name in ("gather", "scatter"):
        assert (12, True, GROUP, TENSOR) == OPS[name].describe(TENSOR, None, 0, GROUP)


def test_a_sparse_tensor_is_as_large_as_its_indices_and_values():
    """Of 1000 elements two travel: two indices of 8 bytes and two values of 4."""
    sparse = torch.sparse_coo_tensor([[3, 900]], [1.0, 2.0], (1000,), check_invariants=True)
    nbytes, is_share, group, tensor = OPS["all_reduce"].describe(sparse, group=GROUP)
    assert (24, False) == (nbytes, is_share)
    assert (GROUP, True) == (group, tensor is sparse)


def test_a_batch_is_as_large_as_its_larger_direction():
    """Links carry both directions at once; sent and received are added up apart."""

    def part(operation, number, group=GROUP):
        return SimpleNamespace(op=operation, tensor=torch.zeros(number), group=group)

    for sent, received, expected in ((3, 5, 20), (7, 5, 28)):
        batch = [part(plain.isend, 1), part(plain.irecv, received, None), part(plain.isend, sent - 1)]
        nbytes, is_share, group, tensor = OPS["batch_isend_irecv"].describe(batch)
        assert (expected, False) == (nbytes, is_share)
        assert (GROUP, True) == (group, tensor is batch[0].tensor)


def test_an_operation_that_is_not_in_the_table_has_a_group_at_most():
    """Nothing else of its arguments can be told."""
    assert (None, False, GROUP, None) == unknown(TENSOR, 3, group=GROUP, tag=1)
    assert (None, False, None, None) == unknown(TENSOR)
