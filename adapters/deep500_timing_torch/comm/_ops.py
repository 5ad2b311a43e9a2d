"""What each operation moves: message sizes, and the bandwidths that follow from them.

The definitions are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): ``algbw = S / t``, and
``busbw = algbw`` times a factor that depends on the operation and on the number of ranks *of the group*, so that busbw
can be held against the speed of the links for any number of ranks.

This module runs as plain Python and, with the C types of ``_ops.pxd``, compiled.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Moved = tuple[int | None, bool, Any, Any]
    """Bytes of the message, None if unknown; whether they are one rank's share, to be multiplied by the ranks of the
    group; the group; a tensor on the device that does the work."""
    Describe = Callable[..., Moved]


def both_ways(ranks: int) -> float:
    """The factor of a reduction whose result every rank gets: reduce-scatter and all-gather in one."""
    return 2 * (ranks - 1) / ranks


def one_way(ranks: int) -> float:
    """The factor of an operation in which each rank keeps the share that is its own."""
    return (ranks - 1) / ranks


def whole(ranks: int) -> float:
    """The factor of an operation that moves the whole message once."""
    return 1.0 if ranks > 1 else 0.0


def bandwidths(
    nbytes: float | None, ranks: int, seconds: float, factor: Callable[[int], float] | None
) -> tuple[float | None, float | None]:
    """Algorithm and bus bandwidth in GB/s (1e9 bytes per second), each None where it cannot be known."""
    if nbytes is None or seconds <= 0:
        return None, None
    algbw = nbytes / seconds / 1e9
    return algbw, None if factor is None else algbw * factor(ranks)


class Op:
    """One operation."""

    def __init__(
        self,
        name: str,
        describe: Describe,
        factor: Callable[[int], float] | None,
        *,
        synchronizes: bool = False,
        point_to_point: bool = False,
    ) -> None:
        self.name = name
        self.describe = describe
        self.factor = factor
        """``busbw / algbw`` for a number of ranks; None if there is no bandwidth, or none that is known."""
        self.synchronizes = synchronizes
        """No rank can leave before every rank has come, so that the rank that waits least is late."""
        self.point_to_point = point_to_point
        """A message between two ranks, which does not advance the group's sequence number."""


def _bytes(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(_bytes, value))
    try:
        return int(value.nbytes)
    except RuntimeError:  # A sparse one has no such size: what travels are its indices and its values.
        return int(value._indices().nbytes + value._values().nbytes)


def _sized_by(size: str, names: str, *, on: str | None = None, share: str | None = None) -> Describe:
    """Describe an operation by its arguments.

    Args:
        size: The argument that makes up the message: a tensor, or lists of tensors.
        names: The arguments in their order, as in ``torch.distributed``.
        on: The argument on the device that does the work, if it is another one.
        share: The argument that is one rank's share of the message, on ranks without ``size``.
    """
    positions = names.split()
    on = on or size
    size_at, on_at, group_at = (positions.index(name) for name in (size, on, "group"))

    def describe(*args: Any, **kwargs: Any) -> Moved:
        given = len(args)
        tensor = args[on_at] if on_at < given else kwargs[on]
        while isinstance(tensor, (list, tuple)):
            tensor = tensor[0]
        message = args[size_at] if size_at < given else kwargs.get(size)
        group = args[group_at] if group_at < given else kwargs.get("group")
        if share is not None and not message:
            return _bytes(args[0] if given else kwargs[share]), True, group, tensor
        return _bytes(message), False, group, tensor

    return describe


def _batch(p2p_op_list: Any) -> Moved:
    # Links carry both directions at once, and nccl-tests' sendrecv counts one of them: the larger one here.
    sent = sum(_bytes(op.tensor) for op in p2p_op_list if "send" in op.op.__name__)
    received = sum(_bytes(op.tensor) for op in p2p_op_list if "send" not in op.op.__name__)
    return max(sent, received), False, p2p_op_list[0].group, p2p_op_list[0].tensor


def _group_at(position: int) -> Describe:
    """Describe an operation of unknown size by its group, the argument of that name or at that position."""

    def describe(*args: Any, group: Any = None, **_: Any) -> Moved:
        if len(args) > position:
            group = args[position]
        return None, False, group, None

    return describe


unknown = _group_at(1 << 30)
"""What can be said of the arguments of an operation that is not in the table: the group, if it is named."""


def _table() -> dict[str, Op]:
    def meeting(name: str, factor: Callable[[int], float], describe: Describe) -> Op:
        return Op(name, describe, factor, synchronizes=True)

    all_reduce = meeting("all_reduce", both_ways, _sized_by("tensor", "tensor op group"))
    gather = meeting(
        "all_gather_into_tensor",
        one_way,
        _sized_by("output_tensor", "output_tensor input_tensor group", on="input_tensor"),
    )
    scatter = meeting("reduce_scatter_tensor", one_way, _sized_by("input", "output input op group", on="output"))
    scatter_fn = _sized_by("tensor", "output_tensor tensor op group", on="output_tensor")
    send = Op("send", _sized_by("tensor", "tensor dst group"), whole, point_to_point=True)
    recv = Op("recv", _sized_by("tensor", "tensor src group"), whole, point_to_point=True)
    renamed = {
        "inference_all_reduce": all_reduce,
        "all_gather_single": gather,
        "allgather_fn": gather,
        "reduce_scatter_single": scatter,
        "reduce_scatter_fn": meeting("reduce_scatter_tensor", one_way, scatter_fn),
        "isend": send,
        "irecv": recv,
    }
    lists = "output_tensor_list input_tensor_list group"
    ops = [
        all_reduce,
        gather,
        scatter,
        send,
        recv,
        meeting("all_reduce_coalesced", both_ways, _sized_by("tensors", "tensors op group")),
        Op("reduce", _sized_by("tensor", "tensor dst op group"), whole),
        Op("broadcast", _sized_by("tensor", "tensor src group"), whole),
        meeting("all_gather", one_way, _sized_by("tensor_list", "tensor_list tensor group", on="tensor")),
        meeting(
            "all_gather_coalesced",
            one_way,
            _sized_by("output_tensor_lists", "output_tensor_lists input_tensor_list group", on="input_tensor_list"),
        ),
        meeting("reduce_scatter", one_way, _sized_by("input_list", "output input_list op group", on="output")),
        meeting("all_to_all", one_way, _sized_by("input_tensor_list", lists, on="output_tensor_list")),
        # Uneven splits still fill the buffer: a rank sends all of it.
        meeting(
            "all_to_all_single",
            one_way,
            _sized_by("input", "output input output_split_sizes input_split_sizes group", on="output"),
        ),
        Op("gather", _sized_by("gather_list", "tensor gather_list dst group", on="tensor", share="tensor"), one_way),
        Op("scatter", _sized_by("scatter_list", "tensor scatter_list src group", on="tensor", share="tensor"), one_way),
        Op("batch_isend_irecv", _batch, whole, point_to_point=True),
        Op("barrier", _group_at(0), None, synchronizes=True),
        Op("monitored_barrier", _group_at(0), None),
        Op("all_gather_object", _group_at(2), None, synchronizes=True),
        Op("broadcast_object_list", _group_at(2), None),
        Op("gather_object", _group_at(3), None),
        Op("scatter_object_list", _group_at(3), None),
        Op("send_object_list", _group_at(2), None),
        Op("recv_object_list", _group_at(2), None),
    ]
    return {op.name: op for op in ops} | renamed


OPS = _table()
"""Every function that is timed, by its name. Functions for the same operation share a name in the log, so that tables
of several PyTorch versions, with and without the kernel, can be compared."""

BY_OPERATOR = {
    "c10d::allreduce_": ("all_reduce", "tensors", ""),
    "c10d::allreduce_coalesced_": ("all_reduce_coalesced", "tensors", ""),
    "c10d::broadcast_": ("broadcast", "tensors", ""),
    "c10d::reduce_": ("reduce", "tensors", ""),
    "c10d::allgather_": ("all_gather", "output_tensors", ""),
    "c10d::_allgather_base_": ("all_gather_into_tensor", "output_tensor", ""),
    "c10d::allgather_coalesced_": ("all_gather_coalesced", "output_lists", ""),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather_into_tensor", "outputs", ""),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors", ""),
    "c10d::_reduce_scatter_base_": ("reduce_scatter_tensor", "input_tensor", ""),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor", "inputs", ""),
    "c10d::alltoall_": ("all_to_all", "input_tensors", ""),
    "c10d::alltoall_base_": ("all_to_all_single", "input", ""),
    "c10d::gather_": ("gather", "output_tensors", "input_tensors"),
    "c10d::scatter_": ("scatter", "input_tensors", "output_tensors"),
    "c10d::send": ("send", "tensors", ""),
    "c10d::recv_": ("recv", "tensors", ""),
    "c10d::recv_any_source_": ("recv", "tensors", ""),
    "c10d::barrier": ("barrier", "", ""),
    "c10d::monitored_barrier_": ("monitored_barrier", "", ""),
}
"""The operation that each dispatcher operator carries out, the argument whose bytes are the size of its message, and
the argument that is one rank's share of it where the former is empty, as on the ranks that are not the root."""
