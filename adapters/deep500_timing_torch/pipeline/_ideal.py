"""The bubble of a schedule in closed form: all stages alike, messages free."""

from __future__ import annotations

from fractions import Fraction

from deep500_timing_torch.pipeline._orders import V_SHAPED, check_stages, normal_name

__all__ = ["ideal_bubble"]


def ideal_bubble(
    schedule: str,
    ranks: int,
    microbatches: int,
    stages_per_rank: int = 1,
    *,
    forward: int = 1,
    backward_input: int = 1,
    backward_weight: int = 1,
) -> Fraction | None:
    """The share of the batch in which ranks are idle, if all stages take the same time and messages none.

    Of ``p`` ranks with ``v`` stages each and ``m`` micro-batches a rank computes ``v * m`` times, and is idle for
    ``p - 1`` times as long as one forward and one backward pass of a stage take: ``(p - 1) / (v * m + p - 1)``,
    for any times of the two (GPipe: Huang et al. 2019, arXiv 1811.06965; 1F1B and interleaved: Narayanan et al. 2021,
    arXiv 2104.04473). With the gradients of weights put off it is idle for ``(p - 1) * (F + I - W)`` only (Qi et al.
    2023, arXiv 2401.10241, table 1, ZB-H1), but never for less than ``(p - 1)`` times the longer of F and I: found by
    playing the schedule through.

    Args:
        schedule: Its name.
        ranks: Of the pipeline.
        microbatches: In a batch.
        stages_per_rank: On each rank.
        forward: Time of the forward pass of a stage, in any unit.
        backward_input: Time of the gradient of its input, in the same unit.
        backward_weight: Time of the gradients of its weights.

    Returns:
        The share, exactly. None where none is known: for the V-shaped schedules unless the three take the same and
        there are at least ``2 * ranks - 1`` micro-batches (DualPipeV: ``2 * ranks``), and for interleaved ones where
        the micro-batches do not fill their rounds.

    Raises:
        ValueError: There is no such schedule, or it does not go with the numbers.
    """
    kind = normal_name(schedule)
    check_stages(kind, stages_per_rank)
    if min(ranks, microbatches) < 1 or min(forward, backward_input, backward_weight) < 0:
        raise ValueError(
            f"Ideal bubble of {ranks} ranks and {microbatches} micro-batches: give at least 1, and no time below 0."
        )
    whole = forward + backward_input + backward_weight
    if whole == 0 or (kind == "1f1b" and microbatches < ranks):
        return None
    lost = whole
    if kind in V_SHAPED:
        least = 2 * ranks - (kind == "zbvzerobubble")
        if not forward == backward_input == backward_weight or microbatches < least:
            return None
        lost = forward
    elif kind.startswith("interleaved"):
        if microbatches % max(1, microbatches // ranks) or microbatches < ranks:
            return None
        if kind == "interleavedzerobubble":
            lost = max(forward, backward_input, forward + backward_input - backward_weight)
    idle = (ranks - 1) * lost
    return Fraction(idle, stages_per_rank * microbatches * whole + idle)
