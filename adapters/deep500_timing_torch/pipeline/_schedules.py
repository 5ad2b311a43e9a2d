"""The schedules by name: the order in which each rank computes, simulated, and their ideal bubble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from deep500_timing_torch.pipeline._actions import Action, Kind, Order, Slot

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
    """The name in small letters, one for all the ways of writing it."""
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
    """The rank that has a stage under the schedule of this name."""
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
    """Refuse a number of stages on each rank that the schedule has no use for."""
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


def simulate(
    order: Mapping[int, Sequence[Slot]], duration_ns: Callable[[Slot], int], *, delay_ns: int = 0
) -> list[Action]:
    """When everything in a schedule happens, if each rank begins each computation as soon as it can.

    A forward pass needs that of the stage before it, a backward pass its own forward pass and the backward pass of the
    stage after it, and the gradients of weights those of the input.

    Args:
        order: What each rank computes, in its order.
        duration_ns: How long a computation takes.
        delay_ns: How long a message takes from one rank to another.

    Returns:
        The computations, those of rank 0 first, from time 0.

    Raises:
        ValueError: The order cannot be followed: ranks wait for one another.
    """
    rank_of = {slot: rank for rank, slots in order.items() for slot in slots}
    ends: dict[Slot, int] = {}
    done: dict[int, list[Action]] = {rank: [] for rank in order}
    clock = dict.fromkeys(order, 0)
    waiting = set(order)
    while waiting:
        stuck = True
        for rank in sorted(waiting):
            slots = order[rank]
            while len(done[rank]) < len(slots):
                slot = slots[len(done[rank])]
                needs = [one for one in needs_of(slot) if one in rank_of]
                if any(one not in ends for one in needs):
                    break
                arrivals = [ends[one] + (delay_ns if rank_of[one] != rank else 0) for one in needs]
                start_ns = max([clock[rank], *arrivals])
                ends[slot] = clock[rank] = start_ns + duration_ns(slot)
                done[rank].append(Action(rank, slot.stage, slot.microbatch, slot.kind, start_ns, clock[rank]))
                stuck = False
            if len(done[rank]) == len(slots):
                waiting.discard(rank)
        if stuck and waiting:
            heads = ", ".join(
                f"rank {rank} at {slot.kind}{slot.microbatch} of stage {slot.stage}"
                for rank in sorted(waiting)
                for slot in [order[rank][len(done[rank])]]
            )
            raise ValueError(f"Simulating a pipeline: its ranks wait for one another for ever: {heads}.")
    return [action for rank in sorted(order) for action in done[rank]]


def needs_of(slot: Slot) -> list[Slot]:
    """The computations that one waits for; a backward pass needs whichever of the two kinds there is."""
    stage, kind, microbatch = slot
    if kind is Kind.FORWARD:
        return [Slot(stage - 1, Kind.FORWARD, microbatch)]
    if kind is Kind.BACKWARD_WEIGHT:
        return [Slot(stage, Kind.BACKWARD_INPUT, microbatch)]
    return [
        Slot(stage, Kind.FORWARD, microbatch),
        Slot(stage + 1, Kind.BACKWARD, microbatch),
        Slot(stage + 1, Kind.BACKWARD_INPUT, microbatch),
    ]


def order_that_ran(actions: Sequence[Action]) -> Order:
    """The order of the actions on each rank, by the times at which they began."""
    order: Order = {}
    for action in sorted(actions, key=lambda one: one.start_ns):
        order.setdefault(action.rank, []).append(action.slot)
    return order


def ideal_bubble(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    *,
    forward: int = 1,
    backward_input: int = 1,
    backward_weight: int = 1,
) -> Fraction:
    """The share of the batch in which ranks are idle, if all stages take the same time and messages none.

    It is simulated. For GPipe, 1F1B and interleaved schedules it is ``(p - 1) / (v * m + p - 1)`` of ``p`` ranks with
    ``v`` stages each and ``m`` micro-batches (arXiv 1811.06965, 2104.04473).

    Args:
        schedule: Its name.
        ranks: Of the pipeline.
        microbatches: In a batch.
        stages_per_rank: On each rank.
        forward: Time of the forward pass of a stage, in any unit.
        backward_input: Time of the gradient of its input, in the same unit.
        backward_weight: Time of the gradients of its weights.

    Raises:
        ValueError: There is no such schedule, or it does not go with the numbers, or nothing takes any time.
    """
    took = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_input + backward_weight,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
    }
    if min(took.values()) < 0 or not any(took.values()):
        raise ValueError("Ideal bubble: no time is below 0, and one is above.")
    actions = simulate(order_of(schedule, ranks, microbatches, stages_per_rank), lambda slot: took[slot.kind])
    return 1 - Fraction(sum(one.duration_ns for one in actions), ranks * max(one.end_ns for one in actions))
