"""MLflow's exporter against a server that is busy, slow, refusing, down, or gone when the program ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from weakref import WeakSet

import pytest

from deep500_timing import Timer
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import MlflowExporter, _delivery

pytestmark = pytest.mark.slow

mlflow = pytest.importorskip("mlflow")

A, B = "a" * 32, "b" * 32
WAIT_S = 300.0


@pytest.fixture(autouse=True)
def _tracking(monkeypatch, moody):
    """Track to the moody server, with short pauses, and forget all servers."""
    monkeypatch.setattr(_delivery, "_exporters", WeakSet())
    monkeypatch.setattr(_delivery, "FIRST_PAUSE_S", 0.01)
    mlflow.set_tracking_uri(moody.uri)
    yield
    mlflow.set_tracking_uri(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for exporter in list(_delivery._exporters):
            exporter._end()


@pytest.fixture
def snapshot():
    """The times of one region."""
    timer = Timer()
    timer.record("a", 0, 1000)
    return timer.snapshot()


def empty(exporter):
    """Wait until none of its reports is on its way."""
    assert exporter._wait_until_empty(WAIT_S)


def said(recwarn):
    """The warnings of ours so far."""
    return [str(warning.message) for warning in recwarn if warning.category is TimingWarning]


def test_four_threads_and_a_healthy_server(moody, snapshot, recwarn):
    """What comes while a report is on its way is not dropped."""
    exporters = [MlflowExporter("p", run_id=str(number) * 32) for number in range(4)]
    barrier = threading.Barrier(4)

    def work(exporter):
        barrier.wait()
        for step in range(5):
            exporter.export(snapshot, step=step)

    threads = [threading.Thread(target=work, args=(exporter,)) for exporter in exporters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, exporter in enumerate(exporters):
        empty(exporter)
        assert [0, 1, 2, 3, 4] == moody.steps(str(number) * 32)
        assert (5, 0, 0) == (exporter.delivered, exporter.lost, exporter.pending)
    assert [] == said(recwarn)


def test_a_refused_report_silences_nobody(moody, snapshot, recwarn):
    """A run that was deleted costs its own reports; another run's all arrive, and each counts its own."""
    moody.mood = lambda path, body: 404 if body.get("run_id") == A else 200
    of_a, of_b = MlflowExporter("p", run_id=A), MlflowExporter("p", run_id=B)
    for step in range(6):
        of_a.export(snapshot, step=step)
        of_b.export(snapshot, step=step)

    empty(of_a)
    empty(of_b)
    assert (list(range(6)), 0, 6) == (moody.steps(B), of_b.lost, of_a.lost)
    (message,) = said(recwarn)
    assert "not this one" in message


def test_a_slow_server_delays_no_export(moody, snapshot, recwarn):
    """Exports do not wait for a slow server; every report arrives, in order."""
    let = threading.Event()

    def slow(path, body):
        assert let.wait(WAIT_S)
        return 200

    moody.mood = slow
    exporter = MlflowExporter("p", run_id=A)
    for step in range(100):
        exporter.export(snapshot, step=step)
    assert (0, 100) == (exporter.delivered, exporter.pending)
    let.set()
    empty(exporter)

    assert list(range(100)) == moody.steps()
    assert (100, 0) == (exporter.delivered, exporter.lost)
    assert [] == said(recwarn)


def test_a_restart_costs_nothing_that_fits_the_queue(moody, snapshot, recwarn):
    """A server that was gone for a while gets the reports of that time."""
    exporter = MlflowExporter("p", run_id=A)
    exporter.export(snapshot, step=0)
    empty(exporter)
    port = moody.port
    moody.stop()
    for step in range(1, 101):
        exporter.export(snapshot, step=step)
    exporter.flush()
    moody.start(port)
    empty(exporter)

    assert list(range(101)) == moody.steps()
    assert 0 == exporter.lost
    assert [True] * len(said(recwarn)) == [f"MLflow at {moody.uri} does not answer" in text for text in said(recwarn)]


def test_the_server_fails_for_a_while(moody, snapshot):
    """503 is an outage: nothing is lost when the server recovers."""
    moody.mood = lambda path, body: 503
    exporter = MlflowExporter("p", run_id=A)
    with pytest.warns(TimingWarning, match=r"does not answer \(UnavailableError: status 503"):
        exporter.export(snapshot, step=0)
        exporter.flush()
    moody.mood = lambda path, body: 200
    empty(exporter)

    assert ([0], 0) == (moody.steps(), exporter.lost)


def test_a_strict_report_raises_and_is_not_sent_later(moody, snapshot):
    """Asked to be strict, an outage is an error of that report."""
    moody.mood = lambda path, body: 503
    exporter = MlflowExporter("p", run_id=A, strict=True)
    with pytest.raises(ExportError, match="status 503"):
        exporter.export(snapshot, step=0)
    moody.mood = lambda path, body: 200
    exporter.export(snapshot, step=1)

    assert ([1], 1, 0) == (moody.steps(), exporter.lost, exporter.pending)


def test_mlflows_own_retries_are_not_used(moody, snapshot, monkeypatch):
    """For any settings of MLflow's, a request of ours is made once, so that our queue decides."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "7")
    monkeypatch.setattr(_delivery, "FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(_delivery, "LONGEST_PAUSE_S", 1000.0)
    moody.mood = lambda path, body: 503
    exporter = MlflowExporter("p", run_id=A, timeout_s=WAIT_S)
    exporter.export(snapshot, step=0)
    moody.wait_for_requests(1)
    with exporter._changed:
        assert exporter._changed.wait_for(lambda: exporter._failures == 1, WAIT_S)

    assert 1 == moody.requests
    moody.mood = lambda path, body: 200
    exporter.flush()
    assert [0] == moody.steps()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_reports(moody, snapshot):
    """A child that was forked during a report gets its own reports through, and sends none of the parent's."""
    let = threading.Event()
    moody.mood = lambda path, body: 200 if let.wait(WAIT_S) else 500
    exporter = MlflowExporter("p", run_id=A, timeout_s=0)
    exporter.export(snapshot, step=0)
    moody.wait_for_requests(1)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own = MlflowExporter("p", run_id=B, timeout_s=WAIT_S)
            own.export(snapshot, step=1)
            exporter.export(snapshot, step=2)
            empty(own)
            empty(exporter)
            status = 0 if (own.delivered, exporter.delivered, exporter.lost) == (1, 1, 0) else 2
        finally:
            os._exit(status)
    moody.wait_for_requests(2)
    let.set()
    _, status = os.waitpid(child, 0)
    empty(exporter)

    assert (0, [1], [0, 2]) == (status, moody.steps(B), sorted(moody.steps(A)))


# MLflow does without data frames, which are a third of its import and has no part in this.
PROGRAM = """
import multiprocessing, sys
sys.modules.update(dict.fromkeys(("pandas", "polars")))
import mlflow, deep500_timing
from deep500_timing.exporters import MlflowExporter
def report():
    timer = deep500_timing.Timer()
    exporter = MlflowExporter("p", run_id="r" * 32, timeout_s=0.05, exit_timeout_s=float(sys.argv[2]))
    for step in range(int(sys.argv[3])):
        timer.record("a", 0, 1000)
        timer.export(exporter, step=step)
mlflow.set_tracking_uri(sys.argv[1])
if sys.argv[4:] == ["child"]:
    child = multiprocessing.get_context("fork").Process(target=report)
    child.start()
    child.join()
else:
    report()
"""


def start(moody, *arguments):
    """Start a program that reports and ends."""
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, moody.uri, *map(str, arguments)], stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("where", [(), ("child",)], ids=["program", "child of multiprocessing"])
def test_the_last_reports_arrive_at_exit(moody, where):
    """A server that fails when the program ends and is well a moment later gets the rest."""
    moody.mood = lambda path, body: 503
    program = start(moody, 20, 3, *where)
    moody.wait_for_requests(2)
    moody.mood = lambda path, body: 200
    _, errors = program.communicate(timeout=300)

    assert (0, [0, 1, 2]) == (program.returncode, moody.steps())
    assert "lost" not in errors


def test_what_does_not_arrive_at_exit_is_said(moody):
    """A server that hangs holds up the end of a program within a bound, and how much is lost is said."""
    let = threading.Event()
    moody.mood = lambda path, body: 200 if let.wait(WAIT_S) else 500
    program = start(moody, 0.2, 3)
    _, errors = program.communicate(timeout=300)
    let.set()

    assert 0 == program.returncode
    name = f"MlflowExporter('p/', run_id='{'r' * 32}')"
    assert f"3 report(s) of {name} were lost: MLflow at {moody.uri} did not take them" in errors


def test_a_report_without_a_step_comes_after_the_one_before(moody, snapshot):
    """MLflow knows no "no step": such reports get their own steps that grow, not all the same."""
    exporter = MlflowExporter("p", run_id=A)
    for step in (None, None, 7, None, 3, None):
        exporter.export(snapshot, step=step)
    other = MlflowExporter("p", run_id=B)
    other.export(snapshot)
    empty(exporter)
    empty(other)

    assert ([0, 1, 7, 8, 3, 4], [0]) == (moody.steps(A), moody.steps(B))


def test_a_password_is_not_shown(moody, snapshot):
    """A message about a server leaves out the client."""
    port = moody.port
    moody.stop()
    mlflow.set_tracking_uri(f"http://user:secret@127.0.0.1:{port}")
    with pytest.warns(TimingWarning, match="does not answer") as warned:
        exporter = MlflowExporter(run_id=A)
        exporter.export(snapshot)
        exporter.flush()

    assert not [warning for warning in warned if "secret" in str(warning.message)]
