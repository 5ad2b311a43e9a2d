"""A schedule played through: its order and its dependencies, with durations of one's choice, exactly."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing_torch.pipeline._actions import Action, Kind, Slot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from deep500_timing_torch.pipeline._actions import Order

__all__ = ["order_that_ran", "simulate"]


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
                needs = [one for one in _needs(slot) if one in rank_of]
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


def _needs(slot: Slot) -> list[Slot]:
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
    """The order in which each rank began its computations."""
    order: Order = {}
    for action in sorted(actions, key=lambda one: one.start_ns):
        order.setdefault(action.rank, []).append(action.slot)
    return order
