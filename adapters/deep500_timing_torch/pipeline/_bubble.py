"""The bubble of a measured batch, as plain data: its size, its causes, and what would reduce it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep500_timing.adapters import format_share, format_time
from deep500_timing_torch.pipeline._orders import NAMES, normal_name

if TYPE_CHECKING:
    from fractions import Fraction

__all__ = ["Bubble", "RankBubble", "StageLoad"]

_NOTABLE = 0.02
"""Excess over the mean from which a stage is called heavy."""


@dataclass(frozen=True, slots=True)
class RankBubble:
    """The time of one rank in a batch; the four causes add up to ``idle_ns``.

    Attributes:
        rank: Which one.
        busy_ns: Computing.
        idle_ns: The rest of the span.
        warm_up_ns: Idle until its first backward pass, as the schedule has it even of equal stages.
        drain_ns: Idle after that, as the schedule has it.
        imbalance_ns: Idle because stages take different times.
        messages_ns: The time that the computations do not explain: messages, and everything else between them.
    """

    rank: int
    busy_ns: int
    idle_ns: int
    warm_up_ns: int
    drain_ns: int
    imbalance_ns: int
    messages_ns: int

    @property
    def bubble(self) -> float:
        """The share of the span in which it is idle."""
        return self.idle_ns / (self.busy_ns + self.idle_ns)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The load of one stage.

    Attributes:
        stage: Which one.
        rank: Where it is.
        busy_ns: All its computations.
        excess: How much longer than the mean of all stages: 0.25 is a quarter longer.
    """

    stage: int
    rank: int
    busy_ns: int
    excess: float


@dataclass(frozen=True, slots=True)
class Bubble:
    """The bubble of a batch, or of several together.

    Attributes:
        schedule: The schedule's name, None if it is not one of PyTorch's.
        microbatches: In a batch.
        batches: How many batches this is of.
        span_ns: From the first computation on any rank to the last.
        ranks: By rank.
        stages: By stage.
        ideal: The bubble of the same order if all stages took the mean and messages took no time.
        balanced: What-if: the bubble if all stages took the mean, with the measured delay of messages.
        doubled: What-if: with twice the micro-batches; None where the schedule cannot have them.
        delay_ns: Median delay of a message to a waiting rank; the what-ifs use it.
        model: The bubble of the simulated batch with that delay. Near ``bubble``, the what-ifs can be trusted.
        balanced_span_ns: The span of the what-if with equal stages.
    """

    schedule: str | None
    microbatches: int
    batches: int
    span_ns: int
    ranks: tuple[RankBubble, ...]
    stages: tuple[StageLoad, ...]
    ideal: Fraction
    balanced: float
    doubled: float | None
    delay_ns: int
    model: float
    balanced_span_ns: int

    @property
    def bubble(self) -> float:
        """1 - busy / span, over all ranks."""
        return self._share("idle_ns")

    @property
    def warm_up(self) -> float:
        """The part of the bubble that is the schedule's warm-up."""
        return self._share("warm_up_ns")

    @property
    def drain(self) -> float:
        """The part that is the schedule's drain."""
        return self._share("drain_ns")

    @property
    def imbalance(self) -> float:
        """The part that unequal stages cost."""
        return self._share("imbalance_ns")

    @property
    def messages(self) -> float:
        """The part that waiting for messages costs."""
        return self._share("messages_ns")

    @property
    def heaviest(self) -> StageLoad:
        """The stage that takes longest."""
        return max(self.stages, key=lambda one: (one.busy_ns, -one.stage))

    @property
    def lightest(self) -> StageLoad:
        """The stage that takes the least."""
        return min(self.stages, key=lambda one: (one.busy_ns, one.stage))

    def _share(self, name: str) -> float:
        total_ns: int = sum(getattr(rank, name) for rank in self.ranks)
        return total_ns / (len(self.ranks) * self.span_ns)

    def __str__(self) -> str:
        """A few sentences."""
        return _sentences(self)


def _beside(heaviest: StageLoad, lightest: StageLoad) -> str:
    if not lightest.busy_ns:
        return f"{format_share(heaviest.excess)} longer than the mean stage"
    return f"{heaviest.busy_ns / lightest.busy_ns:.3g} times stage {lightest.stage}"


def _sentences(bubble: Bubble) -> str:
    """A verdict, its reasons, what each rank did and what would help, a few lines of at most 120 columns."""
    name = "Pipeline" if bubble.schedule is None else NAMES[normal_name(bubble.schedule)]
    each = format_time(bubble.span_ns / bubble.batches / 1e9)
    batches = "1 batch" if bubble.batches == 1 else f"{bubble.batches} batches"
    lines = [
        f"{name} of {len(bubble.ranks)} ranks, {bubble.microbatches} micro-batches, {batches} of {each}: "
        f"bubble {format_share(bubble.bubble)} (ideal {format_share(float(bubble.ideal))})",
        f"  warm-up {format_share(bubble.warm_up)}, drain {format_share(bubble.drain)}, "
        f"imbalance {format_share(bubble.imbalance)}, messages {format_share(bubble.messages)}",
    ]
    lines += [
        f"  rank {rank.rank}: busy {format_time(rank.busy_ns / bubble.batches / 1e9)}, idle {format_share(rank.bubble)}"
        for rank in bubble.ranks
    ]
    heaviest = bubble.heaviest
    if heaviest.excess >= _NOTABLE:
        saved = (bubble.span_ns - bubble.balanced_span_ns) / bubble.batches / 1e9
        gain = f", and a batch {format_time(saved)} shorter" if saved > 0 and bubble.imbalance > 0 else ""
        lines.append(
            f"  stage {heaviest.stage} takes {_beside(heaviest, bubble.lightest)}: "
            f"with equal stages the bubble is {format_share(bubble.balanced)}{gain}"
        )
    else:
        lines.append("  the stages take about the same")
    if bubble.doubled is not None:
        lines.append(f"  with twice the micro-batches the bubble is {format_share(bubble.doubled)}")
    return "\n".join(lines)
