"""Background delivery: refused, slow and unreachable servers are distinguished, and no report is lost uncounted."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings

import pytest

from deep500_timing import Timer
from deep500_timing._summary.snapshot import Snapshot
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import _delivery
from deep500_timing.exporters._delivery import BackgroundExporter, UnavailableError, is_outage

NOTHING = Snapshot((), 0.0, "node01", 1)
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


class Ours(BackgroundExporter):
    """Delivers payloads to the service."""

    def __init__(self, service, *, timeout_s=WAIT_S, exit_timeout_s=WAIT_S, **settings):
        super().__init__(timeout_s=timeout_s, exit_timeout_s=exit_timeout_s, **settings)
        self.service = service

    def put(self, payload):
        """Deliver something."""
        self._deliver(NOTHING, None, payload)

    def _send(self, snapshot, destination, timeout_s):
        self.service(destination, timeout_s)

    def _is_outage(self, error):
        return is_outage(error)

    def _service(self):
        return "the service"


@pytest.fixture
def make(clock, service, monkeypatch):
    """Make exporters on a clock that stands at zero, with pauses that are not spread."""
    clock.advance(-clock.now_ns() / 1e9)
    monkeypatch.setattr(_delivery._random, "uniform", lambda low, high: 1.0)
    made = []

    def make(**settings):
        exporter = Ours(service, **settings)
        exporter._clock = lambda: clock.now_ns() / 1e9
        made.append(exporter)
        return exporter

    yield make
    service.gate.set()
    service.error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for exporter in made:
            exporter._end()


@pytest.fixture
def exporter(make):
    """One exporter."""
    return make()


def attempt(exporter, clock):
    """Skip the current pause and wait for the next attempt to end."""
    attempts = exporter._attempts
    clock.advance(exporter._retry_at - clock.now_ns() / 1e9)
    with exporter._changed:
        exporter._changed.notify_all()
        assert exporter._changed.wait_for(lambda: exporter._attempts > attempts, WAIT_S)


def await_attempts(exporter, number):
    """Wait until so many attempts have ended."""
    with exporter._changed:
        assert exporter._changed.wait_for(lambda: exporter._attempts >= number, WAIT_S)


def counts(exporter):
    """Delivered, pending and lost."""
    return exporter.delivered, exporter.pending, exporter.lost


def test_reports_arrive_in_order_and_no_thread_remains(exporter, service, recwarn):
    """An export returns while the server works; the daemon thread ends with the queue."""
    service.gate.clear()
    for payload in range(5):
        exporter.put(payload)
    thread = exporter._thread
    assert thread.daemon
    assert 5 == exporter.pending
    service.gate.set()
    exporter._flush()
    thread.join(WAIT_S)

    assert ([0, 1, 2, 3, 4], (5, 0, 0), None) == (service.taken, counts(exporter), exporter._thread)
    assert [] == recwarn.list


def test_a_refused_report_is_lost_alone(exporter, service):
    """The reports after a refused one arrive; a warning says the reason."""
    service.refuses = {1}
    with pytest.warns(TimingWarning, match="refused 1"):
        for payload in range(3):
            exporter.put(payload)
        exporter._flush()

    assert ([0, 2], (2, 0, 1)) == (service.taken, counts(exporter))


def test_an_outage_costs_only_time(exporter, service, clock, recwarn):
    """Reports survive an outage; it is said once."""
    service.error = ConnectionError("gone")
    for payload in range(3):
        exporter.put(payload)
    await_attempts(exporter, 1)
    attempt(exporter, clock)
    service.error = None
    attempt(exporter, clock)
    assert exporter._wait_until_empty(WAIT_S)

    assert ([0, 1, 2], (3, 0, 0)) == (service.taken, counts(exporter))
    assert [True] == ["the service does not answer" in str(warning.message) for warning in recwarn]


def test_pauses_double_up_to_half_a_minute(exporter, service, clock):
    """Each failure doubles the pause, up to a limit; the exit shortens it."""
    service.error = ConnectionError("gone")
    exporter.put(0)
    await_attempts(exporter, 1)
    pauses = []
    for _ in range(8):
        pauses.append(exporter._retry_at - clock.now_ns() / 1e9)
        attempt(exporter, clock)
    assert [0.5, 1, 2, 4, 8, 16, 30, 30] == pytest.approx(pauses)
    assert WAIT_S == exporter._hurry()
    attempt(exporter, clock)
    assert exporter._retry_at - clock.now_ns() / 1e9 <= 0.2


def test_a_full_queue_loses_the_oldest_and_counts(exporter, service, monkeypatch):
    """Beyond its capacity the queue drops the oldest report, and says so."""
    monkeypatch.setattr(_delivery, "CAPACITY", 3)
    service.gate.clear()
    exporter.put("in flight")
    assert service.entered.acquire(timeout=WAIT_S)
    with pytest.warns(TimingWarning, match="the queue of reports for the service is full") as warned:
        for payload in range(5):
            exporter.put(payload)
    service.gate.set()
    exporter._flush()

    assert (["in flight", 2, 3, 4], (4, 0, 2), 1) == (service.taken, counts(exporter), len(warned))
    with pytest.warns(TimingWarning, match=r"^2 report\(s\) of Ours were lost: the service did not take them"):
        exporter._end()


@pytest.mark.parametrize(("status", "is_blamed"), [(500, True), (503, False), (429, False)])
def test_only_a_report_that_breaks_the_server_is_given_up(exporter, service, clock, status, is_blamed):
    """Five answers of 500 cost the report; an overloaded server costs none."""
    service.error = UnavailableError("no", status)
    exporter.put(0)
    await_attempts(exporter, 1)
    for _ in range(4):
        attempt(exporter, clock)

    assert ((0, 0, 1) if is_blamed else (0, 1, 0)) == counts(exporter)


def test_a_strict_report_raises_and_is_not_sent_later(make, service):
    """A strict exporter delivers on the calling thread and raises the server's error."""
    exporter = make(strict=True)
    service.error = ConnectionError("gone")
    with pytest.raises(ConnectionError, match="gone"):
        exporter.put(0)
    service.error = None
    exporter.put(1)

    assert ([1], (1, 0, 1)) == (service.taken, counts(exporter))


def test_a_flush_retries_at_once(exporter, service):
    """A flush ends when its attempt has failed, or when the report has arrived."""
    service.error = ConnectionError("gone")
    exporter.put(0)
    await_attempts(exporter, 1)
    with pytest.raises(ExportError, match=r"does not answer; 1 report\(s\) wait"):
        exporter._flush()
    assert 2 <= len(service.calls)
    service.error = None
    exporter._flush()
    assert (1, 0, 0) == counts(exporter)


def test_a_slow_server_bounds_a_flush(make, service):
    """A server that hangs costs a flush its time-out."""
    exporter = make(timeout_s=0.01)
    service.gate.clear()
    exporter.put(0)
    with pytest.raises(ExportError, match=r"has not answered within 0.01 s"):
        exporter._flush()


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError()])
def test_a_call_that_would_end_the_thread_costs_its_report(exporter, service, error):
    """Later reports are delivered all the same."""
    service.error = error
    exporter.put(0)
    await_attempts(exporter, 1)
    service.error = None
    exporter.put(1)
    exporter._flush()

    assert ([1], (1, 0, 1)) == (service.taken, counts(exporter))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_delivers_only_its_own_reports(exporter, service):
    """The child starts with an empty queue, also when the parent forks during a call."""
    service.gate.clear()
    exporter.put("parent's")
    assert service.entered.acquire(timeout=WAIT_S)
    pid = os.fork()
    if not pid:
        service.gate.set()
        ok = exporter.pending == 0
        exporter.put("child's")
        ok = ok and exporter._wait_until_empty(WAIT_S) and service.taken == ["child's"]
        os._exit(0 if ok else 1)
    service.gate.set()
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    exporter._flush()
    assert ["parent's"] == service.taken


def test_the_call_is_made_inline_where_no_thread_can_start(exporter, service, monkeypatch):
    """At the interpreter's shutdown reports are delivered by the exporting thread."""
    monkeypatch.setattr(threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("shutdown")))
    exporter.put(0)

    assert ([0], (1, 0, 0)) == (service.taken, counts(exporter))


def test_what_has_not_arrived_at_exit_is_counted_once(exporter, service):
    """Queued reports and the one in flight are lost, also if that one arrives later."""
    service.gate.clear()
    for payload in range(3):
        exporter.put(payload)
    assert service.entered.acquire(timeout=WAIT_S)
    with pytest.warns(TimingWarning, match=r"^3 report\(s\) of Ours were lost"):
        exporter._end()
    service.gate.set()
    exporter._end()

    assert (0, 0, 3) == counts(exporter)


class Kept(BackgroundExporter):
    """Keeps the number of times in each report, or refuses it."""

    def __init__(self):
        super().__init__(timeout_s=WAIT_S)
        self.counts = []
        self.threads = set()
        self.gate = threading.Event()
        self.entered = threading.Semaphore(0)
        self.refuses = False

    def _send(self, snapshot, destination, timeout_s):
        self.entered.release()
        assert self.gate.wait(WAIT_S)
        self.threads.add(threading.get_ident())
        if self.refuses:
            raise OSError("full")
        self.counts.append(sum(region.stats.count for region in snapshot))


def report(exporter, timer, times=1):
    """Record a time, or several, and report."""
    for _ in range(times):
        timer.record("x", 0, 1000)
    timer.export(exporter)


def test_a_report_covers_what_has_not_been_delivered(clock):
    """Each report is of the times since the last one, computed on the exporter's thread; none is in two."""
    timer, exporter = Timer(clock=clock), Kept()
    for times in (1, 2, 3):
        report(exporter, timer, times)
    exporter.gate.set()
    exporter.flush()

    assert [1, 2, 3] == exporter.counts
    assert threading.get_ident() not in exporter.threads


def test_times_of_a_refused_report_are_in_the_next(clock):
    """Of the ones that wait already, too."""
    timer, exporter = Timer(clock=clock), Kept()
    exporter.gate.set()
    report(exporter, timer)
    exporter.flush()
    exporter.refuses = True
    with pytest.warns(TimingWarning, match="full"):
        report(exporter, timer, 2)
        exporter.flush()
    exporter.refuses = False
    report(exporter, timer, 3)
    exporter.flush()

    assert ([1, 5], 1, (2, 0, 1)) == (exporter.counts, exporter.failures, counts(exporter))


def test_times_of_a_dropped_report_are_in_the_next(clock, monkeypatch):
    """A full queue costs resolution, and no times."""
    monkeypatch.setattr(_delivery, "CAPACITY", 2)
    timer, exporter = Timer(clock=clock), Kept()
    report(exporter, timer)
    assert exporter.entered.acquire(timeout=WAIT_S)
    with pytest.warns(TimingWarning, match="is full"):
        for times in (10, 100, 1000):
            report(exporter, timer, times)
    exporter.gate.set()
    exporter.flush()

    assert [1, 110, 1000] == exporter.counts


def test_a_reset_while_reports_wait(clock):
    """A region that is reset reports all its times again, and those before the reset once."""
    timer, exporter = Timer(clock=clock), Kept()
    report(exporter, timer, 5)
    timer.reset()
    report(exporter, timer, 2)
    exporter.gate.set()
    exporter.flush()

    assert [5, 2] == exporter.counts


@pytest.mark.parametrize("is_direct", [False, True], ids=["queued", "direct"])
def test_threads_that_report_at_once_share_the_times_out(is_direct):
    """However many threads report, each time is in one report."""
    timer, exporter = Timer(), Kept()
    exporter._is_direct = is_direct
    exporter.gate.set()
    threads = [threading.Thread(target=lambda: [report(exporter, timer) for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    exporter.flush()

    assert 80 == sum(exporter.counts)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_reports_what_came_after_the_fork(clock):
    """What waits or is being sent at the fork is the parent's to deliver; the child's timer starts empty."""
    timer, exporter = Timer(clock=clock), Kept()
    for times in (1, 2):
        report(exporter, timer, times)
    assert exporter.entered.acquire(timeout=WAIT_S)
    pid = os.fork()
    if not pid:
        exporter.gate.set()
        report(exporter, timer, 4)
        exporter._wait_until_empty(WAIT_S)
        os._exit(exporter.counts[0])
    exporter.gate.set()
    assert 4 == os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    exporter.flush()
    assert [1, 2] == exporter.counts


def test_a_signal_handler_may_export_during_a_send(exporter, service):
    """The lock is reentrant."""
    with exporter._changed:
        exporter.put(0)
    exporter._flush()
    assert [0] == service.taken
