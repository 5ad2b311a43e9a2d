"""The bubble of a measured batch: its size, its causes by simulation, and what would reduce it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from statistics import median

from deep500_timing.adapters import format_share, format_time
from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind, Order, Slot
from deep500_timing_torch.pipeline._schedules import NAMES, needs_of, normal_name, order_of, order_that_ran, simulate

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
        return self._share("drain_ns")

    @property
    def imbalance(self) -> float:
        return self._share("imbalance_ns")

    @property
    def messages(self) -> float:
        return self._share("messages_ns")

    @property
    def heaviest(self) -> StageLoad:
        return max(self.stages, key=lambda one: (one.busy_ns, -one.stage))

    @property
    def lightest(self) -> StageLoad:
        return min(self.stages, key=lambda one: (one.busy_ns, one.stage))

    def _share(self, name: str) -> float:
        total_ns: int = sum(getattr(rank, name) for rank in self.ranks)
        return total_ns / (len(self.ranks) * self.span_ns)

    def __str__(self) -> str:
        """A verdict, its reasons, what each rank did and what would help, a few lines of at most 120 columns."""
        name = "Pipeline" if self.schedule is None else NAMES[normal_name(self.schedule)]
        batches = "1 batch" if self.batches == 1 else f"{self.batches} batches"
        lines = [
            f"{name} of {len(self.ranks)} ranks, {self.microbatches} micro-batches, {batches} of "
            f"{self._each(self.span_ns)}: bubble {format_share(self.bubble)} (ideal {format_share(float(self.ideal))})",
            f"  warm-up {format_share(self.warm_up)}, drain {format_share(self.drain)}, "
            f"imbalance {format_share(self.imbalance)}, messages {format_share(self.messages)}",
            *(
                f"  rank {rank.rank}: busy {self._each(rank.busy_ns)}, idle {format_share(rank.bubble)}"
                for rank in self.ranks
            ),
        ]
        heaviest, lightest = self.heaviest, self.lightest
        if heaviest.excess >= _NOTABLE:
            excess = f"{format_share(heaviest.excess)} longer than the mean stage"
            if lightest.busy_ns:
                excess = f"{heaviest.busy_ns / lightest.busy_ns:.3g} times stage {lightest.stage}"
            saved_ns = self.span_ns - self.balanced_span_ns
            gain = f", and a batch {self._each(saved_ns)} shorter" if saved_ns > 0 and self.imbalance > 0 else ""
            lines.append(
                f"  stage {heaviest.stage} takes {excess}: "
                f"with equal stages the bubble is {format_share(self.balanced)}{gain}"
            )
        else:
            lines.append("  the stages take about the same")
        if self.doubled is not None:
            lines.append(f"  with twice the micro-batches the bubble is {format_share(self.doubled)}")
        return "\n".join(lines)

    def _each(self, total_ns: int) -> str:
        return format_time(total_ns / self.batches / 1e9)


def account(actions: Iterable[Action], schedule: str | None = None) -> Bubble:
    """Account for the time of a batch.

    The computations are simulated three times: as measured with free messages, with equal stages and free messages,
    and with equal stages and the measured delay of messages. The time of the batch beyond the first is due to messages.
    The idle time of a rank in the first beyond the second is due to imbalance. The rest is due to the schedule.

    Args:
        actions: The actions of one batch on all ranks; only computations count.
        schedule: The schedule's name, for the ideal and for twice the micro-batches.

    Raises:
        ValueError: There is no computation in it, or it takes no time, or there is no such schedule.
    """
    computed = [one for one in actions if one.kind in COMPUTE]
    span_ns = max((one.end_ns for one in computed), default=0) - min((one.start_ns for one in computed), default=0)
    if span_ns <= 0:
        raise ValueError("Accounting for a pipeline: no computation took any time. Give the actions of a whole batch.")
    order = order_that_ran(computed)
    took = {one.slot: one.duration_ns for one in computed}
    means = _mean_of(computed, lambda slot: slot.kind)
    delay_ns = _delay_ns(computed)
    as_it_was, _, _ = _play(order, took.__getitem__)
    equal, ideal, equal_actions = _play(order, lambda slot: means[slot.kind])
    balanced_span_ns, balanced, _ = _play(order, lambda slot: means[slot.kind], delay_ns)
    _, model, _ = _play(order, took.__getitem__, delay_ns)
    ranks = []
    for rank in sorted(order):
        busy_ns = sum(took[slot] for slot in order[rank])
        equal_idle_ns = equal - sum(means[slot.kind] for slot in order[rank])
        in_warm_up_ns = min(_idle_before_backward(equal_actions, rank), equal_idle_ns)
        free_idle_ns = max(as_it_was - busy_ns, 0)
        structural_ns = min(free_idle_ns, equal_idle_ns)
        warm_up_ns = structural_ns * in_warm_up_ns // equal_idle_ns if equal_idle_ns else 0
        ranks.append(
            RankBubble(
                rank=rank,
                busy_ns=busy_ns,
                idle_ns=span_ns - busy_ns,
                warm_up_ns=warm_up_ns,
                drain_ns=structural_ns - warm_up_ns,
                imbalance_ns=free_idle_ns - structural_ns,
                messages_ns=span_ns - busy_ns - free_idle_ns,
            )
        )
    microbatches = len({one.microbatch for one in computed})
    return Bubble(
        schedule=schedule,
        microbatches=microbatches,
        batches=1,
        span_ns=span_ns,
        ranks=tuple(ranks),
        stages=_loads(computed),
        ideal=ideal,
        balanced=float(balanced),
        doubled=None if schedule is None else _doubled(schedule, order, computed, microbatches, delay_ns),
        delay_ns=delay_ns,
        model=float(model),
        balanced_span_ns=balanced_span_ns,
    )


def together(bubbles: Sequence[Bubble]) -> Bubble:
    """Combine the accounts of several batches of the same shape: sum the times, average the what-ifs.

    Raises:
        ValueError: There is none, or they differ in ranks, stages or micro-batches.
    """
    if not bubbles:
        raise ValueError("Accounting for several batches: there is none.")
    first = bubbles[0]
    shapes = {(one.microbatches, len(one.ranks), len(one.stages), one.schedule) for one in bubbles}
    if len(shapes) > 1:
        raise ValueError(f"Accounting for several batches: they differ, {sorted(map(str, shapes))}. Account for each.")
    names = ("busy_ns", "idle_ns", "warm_up_ns", "drain_ns", "imbalance_ns", "messages_ns")
    ranks = tuple(
        RankBubble(ranks[0].rank, *(sum(getattr(one, name) for one in ranks) for name in names))
        for ranks in zip(*(one.ranks for one in bubbles), strict=True)
    )
    busy = [sum(one.busy_ns for one in stages) for stages in zip(*(one.stages for one in bubbles), strict=True)]
    mean = sum(busy) / len(busy)
    doubled = [one.doubled for one in bubbles if one.doubled is not None]
    return replace(
        first,
        batches=sum(one.batches for one in bubbles),
        span_ns=sum(one.span_ns for one in bubbles),
        ranks=ranks,
        stages=tuple(
            replace(stage, busy_ns=own, excess=own / mean - 1) for stage, own in zip(first.stages, busy, strict=True)
        ),
        balanced=sum(one.balanced for one in bubbles) / len(bubbles),
        doubled=sum(doubled) / len(doubled) if doubled else None,
        delay_ns=int(median(one.delay_ns for one in bubbles)),
        model=sum(one.model for one in bubbles) / len(bubbles),
        balanced_span_ns=sum(one.balanced_span_ns for one in bubbles),
    )


def _play(order: Order, duration_ns: Callable[[Slot], int], delay_ns: int = 0) -> tuple[int, Fraction, list[Action]]:
    # The simulated batch: its span, its bubble and its actions.
    actions = simulate(order, duration_ns, delay_ns=delay_ns)
    span_ns = max(one.end_ns for one in actions)
    return span_ns, 1 - Fraction(sum(one.duration_ns for one in actions), len(order) * span_ns), actions


def _mean_of(actions: Sequence[Action], key: Callable[[Slot], object]) -> dict[object, int]:
    sums: dict[object, list[int]] = {}
    for one in actions:
        sums.setdefault(key(one.slot), []).append(one.duration_ns)
    return {name: round(Fraction(sum(times), len(times))) for name, times in sums.items()}


def _idle_before_backward(actions: Sequence[Action], rank: int) -> int:
    # The time until the rank's first backward pass minus its computations before that. The whole batch without one.
    own = [one for one in actions if one.rank == rank]
    first = min((one.start_ns for one in own if one.kind is not Kind.FORWARD), default=None)
    if first is None:
        return max(one.end_ns for one in actions)
    return first - sum(one.duration_ns for one in own if one.end_ns <= first)


def _delay_ns(actions: Sequence[Action]) -> int:
    # Where a rank waited for another one's result: from that result's end to the start of the computation.
    ends: dict[Slot, Action] = {one.slot: one for one in actions}
    free_ns: dict[int, int] = {}
    delays = []
    for one in sorted(actions, key=lambda one: one.start_ns):
        sources = [ends[slot] for slot in needs_of(one.slot) if slot in ends]
        arrivals = [source.end_ns for source in sources if source.rank != one.rank]
        before = free_ns.get(one.rank)
        if arrivals and (before is None or max(arrivals) > before):
            delays.append(max(one.start_ns - max(arrivals), 0))
        free_ns[one.rank] = one.end_ns
    return int(median(delays)) if delays else 0


def _loads(actions: Sequence[Action]) -> tuple[StageLoad, ...]:
    busy: dict[tuple[int, int], int] = {}
    for one in actions:
        busy[one.stage, one.rank] = busy.get((one.stage, one.rank), 0) + one.duration_ns
    mean = sum(busy.values()) / len(busy)
    return tuple(
        StageLoad(stage, rank, own, own / mean - 1 if mean else 0.0) for (stage, rank), own in sorted(busy.items())
    )


def _doubled(schedule: str, order: Order, actions: Sequence[Action], microbatches: int, delay_ns: int) -> float | None:
    stages = len({one.stage for one in actions})
    try:
        longer = order_of(schedule, len(order), 2 * microbatches, stages // len(order))
    except ValueError:
        return None
    means = _mean_of(actions, lambda slot: (slot.stage, slot.kind))
    if any((slot.stage, slot.kind) not in means for slots in longer.values() for slot in slots):
        return None
    return float(_play(longer, lambda slot: means[slot.stage, slot.kind], delay_ns)[1])
