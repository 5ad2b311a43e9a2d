"""The accounting of a pipeline, on schedules that are simulated: no rank, no clock."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

pytest.importorskip("torch")

from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing_torch.pipeline import (
    Action,
    Kind,
    Slot,
    account,
    ideal_bubble,
    order_of,
    order_that_ran,
    simulate,
    together,
)

SINGLE = ["GPipe", "1F1B"]
SEVERAL = ["Interleaved1F1B", "LoopedBFS"]
ZERO = ["InterleavedZeroBubble"]
V_SHAPED = ["ZBVZeroBubble", "DualPipeV"]


def _times(forward, backward_input, backward_weight):
    times = {
        Kind.FORWARD: forward,
        Kind.BACKWARD_INPUT: backward_input,
        Kind.BACKWARD_WEIGHT: backward_weight,
        Kind.BACKWARD: backward_input + backward_weight,
    }
    return lambda slot: times[slot.kind]


def _bubble_of(actions, ranks):
    span = max(one.end_ns for one in actions) - min(one.start_ns for one in actions)
    return 1 - Fraction(sum(one.duration_ns for one in actions), ranks * span)


@st.composite
def _shapes(draw):
    name = draw(st.sampled_from(SINGLE + SEVERAL + ZERO + V_SHAPED))
    ranks = draw(st.integers(1, 5))
    stages = 1 if name in SINGLE else 2 if name in V_SHAPED else draw(st.integers(1, 3))
    microbatches = draw(st.integers(1, 3)) * ranks if name in SEVERAL + ZERO else draw(st.integers(2 * ranks, 14))
    forward, backward_input, backward_weight = (draw(st.integers(1, 9)) for _ in range(3))
    if name in V_SHAPED:
        backward_input = backward_weight = forward
    return name, ranks, microbatches, stages, (forward, backward_input, backward_weight)


@given(_shapes())
@settings(max_examples=60, deadline=None)
def test_the_ideal_of_a_schedule_is_its_closed_form(shape):
    """Exactly, for any times of the passes, where every rank meets every micro-batch in one order."""
    name, ranks, microbatches, stages, (forward, backward_input, backward_weight) = shape
    if name in SINGLE + SEVERAL:
        times = {"forward": forward, "backward_input": backward_input, "backward_weight": backward_weight}
        expected = Fraction(ranks - 1, stages * microbatches + ranks - 1)
        assert expected == ideal_bubble(name, ranks, microbatches, stages, **times)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages", "expected"),
    [
        ("GPipe", 4, 8, 1, Fraction(3, 11)),
        ("1F1B", 2, 4, 1, Fraction(1, 5)),
        ("interleaved_1f1b", 4, 8, 2, Fraction(3, 19)),
        ("Looped-BFS", 2, 4, 2, Fraction(1, 9)),
        ("zero bubble", 4, 8, 1, Fraction(1, 9)),
        ("ZBV", 4, 8, 2, Fraction(1, 17)),
        ("1F1B", 1, 3, 1, Fraction(0)),
    ],
)
def test_closed_forms(name, ranks, microbatches, stages, expected):
    """The figures that one works out by hand."""
    assert expected == ideal_bubble(name, ranks, microbatches, stages)


@given(_shapes(), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_equal_stages_idle_for_the_schedule_and_for_messages_alone(shape, delay_ns):
    """No imbalance is found where there is none; without a delay no waiting; and the ideal is the schedule's."""
    name, ranks, microbatches, stages, times = shape
    order = order_of(name, ranks, microbatches, stages)
    actions = simulate(order, _times(*times), delay_ns=delay_ns)
    bubble = account(actions, name)
    assert 0 == bubble.imbalance
    assert (delay_ns == 0 or ranks == 1) == (bubble.messages == 0)
    for rank in bubble.ranks:
        assert rank.idle_ns == rank.warm_up_ns + rank.drain_ns + rank.imbalance_ns + rank.messages_ns
        assert min(rank.warm_up_ns, rank.drain_ns, rank.messages_ns) >= 0
    if delay_ns == 0:
        assert float(bubble.ideal) == pytest.approx(bubble.bubble)
    if name in SINGLE:
        assert Fraction(ranks - 1, stages * microbatches + ranks - 1) == bubble.ideal
    assert pytest.approx(bubble.bubble) == bubble.model


@given(
    st.sampled_from(SINGLE + SEVERAL),
    st.lists(st.integers(1, 40), min_size=4, max_size=4),
    st.lists(st.integers(0, 30), min_size=1, max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_the_causes_add_up_whatever_a_batch_looked_like(name, loads, noise):
    """Idle time is the sum of its causes on each rank, and none of them is below 0."""
    ranks, stages = (4, 1) if name in SINGLE else (2, 2)
    order = order_of(name, ranks, 8, stages)
    waits = iter(noise * 100)
    clean = simulate(order, lambda slot: loads[slot.stage] * (2 if slot.kind is Kind.BACKWARD else 1) + next(waits))
    late = simulate(order, {one.slot: one.duration_ns for one in clean}.__getitem__, delay_ns=noise[0])
    bubble = account(late, name)
    for rank in bubble.ranks:
        causes = (rank.warm_up_ns, rank.drain_ns, rank.imbalance_ns, rank.messages_ns)
        assert rank.idle_ns == sum(causes)
        assert min(causes) >= 0
        assert bubble.span_ns == rank.busy_ns + rank.idle_ns
    total = bubble.warm_up + bubble.drain + bubble.imbalance + bubble.messages
    assert pytest.approx(bubble.bubble) == total
    assert sum(one.duration_ns for one in late) == sum(stage.busy_ns for stage in bubble.stages)


def test_the_parts_of_1f1b():
    """Two ranks, by hand: rank 1 waits for its first input at the start, rank 0 for its gradients."""
    actions = simulate(order_of("1F1B", 2, 4), _times(10, 10, 10))
    bubble = account(actions, "1F1B")
    assert 150 == bubble.span_ns
    assert [120, 120] == [rank.busy_ns for rank in bubble.ranks]
    assert [20, 10] == [rank.warm_up_ns for rank in bubble.ranks]
    assert [10, 20] == [rank.drain_ns for rank in bubble.ranks]
    assert Fraction(1, 5) == bubble.ideal
    assert pytest.approx(1 / 5) == bubble.balanced
    assert pytest.approx(1 / 9) == bubble.doubled


def test_a_heavy_stage_is_named_with_what_it_costs():
    """One stage of four takes twice as long: by how much it is above the mean, and what balance would save."""
    order = order_of("1F1B", 4, 8)
    actions = simulate(order, lambda slot: 30 if slot.stage == 2 else 15)
    bubble = account(actions, "1F1B")
    assert 2 == bubble.heaviest.stage
    assert pytest.approx(30 / 18.75 - 1) == bubble.heaviest.excess
    balanced = simulate(order, lambda _: 19)
    assert pytest.approx(float(_bubble_of(balanced, 4))) == bubble.balanced
    assert bubble.imbalance > 0.1
    assert 0 == bubble.messages
    assert 0 == bubble.ranks[2].imbalance_ns
    assert min(bubble.ranks[one].imbalance_ns for one in (0, 1, 3)) > 0
    assert "stage 2 takes 2 times stage 0" in str(bubble)


def test_slow_messages_are_told_from_slow_stages():
    """Equal stages with messages of 7: they are the only cause besides the schedule, and their time is found."""
    actions = simulate(order_of("GPipe", 3, 6), _times(10, 10, 10), delay_ns=7)
    bubble = account(actions, "GPipe")
    assert 7 == bubble.delay_ns
    assert 0 == bubble.imbalance
    assert [bubble.span_ns - 240] * 3 == [rank.messages_ns for rank in bubble.ranks]
    assert pytest.approx(bubble.bubble) == bubble.balanced


def test_twice_the_microbatches_is_what_twice_the_microbatches_gives():
    """The what-if of a batch of 4 is the bubble of a batch of 8."""
    for name in ("GPipe", "1F1B", "InterleavedZeroBubble"):
        small = account(simulate(order_of(name, 2, 4), _times(5, 5, 5), delay_ns=2), name)
        large = account(simulate(order_of(name, 2, 8), _times(5, 5, 5), delay_ns=2), name)
        assert large.bubble == pytest.approx(small.doubled)


@pytest.mark.parametrize(("name", "most"), [("ZBV", 0.03), ("DualPipeV", 0.03)])
def test_the_ideal_of_v_shaped_schedules_is_known_for_any_times(name, most):
    """Passes of measured length never take exactly the same; the ideal is that of equal stages and free messages."""
    order = order_of(name, 2, 8, 2)
    equal = account(simulate(order, _times(10, 11, 9)), name)
    slower = account(simulate(order, _times(10, 11, 9), delay_ns=4), name)
    assert 0 < equal.ideal < most
    assert float(equal.ideal) == pytest.approx(equal.bubble)
    assert equal.ideal == slower.ideal
    assert "(ideal 2 %)" in str(equal)


def test_a_stage_far_above_the_others_is_compared_with_the_lightest():
    """Of two stages one can take at most 100 % more than their mean, for any factor."""
    bubble = account(simulate(order_of("GPipe", 2, 4), lambda slot: 85 if slot.stage else 10))
    assert "stage 1 takes 8.5 times stage 0" in str(bubble)


def test_a_custom_schedule_has_no_doubling():
    """Its bubble, its ideal and their causes are known."""
    bubble = account(simulate(order_of("GPipe", 2, 4), _times(5, 5, 5)))
    assert Fraction(1, 5) == bubble.ideal
    assert bubble.doubled is None
    assert pytest.approx(1 / 5) == bubble.bubble


def test_other_actions_do_not_count_as_busy():
    """Waiting, loading and stepping are no computation, and lie outside the span."""
    actions = simulate(order_of("1F1B", 2, 4), _times(10, 10, 10))
    more = [
        Action(0, 0, 0, Kind.LOAD, -500, 0),
        Action(1, 1, 0, Kind.WAIT_ACTIVATION, 0, 10),
        Action(0, -1, -1, Kind.STEP, 150, 900),
    ]
    assert account(actions, "1F1B") == account([*actions, *more], "1F1B")


def test_a_batch_of_forward_passes():
    """Evaluation has a bubble as well."""
    order = {
        rank: [slot for slot in slots if slot.kind is Kind.FORWARD] for rank, slots in order_of("GPipe", 2, 4).items()
    }
    bubble = account(simulate(order, _times(10, 10, 10)), "GPipe")
    assert pytest.approx(1 / 5) == bubble.bubble
    assert Fraction(1, 5) == bubble.ideal


def test_several_batches_are_one_account():
    """Sums of times, so that a long batch weighs more than a short one."""
    one = account(simulate(order_of("1F1B", 2, 4), _times(10, 10, 10)), "1F1B")
    other = account(simulate(order_of("1F1B", 2, 4), _times(10, 10, 10), delay_ns=30), "1F1B")
    both = together([one, other])
    assert 2 == both.batches
    assert one.span_ns + other.span_ns == both.span_ns
    idle = sum(rank.idle_ns for bubble in (one, other) for rank in bubble.ranks)
    assert pytest.approx(idle / 2 / both.span_ns) == both.bubble
    with pytest.raises(ValueError) as raised:
        together([one, replace(other, microbatches=9)])
    assert "they differ" in str(raised.value)


def test_an_order_that_cannot_be_followed_is_an_error():
    """The error names the ranks that wait for one another and their actions."""
    order = {
        0: [Slot(0, Kind.BACKWARD, 0), Slot(0, Kind.FORWARD, 0)],
        1: [Slot(1, Kind.FORWARD, 0), Slot(1, Kind.BACKWARD, 0)],
    }
    with pytest.raises(ValueError) as raised:
        simulate(order, lambda _: 1)
    assert "rank 0 at B0 of stage 0, rank 1 at F0 of stage 1" in str(raised.value)


@given(_shapes())
@settings(max_examples=20, deadline=None)
def test_the_order_of_a_batch_is_read_from_its_times(shape):
    """What ran is the schedule that was planned."""
    name, ranks, microbatches, stages, times = shape
    order = order_of(name, ranks, microbatches, stages)
    assert order == order_that_ran(simulate(order, _times(*times)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: order_of("2F2B", 2, 4), "there is none of this name"),
        (lambda: order_of("1F1B", 4, 3), "3 micro-batches are fewer than its 4 stages"),
        (lambda: order_of("GPipe", 2, 4, 2), "one stage on each rank, not 2"),
        (lambda: order_of("ZBV", 2, 4, 1), "two stages on each rank, not 1"),
        (lambda: order_of("GPipe", 0, 4), "give at least 1"),
        (lambda: ideal_bubble("GPipe", 2, 0), "give at least 1"),
        (lambda: account([]), "no computation took any time"),
        (lambda: together([]), "there is none"),
    ],
)
def test_bad_input(call, text):
    """Each error describes the mistake."""
    with pytest.raises(ValueError) as raised:
        call()
    assert text in str(raised.value)
