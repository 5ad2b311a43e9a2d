"""The schedules by name: their classes in PyTorch, and the order in which each rank computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.pipeline._actions import Kind, Slot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from deep500_timing_torch.pipeline._actions import Order

__all__ = ["NAMES", "SINGLE", "V_SHAPED", "name_of_schedule", "normal_name", "order_of", "rank_of_stage", "slots_of"]

NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved1f1b": "Interleaved1F1B",
    "loopedbfs": "LoopedBFS",
    "interleavedzerobubble": "InterleavedZeroBubble",
    "zbvzerobubble": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""PyTorch's names of its schedules, by the same in small letters without separators."""
_OTHER_NAMES = {
    "zerobubble": "interleavedzerobubble",
    "zb1p": "interleavedzerobubble",
    "zbv": "zbvzerobubble",
    "bfs": "loopedbfs",
    "pipedream": "1f1b",
}
SINGLE = frozenset({"gpipe", "1f1b"})
"""The schedules with one stage on each rank."""
V_SHAPED = frozenset({"zbvzerobubble", "dualpipev"})
"""Those with two, the first from the front and the second from the back of the model."""
_KINDS = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}


def normal_name(name: str) -> str:
    """The name in small letters, one for all the ways of writing it.

    Raises:
        ValueError: No schedule is called so.
    """
    plain = name.lower().replace("_", "").replace("-", "").replace(" ", "").removeprefix("schedule")
    plain = _OTHER_NAMES.get(plain, plain)
    if plain not in NAMES:
        raise ValueError(f"Schedule {name!r}: there is none of this name. There are {', '.join(NAMES.values())}.")
    return plain


def name_of_schedule(schedule: object) -> str | None:
    """The normal name of a schedule of PyTorch; None for other classes."""
    if type(schedule).__module__ != "torch.distributed.pipelining.schedules":
        return None
    name = type(schedule).__name__.removeprefix("Schedule").lower()
    return name if name in NAMES else None


def rank_of_stage(name: str, stage: int, ranks: int) -> int:
    """The rank that a stage lies on."""
    turn, place = divmod(stage, ranks)
    return ranks - 1 - place if turn % 2 and normal_name(name) in V_SHAPED else place


def order_of(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> Order:
    """What each rank computes under a schedule, in its order.

    Args:
        name: The schedule.
        ranks: Of the pipeline.
        microbatches: In a batch.
        stages_per_rank: Two or more under the interleaved schedules, two under the V-shaped ones.

    Raises:
        ValueError: The schedule is unknown, or does not go with the numbers.
    """
    kind = normal_name(name)
    if ranks < 1 or microbatches < 1:
        raise ValueError(f"Schedule {NAMES[kind]} of {ranks} ranks and {microbatches} micro-batches: give at least 1.")
    check_stages(kind, stages_per_rank)
    if kind == "gpipe":
        return {rank: _gpipe(rank, microbatches) for rank in range(ranks)}
    if kind == "1f1b":
        return {rank: _one_forward_one_backward(rank, ranks, microbatches) for rank in range(ranks)}
    return _torchs_order(kind, ranks, microbatches, stages_per_rank)


def check_stages(name: str, stages_per_rank: int) -> None:
    """Refuse a number of stages on each rank that the schedule has no use for.

    Raises:
        ValueError: It has none.
    """
    kind = normal_name(name)
    if kind in SINGLE and stages_per_rank != 1:
        raise ValueError(
            f"Schedule {NAMES[kind]}: it has one stage on each rank, not {stages_per_rank}. Take Interleaved1F1B."
        )
    if kind in V_SHAPED and stages_per_rank != 2:
        raise ValueError(
            f"Schedule {NAMES[kind]}: it has two stages on each rank, not {stages_per_rank}. Pass stages_per_rank=2."
        )


def _gpipe(rank: int, microbatches: int) -> list[Slot]:
    numbers = range(microbatches)
    return [Slot(rank, Kind.FORWARD, one) for one in numbers] + [Slot(rank, Kind.BACKWARD, one) for one in numbers]


def _one_forward_one_backward(rank: int, ranks: int, microbatches: int) -> list[Slot]:
    if microbatches < ranks:
        raise ValueError(
            f"Schedule 1F1B: {microbatches} micro-batches are fewer than its {ranks} stages. Give at least {ranks}."
        )
    ahead = ranks - rank - 1
    slots = [Slot(rank, Kind.FORWARD, one) for one in range(ahead)]
    for one in range(microbatches - ahead):
        slots += [Slot(rank, Kind.FORWARD, one + ahead), Slot(rank, Kind.BACKWARD, one)]
    return slots + [Slot(rank, Kind.BACKWARD, one) for one in range(microbatches - ahead, microbatches)]


def _torchs_order(kind: str, ranks: int, microbatches: int, stages_per_rank: int) -> Order:
    # PyTorch works its order out when a schedule is made, of all ranks on each; the stages are only asked for numbers.
    from torch.distributed.pipelining.schedules import get_schedule_class

    count = ranks * stages_per_rank
    stand_ins = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=count,
            group_size=ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == count - 1,
            submod=None,
        )
        for stage in range(count)
        if rank_of_stage(kind, stage, ranks) == 0
    ]
    schedule: Any = get_schedule_class(NAMES[kind])(stand_ins, microbatches, loss_fn=_no_loss)
    return slots_of(schedule.pipeline_order)


def _no_loss(*_: object) -> None:
    """Stands in for a loss function, so that a schedule plans its backward passes."""


def slots_of(pipeline_order: Mapping[int, Sequence[Any]]) -> Order:
    """The computations in an order of PyTorch's, without its idle places."""
    order: Order = {}
    for rank, actions in pipeline_order.items():
        order[rank] = []
        for action in actions:
            for one in () if action is None else action.sub_actions or (action,):
                kind = _KINDS.get(one.computation_type.value)
                if kind is not None and one.microbatch_index is not None:
                    order[rank].append(Slot(one.stage_index, kind, one.microbatch_index))
    return order
