"""Background delivery: refused, slow and unreachable servers are told apart, and no report is lost uncounted."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from deep500_timing.exceptions import ExportError
from deep500_timing.exporters import _delivery
from deep500_timing.exporters._delivery import Account, Delivery, UnavailableError

WAIT_S = 30.0  # No test takes that long unless it fails.


class Service:
    """Takes payloads, raises, or blocks until its gate opens."""

    def __init__(self):
        self.taken = []
        self.calls = []
        self.refuses = set()
        self.error = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)

    def __call__(self, payload, timeout_s):
        """Take a call."""
        self.calls.append(payload)
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        if payload in self.refuses:
            raise ValueError(f"refused {payload}")
        self.taken.append(payload)


@pytest.fixture
def service():
    """The server."""
    service = Service()
    yield service
    service.gate.set()


@pytest.fixture
def account():
    """The exporter's account."""
    return Account("ours")


@pytest.fixture
def delivery(clock, service, monkeypatch):
    """A delivery on a clock that stands at zero, with pauses that are not spread."""
    clock.advance(-clock.now_ns() / 1e9)
    monkeypatch.setattr(_delivery._random, "uniform", lambda low, high: 1.0)
    delivery = Delivery("the service", service, clock=lambda: clock.now_ns() / 1e9)
    yield delivery
    service.gate.set()
    service.error = None
    delivery.close()


def attempt(delivery, service, clock):
    """Skip the current pause and wait for the next attempt to end."""
    attempts = delivery._attempts
    clock.advance(delivery._retry_at - clock.now_ns() / 1e9)
    with delivery._changed:
        delivery._changed.notify_all()
        assert delivery._changed.wait_for(lambda: delivery._attempts > attempts, WAIT_S)


def await_attempts(delivery, number):
    """Wait until so many attempts have ended."""
    with delivery._changed:
        assert delivery._changed.wait_for(lambda: delivery._attempts >= number, WAIT_S)


def counts(account):
    """Delivered, pending and lost."""
    return account.delivered, account.pending, account.lost


def test_reports_arrive_in_order_and_no_thread_remains(delivery, service, account):
    """``send`` returns while the server works; the daemon thread ends with the queue."""
    service.gate.clear()
    for payload in range(5):
        delivery.send(payload, account, WAIT_S)
    thread = delivery._thread
    assert thread.daemon
    assert 5 == account.pending
    service.gate.set()
    delivery.flush(account, WAIT_S)
    thread.join(WAIT_S)

    assert ([0, 1, 2, 3, 4], (5, 0, 0), None) == (service.taken, counts(account), delivery._thread)
    assert [] == delivery.take_news()


def test_a_refused_report_is_lost_alone(delivery, service, account):
    """The reports after a refused one arrive; the reason is kept for a warning."""
    service.refuses = {1}
    for payload in range(3):
        delivery.send(payload, account, WAIT_S)
    delivery.flush(account, WAIT_S)

    assert ([0, 2], (2, 0, 1)) == (service.taken, counts(account))
    assert ["refused 1"] == [str(error) for error in account.errors]


def test_an_outage_costs_only_time(delivery, service, account, clock):
    """Reports survive an outage; it is said once."""
    service.error = ConnectionError("gone")
    for payload in range(3):
        delivery.send(payload, account, WAIT_S)
    await_attempts(delivery, 1)
    attempt(delivery, service, clock)
    service.error = None
    attempt(delivery, service, clock)
    assert delivery.wait_until_empty(WAIT_S)

    assert ([0, 1, 2], (3, 0, 0)) == (service.taken, counts(account))
    assert {"down"} == {kind for kind, _ in delivery.take_news()}


def test_pauses_double_up_to_half_a_minute(delivery, service, account, clock):
    """Each failure doubles the pause, up to a limit; the exit shortens it."""
    service.error = ConnectionError("gone")
    delivery.send(0, account, WAIT_S)
    await_attempts(delivery, 1)
    pauses = []
    for _ in range(8):
        pauses.append(delivery._retry_at - clock.now_ns() / 1e9)
        attempt(delivery, service, clock)
    assert [0.5, 1, 2, 4, 8, 16, 30, 30] == pytest.approx(pauses)
    assert WAIT_S == delivery.hurry()
    attempt(delivery, service, clock)
    assert delivery._retry_at - clock.now_ns() / 1e9 <= 0.2


def test_a_full_queue_loses_the_oldest_and_counts(delivery, service, account, monkeypatch):
    """Beyond its capacity the queue drops the oldest report, and says so."""
    monkeypatch.setattr(_delivery, "CAPACITY", 3)
    service.gate.clear()
    delivery.send("in flight", account, WAIT_S)
    assert service.entered.acquire(timeout=WAIT_S)
    for payload in range(5):
        delivery.send(payload, account, WAIT_S)
    service.gate.set()
    delivery.flush(account, WAIT_S)

    assert (["in flight", 2, 3, 4], (4, 0, 2)) == (service.taken, counts(account))
    assert ["full", "full"] == [kind for kind, _ in delivery.take_news()]
    (sentence,) = delivery.close()
    assert sentence.startswith("2 report(s) of ours were lost: the service did not take them")


@pytest.mark.parametrize(("status", "is_blamed"), [(500, True), (503, False), (429, False)])
def test_only_a_report_that_breaks_the_server_is_given_up(delivery, service, account, clock, status, is_blamed):
    """Five answers of 500 cost the report; an overloaded server costs none."""
    service.error = UnavailableError("no", status)
    delivery.send(0, account, WAIT_S)
    await_attempts(delivery, 1)
    for _ in range(4):
        attempt(delivery, service, clock)

    assert ((0, 0, 1) if is_blamed else (0, 1, 0)) == counts(account)


def test_a_strict_report_raises_and_is_not_sent_later(delivery, service, account):
    """``send_now`` delivers on the calling thread and raises the server's error."""
    service.error = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="gone"):
        delivery.send_now(0, account, 1.0)
    service.error = None
    delivery.send_now(1, account, 1.0)

    assert ([1], (1, 0, 1)) == (service.taken, counts(account))


def test_a_flush_retries_at_once_and_waits_in_vain_once(delivery, service, account):
    """A flush ends when its attempt has failed; the next does not wait until the server has answered."""
    service.error = ConnectionError("gone")
    delivery.send(0, account, WAIT_S)
    await_attempts(delivery, 1)
    with pytest.raises(ExportError, match=r"does not answer; 1 report\(s\) wait"):
        delivery.flush(account, WAIT_S)
    assert 2 <= len(service.calls)
    service.error = None
    with pytest.raises(ExportError):
        delivery.flush(account, WAIT_S)  # Does not wait, but retries.
    assert delivery.wait_until_empty(WAIT_S)
    delivery.flush(account, WAIT_S)
    assert (1, 0, 0) == counts(account)


def test_a_slow_server_bounds_a_flush(delivery, service, account):
    """A server that hangs costs a flush its time-out."""
    service.gate.clear()
    delivery.send(0, account, WAIT_S)
    with pytest.raises(ExportError, match=r"has not answered within 0.01 s"):
        delivery.flush(account, 0.01)


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_a_call_that_would_end_the_thread_costs_its_report(delivery, service, account, error):
    """Later reports are delivered all the same."""
    service.error = error
    delivery.send(0, account, WAIT_S)
    await_attempts(delivery, 1)
    service.error = None
    delivery.send(1, account, WAIT_S)
    delivery.flush(account, WAIT_S)

    assert ([1], (1, 0, 1)) == (service.taken, counts(account))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_delivers_only_its_own_reports(delivery, service, account):
    """The child starts with an empty queue, also when the parent forks during a call."""
    service.gate.clear()
    delivery.send("parent's", account, WAIT_S)
    assert service.entered.acquire(timeout=WAIT_S)
    pid = os.fork()
    if not pid:
        service.gate.set()
        ok = account.pending == 0
        delivery.send("child's", account, WAIT_S)
        ok = ok and delivery.wait_until_empty(WAIT_S) and service.taken == ["child's"]
        os._exit(0 if ok else 1)
    service.gate.set()
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    delivery.flush(account, WAIT_S)
    assert ["parent's"] == service.taken


def test_the_call_is_made_inline_where_no_thread_can_start(delivery, service, account, monkeypatch):
    """At the interpreter's shutdown reports are delivered by the exporting thread."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("shutdown")))
    delivery.send(0, account, WAIT_S)

    assert ([0], (1, 0, 0)) == (service.taken, counts(account))


def test_what_has_not_arrived_at_exit_is_counted_once(delivery, service, account):
    """Queued reports and the one in flight are lost, also if that one arrives later."""
    service.gate.clear()
    for payload in range(3):
        delivery.send(payload, account, 0.0)
    assert service.entered.acquire(timeout=WAIT_S)
    (sentence,) = delivery.close()
    service.gate.set()

    assert "3 report(s) of ours were lost" in sentence
    assert (0, 0, 3) == counts(account)
    assert [] == delivery.close()


def test_a_signal_handler_may_export_during_a_send(delivery, service, account):
    """The lock is reentrant."""
    with delivery._changed:
        delivery.send(0, account, WAIT_S)
    delivery.flush(account, WAIT_S)
    assert [0] == service.taken
