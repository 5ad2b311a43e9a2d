from __future__ import annotations

import contextvars
import threading

import pytest

from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import _courier
from deep500_timing.exporters._courier import Courier
from deep500_timing.testing import ManualClock

WAIT_S = 30.0  # Far beyond what anything here takes; a test that needed it would fail.


class Service:
    """Answers at once, fails, or answers when it is let, and counts its calls."""

    def __init__(self):
        self.calls = 0
        self.error = None
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self):
        """Take a call."""
        self.calls += 1
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error


@pytest.fixture
def clock():
    """The courier's clock."""
    return ManualClock(0)


@pytest.fixture
def courier(clock):
    """A courier on that clock."""
    return Courier("the service", clock=lambda: clock.now_ns() / 1e9)


@pytest.fixture
def service():
    """What is called."""
    return Service()


def hang(courier, service):
    """Let the service hang, so that the courier gives up at once."""
    service.gate.clear()
    with pytest.raises(ExportError, match=r"the service has not answered within 0 s; later reports are tried"):
        courier.send(service, timeout_s=0)


def end(courier, service):
    """Let the call that hangs come to its end."""
    call = courier._call
    service.gate.set()
    assert call.done.wait(WAIT_S)


def test_a_call_is_done_when_send_returns(courier, service):
    """While the service answers, a report has arrived when the call returns."""
    courier.send(service, timeout_s=WAIT_S)

    assert (1, 0) == (service.calls, courier.lost)


def test_what_the_call_raises_is_raised(courier, service):
    """An error that comes in time reaches the exporter."""
    service.error = ValueError("no such run")
    with pytest.raises(ValueError, match="no such run"):
        courier.send(service, timeout_s=WAIT_S)

    assert 1 == courier.lost


def test_a_call_sees_the_callers_context(courier):
    """A context variable of the exporting thread is seen by the call."""
    variable = contextvars.ContextVar("variable", default="unset")
    variable.set("set")
    seen = []
    courier.send(lambda: seen.append(variable.get()), timeout_s=WAIT_S)

    assert ["set"] == seen


def test_after_a_timeout_nobody_waits(courier, service):
    """While a call hangs, later reports are dropped at once, and counted."""
    hang(courier, service)
    courier.send(service, timeout_s=WAIT_S)
    courier.send(service, timeout_s=WAIT_S)

    assert (1, 2) == (service.calls, courier.lost)
    end(courier, service)


def test_a_slow_answer_is_an_answer(courier, service):
    """A call that ends well after all ends the waiting period at once, and the loss is told."""
    hang(courier, service)
    courier.send(service, timeout_s=WAIT_S)
    end(courier, service)
    with pytest.warns(TimingWarning, match=r"^the service takes reports again; 1 report\(s\) of times were lost"):
        courier.send(service, timeout_s=WAIT_S)

    assert (2, 1) == (service.calls, courier.lost)


def test_pauses_grow_and_are_bounded(courier, service, clock):
    """After each failure the next attempt is twice as far off, up to ten minutes."""
    service.error = ConnectionError("refused")
    with pytest.raises(ConnectionError):
        courier.send(service, timeout_s=WAIT_S)
    pauses = []
    for attempt in range(2, 11):
        begin = clock.now_ns()
        while service.calls < attempt:
            clock.advance(10)
            try_in_background(courier, service)
        pauses.append((clock.now_ns() - begin) / 1e9)

    assert [10, 20, 40, 80, 160, 320, 600, 600, 600] == pauses


def try_in_background(courier, service):
    """Send, and let the attempt come to its end, if there is one."""
    try:
        courier.send(service, timeout_s=0)
        courier.wait(WAIT_S)
    except ConnectionError:
        pass


def test_an_attempt_in_the_background_does_not_wait(courier, service, clock):
    """The attempt after a pause returns although the service hangs again, and says nothing more."""
    service.error = ConnectionError("refused")
    with pytest.raises(ConnectionError):
        courier.send(service, timeout_s=WAIT_S)
    service.error = None
    service.gate.clear()
    clock.advance(10)
    courier.send(service, timeout_s=WAIT_S)

    assert courier._call is not None
    end(courier, service)
    with pytest.warns(TimingWarning, match="1 report"):
        courier.send(service, timeout_s=WAIT_S)


def test_insisting_tries_each_time(courier, service):
    """Who insists waits and is told, whatever happened before."""
    service.error = ConnectionError("refused")
    for _ in range(3):
        with pytest.raises(ConnectionError):
            courier.send(service, timeout_s=WAIT_S, insist=True)
    assert 3 == service.calls


def test_insisting_is_told_of_a_drop(courier, service):
    """Who insists is told when a report is dropped because an earlier one hangs."""
    hang(courier, service)
    with pytest.raises(ExportError, match="the service has not answered an earlier call yet; this one was dropped"):
        courier.send(service, timeout_s=WAIT_S, insist=True)
    end(courier, service)


def test_waiting_is_bounded(courier, service):
    """Flushing waits for a call in the background, but not for ever."""
    courier.wait(0)
    hang(courier, service)
    with pytest.raises(ExportError, match="the service has not answered within 0 s"):
        courier.wait(0)
    service.gate.set()
    courier.wait(WAIT_S)

    assert courier._call is None


def test_waiting_tells_how_the_call_ended(courier, service):
    """Flushing raises what the call in the background raised."""
    hang(courier, service)
    service.error = ConnectionError("refused")
    service.gate.set()
    with pytest.raises(ConnectionError, match="refused"):
        courier.wait(WAIT_S)


def test_the_end_of_the_interpreter(courier, service, monkeypatch):
    """When no thread can be started any more, the call is made where it is."""

    class NoMoreThreads:
        def __init__(self, **settings):
            pass

        def start(self):
            raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_courier.threading, "Thread", NoMoreThreads)
    courier.send(service, timeout_s=WAIT_S)

    assert 1 == service.calls
