"""The caller in the background: busy, slow, refusing and gone are told apart, and nothing is lost uncounted."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading

import pytest

from deep500_timing.exceptions import ExportError
from deep500_timing.exporters import _background, _outage
from deep500_timing.exporters._background import BackgroundCaller
from deep500_timing.exporters._reports import CAPACITY_IN_NUMBERS, Account
from deep500_timing.exporters._trouble import BusyError, UnavailableError

WAIT_S = 30.0  # Far beyond what anything here takes; a test that needed it would fail.


class Service:
    """Takes payloads, fails, or takes them when it is let."""

    def __init__(self):
        self.taken = []
        self.calls = []
        self.refuses = set()
        self.error = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def __call__(self, group, payloads):
        """Take a call."""
        self.calls.append((group, list(payloads)))
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if bad := self.refuses & set(payloads):
            raise ValueError(f"refused {sorted(bad)}")
        self.taken += payloads


@pytest.fixture
def clock(clock):
    """A clock that stands at zero."""
    clock.advance(-clock.now_ns() / 1e9)
    return clock


@pytest.fixture
def service():
    """What is called."""
    service = Service()
    yield service
    service.gate.set()


@pytest.fixture
def account():
    """Whose reports they are."""
    return Account("ours")


@pytest.fixture
def caller_of(clock, service, monkeypatch):
    """Make a caller of the service on that clock, whose pauses are not spread."""
    monkeypatch.setattr(_outage._random, "uniform", lambda low, high: 1.0)
    made = []

    def make(**settings):
        made.append(BackgroundCaller("the service", service, clock=lambda: clock.now_ns() / 1e9, **settings))
        return made[-1]

    yield make
    service.gate.set()
    service.error = None
    for caller in made:
        caller.give_up()


def empty(caller):
    """Wait until nothing is on its way."""
    assert caller.wait_until_empty(WAIT_S)


def settle(caller):
    """Wait until the attempt that is made now has ended, well or not."""
    with caller._changed:
        assert caller._changed.wait_for(lambda: not caller._flying, WAIT_S)


def attempt(caller, service, clock):
    """Let the pause that is on run out, and the next attempt come to its end."""
    calls = len(service.calls)
    clock.advance(caller._outage.retry_at - clock.now_ns() / 1e9)
    with caller._changed:
        caller._changed.notify_all()
        assert caller._changed.wait_for(lambda: len(service.calls) > calls and not caller._flying, WAIT_S)


def test_a_report_has_arrived_when_send_returns(caller_of, service, account):
    """While the service answers, a report is there when the call returns, and no thread is left."""
    caller = caller_of()
    caller.send("a", account, wait_s=WAIT_S)

    assert (["a"], 1, 0, 0) == (service.taken, account.delivered, account.pending, account.lost)
    empty(caller)
    assert [] == caller.take_news()


def test_no_thread_stays_behind(caller_of, account):
    """The thread ends with the queue."""
    caller = caller_of()
    caller.send("a", account, wait_s=WAIT_S)
    with caller._changed:
        thread = caller._thread
    if thread is not None:
        thread.join(WAIT_S)

    assert caller._thread is None


def test_its_thread_does_not_hold_up_the_program(caller_of, service, account):
    """A call that hangs is made by a daemon."""
    caller = caller_of()
    service.gate.clear()
    caller.send("a", account)

    assert caller._thread.daemon


def test_busy_is_not_down(caller_of, service, account):
    """What comes while a call is on its way waits in the queue and arrives, in order."""
    caller = caller_of()
    service.gate.clear()
    for payload in range(5):
        caller.send(payload, account)
    assert 5 == account.pending
    service.gate.set()
    empty(caller)

    assert ([0, 1, 2, 3, 4], 5, 0) == (service.taken, account.delivered, account.lost)


def test_waiting_is_bounded_once_for_the_run(caller_of, service, account, clock):
    """Who has waited in vain does not wait again, and slow answers arrive all the same; it is said once."""
    caller = caller_of()
    waits = []
    condition_wait = caller._changed.wait

    def wait(timeout):
        if threading.current_thread() is threading.main_thread():
            waits.append(timeout)
            clock.advance(timeout)
            return False
        return condition_wait(timeout)

    caller._changed.wait = wait
    service.gate.clear()
    for payload in range(100):
        caller.send(payload, account, wait_s=0.5)
    service.gate.set()
    caller._changed.wait = condition_wait
    empty(caller)

    assert [0.5] == waits
    assert (100, 0) == (len(service.taken), account.lost)
    assert [
        (
            "slow",
            "the service has not answered within 0.5 s; from now on reports of times wait for it in a queue, "
            "and training does not",
        )
    ] == caller.take_news()


def test_many_short_waits_are_bounded_as_well_and_no_trouble(caller_of, service, account, clock):
    """A service that is prompt may use up what waiting is allowed; nobody waits then, and nothing is said."""
    caller = caller_of()

    def slow(group, payloads):
        clock.advance(0.25)
        service(group, payloads)

    caller._deliver = slow
    for payload in range(3):
        caller.send(payload, account, wait_s=0.6)
    waited_s = caller._waited_s
    caller.send(3, account, wait_s=0.6)
    empty(caller)

    assert ([0, 1, 2, 3], []) == (service.taken, caller.take_news())
    assert 0.6 <= waited_s == caller._waited_s


def test_a_refused_report_costs_itself(caller_of, service, account):
    """What the service refuses is raised to whoever waits, and the next report goes on at once."""
    other = Account("other")
    caller = caller_of()
    service.refuses = {"bad"}
    with pytest.raises(ValueError, match="refused"):
        caller.send("bad", account, wait_s=WAIT_S)
    caller.send("good", other, wait_s=WAIT_S)

    assert (["good"], 1, 0, 1) == (service.taken, account.lost, other.lost, other.delivered)
    assert ([], []) == (caller.take_news(), account.take_errors())


def test_a_refused_report_that_nobody_waited_for_is_told_later(caller_of, service, account):
    """Its error is kept for the next time that the exporter is used, once."""
    caller = caller_of()
    service.refuses = {"bad"}
    caller.send("bad", account)
    empty(caller)

    assert ["refused ['bad']"] == [str(error) for error in account.take_errors()]
    assert [] == account.take_errors()


def test_reports_of_one_group_go_together(caller_of, service, account):
    """Queued reports of a group share a call, in order, up to a size; other groups keep their place."""
    caller = caller_of(most_numbers=10)
    service.gate.clear()
    caller.send("first", account)
    assert service.entered.acquire(timeout=WAIT_S)
    for number in range(4):
        caller.send(f"x{number}", account, group="x", size=4)
        caller.send(f"y{number}", account, group="y", size=1)
    service.gate.set()
    empty(caller)

    assert [
        (None, ["first"]),
        ("x", ["x0", "x1"]),
        ("y", ["y0", "y1", "y2", "y3"]),
        ("x", ["x2", "x3"]),
    ] == service.calls


def test_one_bad_report_among_several_costs_itself(caller_of, service, account):
    """Where several go together and are refused, each is tried for itself and all but the bad one arrive."""
    caller = caller_of(most_numbers=10)
    service.refuses = {2}
    service.gate.clear()
    caller.send(0, account)
    assert service.entered.acquire(timeout=WAIT_S)
    for payload in (1, 2, 3):
        caller.send(payload, account)
    service.gate.set()
    empty(caller)

    assert ([0, 1, 3], 3, 1) == (service.taken, account.delivered, account.lost)


def test_an_outage_costs_nothing_but_time(caller_of, service, account, clock):
    """Reports that meet a dead service stay in the queue and arrive when it is back; it is said once."""
    caller = caller_of()
    service.error = ConnectionRefusedError("nobody there")
    for payload in range(3):
        caller.send(payload, account, wait_s=WAIT_S)
    settle(caller)
    assert (3, 0) == (account.pending, account.lost)
    assert {
        (
            "down",
            "the service does not answer (ConnectionRefusedError: nobody there); reports of times wait in a "
            "queue, 256 at most, and are tried again in the background",
        )
    } == set(caller.take_news())
    service.error = None
    attempt(caller, service, clock)
    empty(caller)

    assert ([0, 1, 2], 3, []) == (service.taken, account.delivered, caller.take_news())


def test_pauses_grow_and_are_bounded(caller_of, service, account, clock):
    """After each failure the next attempt is twice as far off, up to half a minute."""
    caller = caller_of()
    service.error = ConnectionError("refused")
    caller.send(0, account, wait_s=WAIT_S)
    settle(caller)
    pauses = []
    for _ in range(9):
        pauses.append(caller._outage.retry_at - clock.now_ns() / 1e9)
        attempt(caller, service, clock)

    assert [0.5, 1, 2, 4, 8, 16, 30, 30, 30] == pytest.approx(pauses)


def test_nobody_waits_for_a_service_that_is_down(caller_of, service, account):
    """While it is known to be down, sending returns at once, and makes no attempt."""
    caller = caller_of()
    service.error = ConnectionError("refused")
    caller.send(0, account, wait_s=WAIT_S)
    settle(caller)
    caller._changed.wait = lambda timeout: pytest.fail("waited")
    thread, caller._thread = caller._thread, threading.main_thread()  # Asleep: it waits by the same method.
    caller.send(1, account, wait_s=WAIT_S)
    caller._thread = thread
    del caller._changed.wait

    assert 1 == len(service.calls)


def test_a_service_that_was_down_is_asked_before_it_gets_reports(caller_of, service, account, clock):
    """After a failure a short request of ours goes first; reports follow when it is answered."""
    asked = []

    def probe():
        asked.append(len(service.calls))
        if len(asked) < 3:
            raise ConnectionError("still refused")

    caller = caller_of(probe=probe)
    service.error = ConnectionError("refused")
    caller.send(0, account, wait_s=WAIT_S)
    settle(caller)
    service.error = None
    for number in range(1, 4):
        clock.advance(caller._outage.retry_at - clock.now_ns() / 1e9)
        with caller._changed:
            caller._changed.notify_all()
            caller._changed.wait_for(lambda: len(asked) >= number and not caller._flying, WAIT_S)  # noqa: B023
    empty(caller)

    assert ([1, 1, 1], [0]) == (asked, service.taken)


def test_a_full_queue_loses_the_oldest_and_counts(caller_of, service, account, clock):
    """Beyond its capacity the oldest reports go; that is said once, and how many when the service is back."""
    caller = caller_of(capacity=3)
    service.error = ConnectionError("refused")
    for payload in range(10):
        caller.send(payload, account, wait_s=WAIT_S)
    settle(caller)
    assert (3, 7) == (account.pending, account.lost)
    assert {"down", "full"} == {kind for kind, _ in caller.take_news()}
    service.error = None
    attempt(caller, service, clock)
    empty(caller)

    assert [7, 8, 9] == service.taken
    assert ["the service takes reports again; 7 report(s) of times were lost in between"] == [
        sentence for _, sentence in caller.take_news()
    ]


def test_each_outage_tells_its_own_losses(caller_of, service, account, clock):
    """The second outage counts its own, and one without a loss says nothing at its end."""
    caller = caller_of(capacity=1)
    told = []
    for reports in (3, 2, 1):
        service.error = ConnectionError("refused")
        for payload in range(reports):
            caller.send(payload, account, wait_s=WAIT_S)
        settle(caller)
        service.error = None
        attempt(caller, service, clock)
        empty(caller)
        told.append([sentence for kind, sentence in caller.take_news() if kind.startswith("back")])

    again = "the service takes reports again; {} report(s) of times were lost in between"
    assert [[again.format(2)], [again.format(1)], []] == told


def test_memory_is_bounded_by_numbers_as_well(caller_of, service, account):
    """A few reports that are very large fill the queue too."""
    caller = caller_of()
    service.gate.clear()
    for payload in range(4):
        caller.send(payload, account, size=CAPACITY_IN_NUMBERS // 2)
    # The first is on its way.
    assert service.entered.acquire(timeout=WAIT_S)

    assert account.lost in {1, 2}
    assert sum(report.size for report in caller._queue) <= CAPACITY_IN_NUMBERS


def test_a_report_that_always_breaks_the_service_is_given_up(caller_of, service, account, clock):
    """After five errors of a service that answers, the report is to blame, and does not stop the others."""
    caller = caller_of()

    def breaks(group, payloads):
        service(group, payloads)
        if payloads == ["poison"]:
            service.taken.remove("poison")
            raise UnavailableError("it answered 500", 500)

    caller._deliver = breaks
    caller.send("poison", account)
    caller.send("good", account)
    for _ in range(5):
        settle(caller)
        if account.lost:
            break
        attempt(caller, service, clock)
    settle(caller)
    attempt(caller, service, clock)
    empty(caller)

    assert (5, 1, ["good"]) == (service.calls.count((None, ["poison"])), account.lost, service.taken)


def test_an_overloaded_service_blames_no_report(caller_of, service, account, clock):
    """However often the answer is 503 or 429, the report is kept."""
    caller = caller_of()
    for status in (503, 429) * 5:
        service.error = UnavailableError(f"it answered {status}", status)
        if not service.calls:
            caller.send("a", account, wait_s=WAIT_S)
            settle(caller)
        else:
            attempt(caller, service, clock)
    assert (1, 0) == (account.pending, account.lost)
    service.error = None
    attempt(caller, service, clock)
    empty(caller)

    assert ["a"] == service.taken


def test_a_report_that_must_wait_its_turn_holds_nobody_up(caller_of, service, account):
    """A report that the service cannot take yet is neither lost nor waited for, and nothing is said."""
    caller = caller_of()
    service.error = BusyError("not yet")
    caller.send(0, account, wait_s=WAIT_S)
    caller.flush(account, WAIT_S)
    assert 1 == account.pending
    service.error = None
    caller.send(1, account, wait_s=WAIT_S)

    assert ([0, 1], []) == (service.taken, caller.take_news())


def test_insisting_waits_each_time_and_raises(caller_of, service, account):
    """Who insists is told each time, whatever happened before, and the report is not sent later."""
    caller = caller_of()
    service.error = ConnectionError("refused")
    for number in range(1, 4):
        with pytest.raises(ConnectionError):
            caller.send(number, account, wait_s=WAIT_S, insist=True)
        assert (number, 0, number) == (len(service.calls), account.pending, account.lost)


@pytest.mark.parametrize("last", ["insists", "ends"])
def test_what_the_run_has_waited_for_is_not_taken_off(caller_of, service, account, clock, monkeypatch, last):
    """Who insists, and the end of the program, wait as long as they may, though training has used up its share."""
    caller, waits = caller_of(), []

    def wait(timeout):
        if threading.current_thread() is not threading.main_thread():
            return condition_wait(timeout)
        waits.append(timeout)
        clock.advance(timeout)
        return False

    condition_wait, caller._changed.wait = caller._changed.wait, wait
    service.gate.clear()
    caller.send(0, account, wait_s=0.5)
    if last == "insists":
        with pytest.raises(ExportError, match=r"has not answered within 0\.75 s"):
            caller.send(1, account, wait_s=0.75, insist=True)
    else:
        monkeypatch.setattr(_background._exit._State, "begun", True)
        caller.send(1, account, wait_s=0.75)
    caller._changed.wait = condition_wait
    service.gate.set()
    empty(caller)

    assert [0.5, 0.75] == waits


def test_insisting_does_not_wait_for_ever(caller_of, service, account):
    """A service that hangs is given the time that is allowed."""
    caller = caller_of()
    service.gate.clear()
    with pytest.raises(ExportError, match="the service has not answered within 0 s"):
        caller.send(0, account, insist=True)
    service.gate.set()
    empty(caller)

    assert (0, 1) == (account.pending, account.lost)


def test_a_report_that_was_given_up_on_its_way_is_counted_once(caller_of, service, account):
    """What arrives after its exporter has raised is lost all the same, and not delivered as well."""
    caller = caller_of()
    service.gate.clear()

    def wait_until_it_flies(report, wait_s):
        while not caller._flying:
            caller._changed.wait(0.01)

    caller._wait_for = wait_until_it_flies
    with pytest.raises(ExportError, match="has not answered"):
        caller.send(0, account, insist=True)
    service.gate.set()
    empty(caller)

    assert (0, 1, 0) == (account.pending, account.lost, account.delivered)


def test_a_report_does_not_end_a_pause(caller_of, service, account):
    """While the service is down, what comes waits for the attempt that is due, and makes none of its own."""
    caller = caller_of()
    service.error = ConnectionError("refused")
    caller.send(0, account, wait_s=WAIT_S)
    settle(caller)
    due = caller._outage.retry_at
    caller.send(1, account)

    assert (due, 1) == (caller._outage.retry_at, len(service.calls))


def test_flushing_waits_in_vain_once(caller_of, service, account, clock):
    """A flush is bounded, and the next does not wait again until the service has answered."""
    caller = caller_of()
    service.gate.clear()
    caller.send(0, account)
    waits = []

    def wait(timeout):
        waits.append(timeout)
        clock.advance(timeout)

    condition_wait, caller._changed.wait = caller._changed.wait, wait
    for _ in range(3):
        with pytest.raises(ExportError, match=r"has not answered within 5 s; 1 report\(s\) wait"):
            caller.flush(account, 5.0)
    caller._changed.wait = condition_wait
    service.gate.set()
    empty(caller)
    caller.flush(account, 5.0)

    assert [5.0] == waits
    assert not caller._gave_up


def test_flushing_tries_at_once(caller_of, service, account):
    """A flush does not sit out a pause; it ends when the attempt has failed again."""
    caller = caller_of()
    service.error = ConnectionError("refused")
    caller.send(0, account, wait_s=WAIT_S)
    settle(caller)
    with pytest.raises(ExportError, match="does not answer"):
        caller.flush(account, WAIT_S)
    assert 2 == len(service.calls)
    service.error = None
    caller.flush(account, WAIT_S)

    assert [0] == service.taken


def test_a_call_sees_the_context_of_its_caller(caller_of, account):
    """A context variable of the exporting thread is seen by the call."""
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    seen = []
    caller = caller_of()
    caller._deliver = lambda group, payloads: seen.append(variable.get())
    caller.send(0, account, wait_s=WAIT_S)

    assert ["set"] == seen


def test_a_call_that_would_end_the_program_is_refused(caller_of, account):
    """A tracker that exits costs the report."""
    caller = caller_of()

    def leave(group, payloads):
        raise SystemExit(3)

    caller._deliver = leave
    with pytest.raises(ExportError, match=r"it would end the program: SystemExit\(3\)"):
        caller.send(0, account, wait_s=WAIT_S)


def test_a_call_that_is_cancelled_costs_its_report_alone(service, account):
    """What a client's own loop of events may raise is no Exception; those that come after are sent all the same."""
    caller = BackgroundCaller("the service", service)
    service.error = asyncio.CancelledError()
    with pytest.raises(ExportError, match="CancelledError"):
        caller.send("lost", account, wait_s=WAIT_S / 3)
    service.error = None
    caller.send("arrives", account, wait_s=WAIT_S)
    assert ["arrives"] == service.taken


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_begins_anew(caller_of, service, account):
    """After a fork amid a call, the child's own reports arrive, and none of the parent's is sent twice."""
    caller = caller_of()
    service.gate.clear()
    caller.send("parent 1", account)
    caller.send("parent 2", account)
    assert service.entered.acquire(timeout=WAIT_S)
    caller._waited_s = WAIT_S  # The parent waits no more; the child has not waited yet.
    reading, writing = os.pipe()
    with caller._changed:  # As another thread might hold it.
        child = os.fork()
    if child == 0:
        try:
            service.gate.set()
            service.taken.clear()
            caller.send("child", account, wait_s=WAIT_S)
            os.write(writing, repr((service.taken, account.pending, account.lost)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    service.gate.set()
    empty(caller)

    assert "(['child'], 0, 0)" == os.read(reading, 1000).decode()
    assert ["parent 1", "parent 2"] == service.taken
    os.close(reading)
    os.close(writing)


def test_the_end_of_the_interpreter(caller_of, service, account, monkeypatch):
    """When no thread can be started any more, the call is made where it is."""

    class NoMoreThreads:
        def __init__(self, **settings):
            pass

        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_background.threading, "Thread", NoMoreThreads)
    caller = caller_of()
    caller.send("a", account)
    service.error = ConnectionError("refused")
    caller.send("b", account)

    assert (["a"], 1) == (service.taken, account.pending)


def test_what_has_not_arrived_at_the_end_is_counted(caller_of, service, account):
    """Giving up counts what is queued and what is on its way, by exporter."""
    caller = caller_of()
    service.gate.clear()
    caller.send(0, account)
    assert service.entered.acquire(timeout=WAIT_S)
    caller.send(1, account)
    caller.send(2, Account("another's"))

    assert not caller.wait_until_empty(0)
    assert [
        "the service has not taken 2 report(s) of times of ours in all; they are lost.",
        "the service has not taken 1 report(s) of times of another's in all; they are lost.",
    ] == sorted(caller.give_up(), reverse=True)
    assert (0, 2) == (account.pending, account.lost)


def test_a_signal_may_export_amid_a_send(caller_of, service, account):
    """A handler that exports while its thread is inside ``send`` does not wait for itself."""
    caller = caller_of()
    with caller._changed:
        caller.send("from the handler", account, wait_s=WAIT_S)

    assert ["from the handler"] == service.taken
