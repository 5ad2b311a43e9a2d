"""Callables that stand in for others: they are called as those are, and note down when."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest

from deep500_timing._recording.calls import (
    CallLog,
    NotedItems,
    TimedCall,
    TimedIssue,
    TimedWaits,
    log_of_this_thread,
)
from deep500_timing.testing import ManualClock

ISSUE, WAIT, WAIT_SENT, UNKNOWN = 10, 11, 21, 99


class Thing:
    """What is made, sent off and forgotten."""


class Handle:
    """Takes some time to wait for."""

    def __init__(self, clock, takes_ns):
        self.clock, self.takes_ns = clock, takes_ns

    def wait(self):
        """Take it."""
        self.clock.advance_ns(self.takes_ns)


@pytest.fixture
def clock():
    """Time that passes only where a test says so."""
    return ManualClock(0)


@pytest.fixture
def log(clock):
    """A log that is running."""
    log = CallLog(clock.now_ns)
    log.begin()
    yield log
    log.end()
    assert log_of_this_thread() is None


@pytest.fixture
def tick(clock):
    """A function that takes 5 ns and gives back its arguments."""

    def tick(*args, **kwargs):
        clock.advance_ns(5)
        return args, kwargs

    return tick


@pytest.fixture
def messages(clock, log):
    """Functions that make two things for a label, send things off in 3 ns, and wait for handles."""

    def wait(handles):
        for handle in handles:
            handle.wait()

    def send(things, desc=None):
        clock.advance_ns(3)
        return [Handle(clock, 2) for _ in things]

    make = NotedItems(lambda label: [Thing(), Thing()], log, ISSUE, WAIT)
    return make, TimedIssue(send, True), TimedWaits(wait, True)


@pytest.mark.parametrize(
    ("args", "kwargs", "label"),
    [
        ((), {}, -1),
        ((4, "x"), {}, 4),
        ((4,), {"mode": True, "rest": 1}, 4),
        (("4",), {}, -1),
        ((True,), {}, -1),
        ((2**70,), {}, -1),
        ((), {"chunk": 4}, -1),
    ],
)
def test_a_call_passes_on_what_it_is_given(log, tick, args, kwargs, label):
    """Its label is the first argument that is a whole number and fits."""
    call = TimedCall(tick, log, 7)
    assert (args, kwargs) == call(*args, **kwargs)
    assert (args, kwargs) == call.__call__(*args, **kwargs)
    assert [(7, label, 0, 5, -1), (7, label, 5, 10, -1)] == log.take()
    assert [] == log.take()


@pytest.mark.parametrize(
    ("kwargs", "code"),
    [({}, 7), ({"whole": True}, 7), ({"whole": False}, 8), ({"other": 0, "wh" + "ole": 0}, 8), ({"other": 0}, 7)],
)
def test_a_keyword_that_is_not_true_makes_it_another_call(log, tick, kwargs, code):
    """Where it is given."""
    TimedCall(tick, log, 7, "whole", 8)(1, **kwargs)
    assert [(code, 1, 0, 5, -1)] == log.take()


def test_what_raises_is_not_noted_and_raises(log):
    """The error is the function's own."""

    def fail(*_):
        raise OSError("gone")

    for stand_in in (
        TimedCall(fail, log, 1),
        NotedItems(fail, log, 1, 2),
        TimedIssue(fail, False),
        TimedWaits(fail, False),
    ):
        with pytest.raises(OSError, match="gone"):
            stand_in([1])
    assert [] == log.raw()


def test_nothing_is_noted_before_and_after(clock, tick):
    """The functions are called all the same."""
    log = CallLog(clock.now_ns)
    stand_ins = [TimedCall(tick, log, 1), NotedItems(tick, log, 1, 2), TimedIssue(tick, True), TimedWaits(tick, True)]
    log.begin()
    assert log.active
    log.end()
    log.end()
    assert not log.active
    for stand_in in stand_ins:
        assert (([1],), {}) == stand_in([1])
    assert [] == log.raw()


def test_messages_are_followed_from_their_making_to_the_wait(log, messages):
    """Those made by one call are sent off as one, and awaited one by one; others are told apart by their label."""
    make, send, wait = messages
    wait(send(make(0) + make(1), desc="both"))
    assert [] == send([])
    assert wait([]) is None
    assert [
        (ISSUE, 0, 0, 3, -1),
        (ISSUE, 1, 0, 3, -1),
        (WAIT, 0, 3, 5, -1),
        (WAIT, 0, 5, 7, -1),
        (WAIT, 1, 7, 9, -1),
        (WAIT, 1, 9, 11, -1),
    ] == log.take()


def test_waits_may_come_late_and_in_another_order(log, messages):
    """By their handles."""
    make, send, wait = messages
    first, second = send(make(0)), send(make(1))
    wait(second)
    wait(first)
    assert [1, 1, 0, 0] == [row[1] for row in log.take() if row[0] == WAIT]


def test_one_handle_of_several_is_waited_for_as_what_comes_in(clock, log, messages):
    """If something does; of what is not known at all it is said."""
    make, _, wait = messages
    make_sent = NotedItems(lambda label: [Thing()], log, ISSUE, WAIT_SENT)
    send = TimedIssue(lambda things: [Handle(clock, 2)], True)
    wait(send(make_sent(3) + make(4)))
    wait(send(make_sent(5) + make_sent(6)))
    wait([Handle(clock, 1), Handle(clock, 1)])
    rows = [row for row in log.take({WAIT_SENT}, UNKNOWN) if row[0] != ISSUE]
    assert [(WAIT, 4, 0, 2, -1), (WAIT_SENT, 5, 2, 4, -1), (UNKNOWN, -1, 4, 6, -1)] == rows


def test_somebody_elses_message_among_them_makes_the_wait_unknown(log, messages):
    """Which of the handles is whose cannot be told; the issue of the others is known."""
    make, send, wait = messages
    wait(send([*make(0), Thing()]))
    assert [(ISSUE, 0, 0, 3, -1), (UNKNOWN, -1, 3, 9, -1)] == log.take((), UNKNOWN)


def test_a_wait_that_does_more_is_called(clock, log, messages):
    """As one, and what it returns is handed on."""
    make, send, _ = messages
    wait = TimedWaits(lambda handles: clock.advance_ns(len(handles)) or "done", False)
    assert "done" == wait(send(make(0)))
    assert (WAIT, 0, 3, 5, -1) == log.take()[-1]
    assert "done" == wait(Handle(clock, 1) and ())


@pytest.mark.parametrize("arguments", [((), {"ops": [1]}), (((1,),), {})])
def test_an_issue_that_is_called_in_another_way_is_passed_on(log, tick, arguments):
    """Untimed."""
    args, kwargs = arguments
    assert (args, kwargs) == TimedIssue(tick, True)(*args, **kwargs)
    assert [] == log.raw()


def test_the_innermost_log_of_the_thread_is_written_to(clock, tick):
    """Other threads have their own."""
    outer, inner, other = (CallLog(clock.now_ns) for _ in range(3))
    send = TimedIssue(tick, True)

    def elsewhere():
        other.begin()
        send([Thing()])
        other.end()

    outer.begin()
    inner.begin()
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    send([Thing()])
    inner.end()
    assert outer is log_of_this_thread()
    send([])
    send([Thing()])
    outer.end()
    assert [1, 1, 1] == [sum(row[0] == -3 for row in log.raw()) for log in (outer, inner, other)]


def test_any_number_of_calls_is_kept(tick):
    """In their order, on the system's clock, beside what was timed by other means."""
    log = CallLog()
    call = TimedCall(tick, log, 1)
    log.begin()
    for number in range(3000):
        call(number)
    log.note(2, 5, 10, 20, 3)
    log.end()
    *rows, last = log.take()
    assert list(range(3000)) == [row[1] for row in rows]
    assert all(start <= end for _, _, start, end, _ in rows)
    times = [time for row in rows for time in row[2:4]]
    assert sorted(times) == times
    assert (2, 5, 10, 20, 3) == last


def test_nothing_lives_longer_for_being_noted(log, messages):
    """Neither what is made nor a handle, nor what is stood in for once the stand-in is gone."""
    make, send, wait = messages
    things = make(0)
    handles = send(things)
    gone = [weakref.ref(one) for one in (*things, *handles)]
    wait(handles)
    del things, handles
    assert [None] * 4 == [one() for one in gone]

    class Owner:
        def work(self):
            return 1

    owner = Owner()
    owner.work = TimedCall(owner.work, log, 1)
    assert 1 == owner.work()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


def test_a_copy_of_what_is_instrumented_calls_the_same(log, tick):
    """As a function it is not copied."""
    call = TimedCall(tick, log, 1)
    assert call is copy.deepcopy(call)
    assert call is copy.copy(call)
    assert tick is call.__wrapped__


def test_a_log_that_was_not_begun(clock, tick):
    """It notes nothing, and belongs to no thread."""
    log = CallLog(clock.now_ns)
    TimedCall(tick, log, 1)(5)
    assert (False, 0, []) == (log.active, log.thread, log.take())


@pytest.mark.parametrize(
    ("number", "label"),
    [(2**63 - 1, 2**63 - 1), (-(2**63), -(2**63)), (2**63, -1), (-(2**63) - 1, -1), (1.0, -1), (True, -1)],
)
def test_a_label_is_a_whole_number_of_64_bits(log, tick, number, label):
    """What is none is called all the same."""
    assert ((number,), {}) == TimedCall(tick, log, 1)(number)
    assert [(1, label, 0, 5, -1)] == log.take()


def test_a_log_that_another_thread_began_last(log, clock, in_thread):
    """It is no other thread's."""
    other = CallLog(clock.now_ns)
    in_thread(other.begin)
    found = log_of_this_thread()
    other.end()
    assert found is log


@pytest.mark.parametrize("arguments", [(([],), {}), (([1], 2), {}), (([1],), {"by": 3}), ((), {"things": [1]})])
def test_a_running_stand_in_hands_on_what_it_is_given(log, tick, arguments):
    """Nothing to send off is sent off all the same where that is not idle, and names reach the function as names."""
    args, kwargs = arguments
    assert (args, kwargs) == TimedIssue(tick, False)(*args, **kwargs)
    assert (args, kwargs) == TimedWaits(tick, False)(*args, **kwargs)
    if len(args) != 1 or kwargs:
        assert (args, kwargs) == TimedWaits(tick, True)(*args, **kwargs)
