from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from weakref import WeakSet

import pytest
from suite_ranks import free_port

from deep500_timing import Timer, TimeType
from deep500_timing._base import at_exit
from deep500_timing._summary.snapshot import RegionTimes
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import MlflowExporter, _delivery

pytestmark = pytest.mark.slow

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="session")
def server(tmp_path_factory, mlflow_database):
    """A real tracking server on the loopback interface, over SQLite."""
    folder = tmp_path_factory.mktemp("mlflow-server")
    shutil.copy(mlflow_database, folder / "mlflow.db")
    uri = f"http://127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", uri.rpartition(":")[2]]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while not answers(f"{uri}/health"):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield uri
    finally:
        # Asked to end, it would wait for its workers; nothing that it holds is of use any more.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=300)


def answers(url):
    """Whether a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="session")
def database(tmp_path_factory, mlflow_database):
    """A local store in SQLite, without a server."""
    folder = tmp_path_factory.mktemp("mlflow-local")
    shutil.copy(mlflow_database, folder / "mlflow.db")
    return f"sqlite:///{folder}/mlflow.db"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A local store of files, which newer versions of MLflow must be asked for."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


@pytest.fixture(autouse=True)
def _tracking(monkeypatch, database):
    """Track to the local store unless a test says otherwise, and forget which servers were down."""
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setattr(_delivery, "_exporters", WeakSet())
    mlflow.set_tracking_uri(database)
    yield
    while mlflow.active_run() is not None:
        mlflow.end_run()
    mlflow.set_tracking_uri(None)
    end_all()


@pytest.fixture(params=["server", "database", "folder"])
def store(request):
    """Each kind of place that MLflow tracks to."""
    uri = request.getfixturevalue(request.param)
    mlflow.set_tracking_uri(uri)
    return uri


@pytest.fixture
def run(_tracking):
    """An active run in the local store."""
    return mlflow.start_run()


def end_all():
    """Deliver nothing more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for exporter in list(_delivery._exporters):
            exporter._end()


def deliver_all():
    """Wait until no report is on its way."""
    for exporter in list(_delivery._exporters):
        assert exporter._wait_until_empty(300)


def history_of(run_id, name):
    """Values and steps of a metric, as MLflow's client gives them."""
    deliver_all()
    return [(metric.value, metric.step) for metric in mlflow.MlflowClient().get_metric_history(run_id, name)]


def test_a_real_run_holds_the_metrics(store, clock, tmr):
    """A report is read back from server, database and files, with steps and the snapshot's time."""
    with mlflow.start_run() as run:
        tmr.log_mlflow_all("train", step=3, stats=("mean", "p95"))
        with tmr.region("data load: train"), tmr.region(TimeType.BATCH):
            clock.advance(0.5)
        tmr.log_mlflow_all("train/", step=7, stats=("mean", "p95"))

    times = {"CPU/BATCH": 0.5, "GPU/BATCH": 2.0, "CPU/IO": 0.25, "CPU/data_load_train": 0.5}
    deliver_all()
    data = mlflow.MlflowClient().get_run(run.info.run_id).data
    assert "times in seconds, names that end in _bytes in bytes" == data.tags["deep500_timing.unit"]
    metrics = data.metrics
    assert {f"train/{name}": value for name, value in times.items()} == {
        name: value for name, value in metrics.items() if not name.endswith(".p95")
    }
    # Since the last report, quantiles are from a histogram.
    assert {f"train/{name}.p95": pytest.approx(value, rel=0.01) for name, value in times.items()} == {
        name: value for name, value in metrics.items() if name.endswith(".p95")
    }
    assert [(1.0, 3), (0.5, 7)] == history_of(run.info.run_id, "train/CPU/BATCH")
    assert [(2.0, 3)] == history_of(run.info.run_id, "train/GPU/BATCH")
    assert [(0.5, 7)] == history_of(run.info.run_id, "train/CPU/data_load_train")
    (first,) = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/CPU/IO")
    assert 1_800_000_000_000 == first.timestamp


def test_a_server_takes_more_than_fits_a_batch(server, machine):
    """More metrics than a request can hold are split over several."""
    mlflow.set_tracking_uri(server)
    timer = Timer()
    for number in range(1001):
        timer.record(f"region {number}", 0, number)
    with mlflow.start_run() as run:
        timer.log_mlflow_all(strict=True)

    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {f"CPU/region_{number}": number / 1e9 for number in range(1001)} == metrics


def test_without_a_step_it_is_zero(run, tmr):
    """MLflow's own default step serves where there is none."""
    tmr.log_mlflow_all()

    assert [(1.0, 0)] == history_of(run.info.run_id, "CPU/BATCH")


@pytest.mark.parametrize("prefix", ["train", ""])
def test_a_run_that_is_resumed_goes_on_in_steps(prefix, store, tmr):
    """Another process continues behind the last step of ours, whatever the program's own steps are."""
    with mlflow.start_run() as run:
        mlflow.log_metric("loss", 1.0, step=900)
        exporter = MlflowExporter(prefix)
        for _ in range(2):
            tmr.record("IO", 0, 1)
            tmr.export(exporter)
        deliver_all()
    for _ in range(2):
        with mlflow.start_run(run_id=run.info.run_id):
            tmr.record("IO", 0, 1)
            tmr.export(MlflowExporter(prefix))
            deliver_all()

    assert [0, 1, 2, 3] == [step for _, step in history_of(run.info.run_id, f"{prefix}/CPU/IO".lstrip("/"))]


def test_the_parent_of_nested_runs_is_told_that_nothing_is_new(run, tmr):
    """The reports of the children hold the times; a run without any report is another case."""
    with mlflow.start_run(nested=True):
        tmr.log_mlflow_all("train")
    with pytest.warns(TimingWarning, match=f"nothing new for the run {run.info.run_id}.*whole_run=True"):
        tmr.log_mlflow_all("train")
        deliver_all()
    tmr.log_mlflow_all("all", whole_run=True)
    deliver_all()
    names = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {name.split("/")[0] for name in names} == {"all"}


def test_no_run_is_started(tmr, recwarn):
    """Without an active run none is started; that is said once, with the remedy."""
    tmr.log_mlflow_all("train")
    tmr.log_mlflow_all("train")

    assert [
        "Exporting times with MlflowExporter failed: no MLflow run is active on this thread; call mlflow.start_run() "
        "first, or use MlflowExporter(run_id=). The run goes on without this report. Said once."
    ] == [str(warning.message) for warning in recwarn if warning.category is TimingWarning]
    assert mlflow.active_run() is None


def test_a_strict_report_without_a_run_raises(tmr):
    """Asked to be strict, it is an error."""
    with pytest.raises(ExportError, match=r"no MLflow run is active on this thread"):
        tmr.log_mlflow_all(strict=True)


def test_a_run_can_be_named(run, tmr, monkeypatch):
    """A run is found by its id, given or in the environment, when none is active."""
    mlflow.end_run()
    MlflowExporter("given", run_id=run.info.run_id, strict=True).export(tmr.snapshot())
    monkeypatch.setenv("MLFLOW_RUN_ID", run.info.run_id)
    tmr.log_mlflow_all("environment", strict=True)

    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {"given/CPU/BATCH", "environment/CPU/BATCH"} <= set(metrics)
    assert mlflow.active_run() is None


def test_a_run_that_does_not_exist_costs_one_warning(tmr, recwarn):
    """The store's answer is reported once."""
    exporter = MlflowExporter(run_id="0" * 32)
    for _ in range(3):
        exporter.export(tmr.snapshot())
        deliver_all()
    exporter.flush()

    (message,) = [str(warning.message) for warning in recwarn if warning.category is TimingWarning]
    assert f"Run with id={'0' * 32} not found" in message
    assert 3 == exporter.lost


def test_what_is_not_finite_is_left_out(run, snapshot_of, stats_of):
    """A NaN costs its own metric, not the report."""
    snapshot = snapshot_of(
        RegionTimes("x", "CPU", stats_of(1.0, p95=float("nan"))), RegionTimes("y", "CPU", None, running=1)
    )
    MlflowExporter(stats=("mean", "p95"), strict=True).export(snapshot)
    MlflowExporter(stats=("median_ci",), strict=True).export(snapshot)

    assert {"CPU/x": 1.0} == mlflow.MlflowClient().get_run(run.info.run_id).data.metrics


def test_any_name_is_logged(run, machine):
    """Names that MLflow would refuse are logged under ones that it takes, none lost."""
    timer = Timer()
    names = ["a?b", "a:b", "a_b", "a//b", "../up", "/", ".", "漢字 é", "🚀", "a\nb"]
    names += ["x" * 400, "y" * 300, "y" * 299 + "z"]
    for number, name in enumerate(names):
        timer.record(name, 0, number)
    timer.log_mlflow_all("p", strict=True)

    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert [number / 1e9 for number in range(len(names))] == sorted(metrics.values())
    assert {"p/CPU/a_b", "p/CPU/漢字_é"} <= set(metrics)


def test_a_server_that_does_not_answer_is_not_waited_for(tmr, recwarn):
    """A server that accepts a connection and says nothing costs one bounded wait, for any timeouts of MLflow's."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mlflow.set_tracking_uri(f"http://user:secret@127.0.0.1:{silent.getsockname()[1]}")
        exporter = MlflowExporter(run_id="0" * 32, timeout_s=0.01)
        for step in range(3):
            exporter.export(tmr.snapshot(), step=step)
        with pytest.warns(TimingWarning, match=r"Flushing times with MlflowExporter failed: .* within 0.01 s"):
            exporter.flush()
        with pytest.raises(ExportError, match=r"timeout=0\.01") as raised:
            MlflowExporter(run_id="0" * 32, strict=True, timeout_s=0.01).export(tmr.snapshot())

    assert "secret" not in str(raised.value)
    assert (3, 0) == (exporter.pending, exporter.lost)
    with pytest.warns(TimingWarning, match=r"3 report\(s\) of MlflowExporter.* were lost"):
        exporter._end()


def test_a_value_at_a_step_is_that_steps(run, clock, machine):
    """The curve shows each epoch, not the mean of all so far; the whole run has its own names."""
    timer = Timer(clock=clock)
    for step, seconds in enumerate((1.0, 1.0, 4.0)):
        with timer.region(TimeType.EPOCH):
            clock.advance(seconds)
        timer.log_mlflow_all("train", step=step)
        timer.log_mlflow_all("train", step=step, whole_run=True, stats=("mean", "count"))

    assert [(1.0, 0), (1.0, 1), (4.0, 2)] == history_of(run.info.run_id, "train/CPU/EPOCH")
    assert [(1.0, 0), (1.0, 1), (2.0, 2)] == history_of(run.info.run_id, "train/CPU/EPOCH.run_mean")
    assert [(1.0, 0), (2.0, 1), (3.0, 2)] == history_of(run.info.run_id, "train/CPU/EPOCH.run_count")


def test_the_rank_is_in_the_names_on_request(run, monkeypatch):
    """Ranks that share a run can be told apart; where no rank is known the names are as ever."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    timer = Timer()
    timer.record("x", 0, 1000)
    timer.log_mlflow_all("none", by_rank=True)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    timer.log_mlflow_all("rank", by_rank=True)
    timer.log_mlflow_all("plain")
    deliver_all()

    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert {"none/CPU/x", "rank/rank3/CPU/x", "plain/CPU/x"} == set(metrics)


def test_nested_names_in_every_store(store, machine):
    """A region named as another's folder, and names that differ in case only, are kept by every store."""
    timer = Timer()
    names = ["load", "load/decode", "load/decode/jpeg", "Load", "z1"]
    with mlflow.start_run() as run:
        for step in range(3):
            for number, name in enumerate(names):
                timer.record(name, 0, number)
            timer.log_mlflow_all("train", step=step, strict=True)

    metrics = mlflow.MlflowClient().get_run(run.info.run_id).data.metrics
    assert [number / 1e9 for number in range(len(names))] == sorted(metrics.values())
    assert {"train/CPU/Load", "train/CPU/load.decode", "train/CPU/load.decode.jpeg", "train/CPU/z1"} <= set(metrics)
    assert len(names) == len({name.casefold() for name in metrics})
    assert [0, 1, 2] == [step for _, step in history_of(run.info.run_id, "train/CPU/load.decode")]


def test_the_run_of_the_main_thread_gets_the_report_at_sigterm(run, tmr, monkeypatch):
    """The report is made on its own thread, where no run is active."""
    for name in ("_reports", "_afterwards", "_endings"):
        monkeypatch.setattr(at_exit, name, [])
    monkeypatch.setattr(at_exit, "_has_begun", threading.Lock())
    for name in ("atexit.register", "signal.signal", "os.kill"):
        monkeypatch.setattr(name, lambda *_: None)
    tmr.report_at_exit(MlflowExporter("train"))
    monkeypatch.setattr(at_exit, "_handled_in", os.getpid())
    at_exit._end(signal.SIGTERM, None)
    at_exit._endings[0].join()

    assert "train/CPU/BATCH" in mlflow.MlflowClient().get_run(run.info.run_id).data.metrics


def test_a_run_of_another_thread_is_not_active_here(run, tmr, in_thread):
    """MLflow's active run belongs to a thread; on another, times need the run's id. In old ones it is everybody's."""
    failed, seen = [], []

    def export(exporter):
        seen.append(mlflow.active_run() is not None)
        try:
            exporter.export(tmr.snapshot())
        except ExportError as error:
            failed.append(str(error))

    for exporter in (MlflowExporter(strict=True), MlflowExporter("named", run_id=run.info.run_id, strict=True)):
        in_thread(export, exporter)
    assert (0 if seen[0] else 1) == len(failed)
    assert "named/CPU/BATCH" in mlflow.MlflowClient().get_run(run.info.run_id).data.metrics


def test_bad_arguments_are_refused_where_they_are_given(tmr):
    """An unknown statistic is refused when the exporter is made."""
    with pytest.raises(ValueError, match=r"MlflowExporter was asked to log 'p42'"):
        tmr.log_mlflow_all(stats=("p42",))
