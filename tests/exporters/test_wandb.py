from __future__ import annotations

import json
import os
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deep500_timing.exporters._wandb
from deep500_timing import Timer, TimeType
from deep500_timing._summary.snapshot import RegionTimes
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import WandbExporter

pytestmark = pytest.mark.slow

wandb = pytest.importorskip("wandb")


class FakeRun:
    """A run that notes each logged row as W&B's service does, for faults that a real one does not show."""

    def __init__(self, error=None):
        self.id = "fake"
        self.rows = {}
        self.axes = []
        self.error = error
        self.ignored = []
        self.step = 0
        self._filling = {}
        self._teardown_hooks = []
        self.summary = {}

    def log(self, data, step=None, commit=None):
        """Fill a row, or end it; what comes for a row that is past is ignored."""
        if self.error is not None:
            raise self.error
        if step is not None and step < self.step:
            self.ignored.append(data)
            return
        if step is not None and step > self.step:
            self._end_row()
            self.step = step
        self._filling.update(data)
        if commit or (commit is None and step is None):
            self._end_row()
            self.step += 1

    def _end_row(self):
        if self._filling:
            self.rows[self.step] = self._filling
        self._filling = {}

    def define_metric(self, name, **settings):
        """Note an axis."""
        self.axes.append((name, settings))

    def finish(self):
        """End the run."""
        for hook in self._teardown_hooks:
            hook.call()
        self._end_row()

    def all_rows(self):
        """The rows, the one that is being filled included."""
        return [*self.rows.values(), *([self._filling] if self._filling else [])]


def records_of(path):
    """The records of a run's file: blocks of 32 KiB, in which a record is split as in LevelDB's log.

    W&B's service may still write: a part that is not whole yet ends what can be read.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert b":W&B" == data[:4]
    position, joined = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part = data[position + 7 : position + 7 + length]
        if len(part) < length:
            return
        joined += part
        position += 7 + length
        if kind in {1, 4}:  # whole, or the last part
            record = Record()
            record.ParseFromString(joined)
            yield record
            joined = b""


def rows_of(path):
    """The rows of a run's history, without what W&B adds to each."""
    rows = []
    for record in records_of(path):
        if record.WhichOneof("record_type") == "history":
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows.append({key: value for key, value in row.items() if not key.startswith("_")})
    return rows


def numbered_rows_of(path):
    """The rows of a run's history with W&B's own steps."""
    history = [record.history for record in records_of(path) if record.WhichOneof("record_type") == "history"]
    return [(row.step.num, {item.key or "/".join(item.nested_key) for item in row.item}) for row in history]


def kept(path, key):
    """The values of a key in the order of the rows."""
    return [row[key] for row in rows_of(path) if key in row]


def axes_of(path):
    """The axis of each metric, or glob of metrics, that a run's file defines."""
    metrics = [record.metric for record in records_of(path) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A real offline run; finish it and get its file with ``offline()``."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # The names that W&B keeps to itself began with an underscore before its settings were a model of pydantic's.
    own = "x_" if hasattr(wandb.Settings, "model_fields") else "_"
    quiet = {f"{own}{name}": True for name in ("disable_stats", "disable_meta", "disable_machine_info")}
    settings = wandb.Settings(console="off", **quiet)
    run = wandb.init(project="timing", dir=tmp_path, settings=settings)

    def finish():
        run.finish()
        (path,) = Path(tmp_path).glob("wandb/offline-run-*/*.wandb")
        # W&B's service writes the end of the file a moment after finish() has returned.
        deadline = time.monotonic() + 300
        while "exit" not in [record.WhichOneof("record_type") for record in records_of(path)]:
            assert time.monotonic() < deadline, "W&B has not finished the run's file"
            time.sleep(0.01)
        return path

    yield finish
    run.finish()


def report(tmr, exporter, step=None):
    """Report, and wait until W&B has it."""
    tmr.export(exporter, step=step)
    exporter.flush()


@pytest.mark.parametrize(("summary", "steps"), [({"timing/step": 4}, [5, 6]), ({"loss": 1.0}, [0, 1])])
def test_a_run_that_is_resumed_goes_on_in_steps(summary, steps):
    """W&B knows the last value of our axis; of a run without it, and offline, nothing is known."""
    run = FakeRun()
    run.resumed, run.summary = True, dict(summary)
    timer, exporter = Timer(), WandbExporter(run=run, own_rows=True)
    for _ in steps:
        timer.record("IO", 0, 1)
        report(timer, exporter)
    assert steps == [row["timing/step"] for row in run.rows.values()]


def test_one_row_for_each_report(tmr, clock, offline):
    """A real run's file holds one row for each report, CPU and GPU together, though nothing else is logged."""
    exporter = WandbExporter("train")
    report(tmr, exporter)
    with tmr.region("data/load"):
        clock.advance(0.5)
    report(tmr, exporter)
    report(tmr, WandbExporter())

    first = {"train/CPU/BATCH": 1.0, "train/GPU/BATCH": 2.0, "train/CPU/IO": 0.25}
    second = {"train/CPU/data/load": 0.5}
    third = {"CPU/BATCH": 1.0, "GPU/BATCH": 2.0, "CPU/IO": 0.25, "CPU/data/load": 0.5}
    assert [first, {**second, **third}] == [
        {key: value for key, value in row.items() if not key.endswith("timing/step")} for row in rows_of(offline())
    ]


def test_a_step_is_an_axis_of_its_own(tmr, clock, offline):
    """With steps there is one row for each report as well, though the step goes back and W&B's own cannot."""
    wandb.run.log({"loss": 1.0})
    tmr.log_wb_all("train", step=100)
    with tmr.region(TimeType.IO):
        clock.advance(0.5)
    tmr.log_wb_all("train", step=50)
    path = offline()

    times = {"train/CPU/BATCH": 1.0, "train/GPU/BATCH": 2.0, "train/CPU/IO": 0.25}
    assert [
        {"loss": 1.0},
        {**times, "train/timing/step": 100},
        {"train/CPU/IO": 0.5, "train/timing/step": 50},
    ] == rows_of(path)
    axis = "train/timing/step"
    # Older ones of W&B write down the metrics that a glob has met as well.
    axes = {name: its for name, its in axes_of(path).items() if name not in times}
    assert {axis: "", "train/CPU/*": axis, "train/GPU/*": axis} == axes
    assert {axis} >= {its for name, its in axes_of(path).items() if name in times}


def configs_of(path):
    """The config that a run's file holds in the end."""
    records = [record for record in records_of(path) if record.WhichOneof("record_type") in ("run", "config")]
    updates = [getattr(record, record.WhichOneof("record_type")) for record in records]
    items = [item for update in updates for item in getattr(update, "config", update).update]
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@pytest.mark.parametrize("theirs", [{"lr": 1}, {"deep500_timing": "mine"}])
def test_the_config_says_the_unit(tmr, offline, theirs):
    """A real run's config holds the unit, and the user's entries stays."""
    wandb.run.config.update(theirs)
    tmr.log_wb_all("train")
    config = configs_of(offline())

    ours = {"deep500_timing": {"unit": "times in seconds, keys that end in _bytes in bytes"}}
    assert {**ours, **theirs} == {key: value for key, value in config.items() if key in {**ours, **theirs}}


USERS_LOGS = {
    "log, then a report": lambda e, report: (wandb.log({"loss": e}, step=e), report("train", e)),
    "a report, then log": lambda e, report: (report("train", e), wandb.log({"loss": e}, step=e)),
    "log, then two timers": lambda e, report: (wandb.log({"loss": e}, step=e), report("train", e), report("val", e)),
    "one timer twice an epoch": lambda e, report: (
        report("train", 2 * e),
        wandb.log({"loss": e}, step=e),
        report("train", 2 * e + 1),
    ),
    "without a step": lambda e, report: (wandb.log({"loss": e}), report("train", e), report("val", e)),
}


@pytest.mark.parametrize("order", USERS_LOGS)
def test_no_row_of_the_users_is_lost(tmr, clock, offline, order):
    """In a real run's file all that the user logged is there, at the user's step, and so is each report."""
    expected = []

    def send(prefix, step):
        expected.append((prefix, step))
        with tmr.region(TimeType.BATCH):
            clock.advance(1.0)
        tmr.log_wb_all(prefix, step=step)

    for epoch in range(5):
        USERS_LOGS[order](epoch, send)
    path = offline()

    assert [0, 1, 2, 3, 4] == kept(path, "loss")
    assert [0, 1, 2, 3, 4] == [step for step, row in numbered_rows_of(path) if "loss" in row]
    for prefix in ("train", "val"):
        steps = [step for reported, step in expected if reported == prefix]
        assert steps == kept(path, f"{prefix}/timing/step")
        assert len(steps) == len(kept(path, f"{prefix}/CPU/BATCH"))


def test_a_row_that_the_user_fills_is_not_ended(tmr, clock, offline):
    """The user's values of ``commit=False`` is still joined by the user's next call."""
    exporter = WandbExporter("train")
    for epoch in range(3):
        wandb.log({"loss": epoch}, commit=False)
        with tmr.region(TimeType.BATCH):
            clock.advance(1.0)
        report(tmr, exporter, epoch)
        wandb.log({"accuracy": epoch})
    rows = rows_of(offline())

    assert [(0, 0, 0), (1, 1, 1), (2, 2, 2)] == [
        (row["loss"], row["accuracy"], row["train/timing/step"]) for row in rows
    ]


def test_rows_of_our_own_are_there_at_once(tmr, offline):
    """With ``own_rows`` each report ends its row, so that it is seen while the run goes on."""
    run = wandb.run
    exporter = WandbExporter("train", own_rows=True, whole_run=True)
    for step in range(3):
        report(tmr, exporter, step)

    assert 3 == run.step
    assert [0, 1, 2] == kept(offline(), "train/timing/step")


def step_of_user(without_us, run, ahead):
    """The step that a user gives who knows nothing of us; asked of the run without us before it moves."""
    return (without_us.step if run is not without_us else run.step) + ahead


users_calls = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 3)),
    st.tuples(st.just("same step"), st.just(0)),
    st.tuples(st.just("row"), st.just(0)),
    st.tuples(st.just("part"), st.just(0)),
    st.tuples(st.just("report"), st.sampled_from(["train", "val"])),
)


@given(st.lists(users_calls, max_size=20))
def test_the_users_rows_are_the_same_with_and_without_us(calls):
    """For any logged values in any order, the user's rows are the same as without a report."""
    timer = Timer()
    timer.record("a", 0, 1000)
    with_us, without_us = FakeRun(), FakeRun()
    reports = {prefix: WandbExporter(prefix, run=with_us, strict=True) for prefix in ("train", "val")}
    sent = {prefix: [] for prefix in reports}
    for number, (kind, value) in enumerate(calls):
        if kind == "report":
            sent[value].append(number)
            reports[value].export(timer.snapshot(), step=number)
            continue
        for run in (with_us, without_us):
            if kind in ("step", "same step"):
                # A user who gives steps counts them without us.
                run.log({f"user {number}": number}, step=step_of_user(without_us, run, value))
            else:
                run.log({f"user {number}": number}, commit=kind == "row")
    with_us.finish()
    without_us.finish()

    users = {
        step: {key: value for key, value in row.items() if key.startswith("user")} for step, row in with_us.rows.items()
    }
    assert without_us.rows == {step: row for step, row in users.items() if row}
    assert [] == with_us.ignored == without_us.ignored
    for prefix, exporter in reports.items():
        key = f"{prefix}/timing/step"
        assert sent[prefix] == [row[key] for _, row in sorted(with_us.rows.items()) if key in row]
        assert (len(sent[prefix]), 0, 0) == (exporter.delivered, exporter.lost, exporter.pending)


def test_more_statistics(tmr, offline):
    """Other statistics than the mean have their name at the end of the key; an unknown value is left out."""
    tmr.log_wb_all(stats=("mean", "p95", "count", "median_ci"))

    (row,) = rows_of(offline())
    assert (1.0, 1.0, 2) == (row["CPU/BATCH"], row["CPU/BATCH/p95"], row["CPU/BATCH/count"])
    assert 10 == len(row)


def test_nothing_is_printed(tmr, offline, capfd):
    """Logging prints nothing."""
    capfd.readouterr()
    tmr.log_wb_all("train", step=1)

    assert ("", "") == tuple(capfd.readouterr())


def test_a_report_that_waits_is_neither_lost_nor_told(tmr, recwarn):
    """Reports that must wait for the user's next row are counted, flushing does not end a row, and all arrive."""
    run = FakeRun()
    exporter = WandbExporter(run=run, strict=True)
    for step in range(4):
        exporter.export(tmr.snapshot(), step=step)
    exporter.flush()
    assert (4, 3, 0) == (exporter.delivered, exporter.waiting, exporter.lost)
    assert {} == run.rows
    run.log({"loss": 1}, step=5)
    exporter.export(tmr.snapshot(), step=4)
    assert (5, 3) == (exporter.delivered, exporter.waiting)
    run.finish()

    assert [0, 1, 2, 3, 4] == [row["timing/step"] for row in run.rows.values()]
    assert (5, 0, 0, 0) == (exporter.delivered, exporter.pending, exporter.waiting, exporter.lost)
    assert [] == recwarn.list


@pytest.mark.parametrize("prefixes", [("",), ("train", "val"), ("train", "train")])
def test_reports_alone_arrive_while_the_program_runs(prefixes, tmr, offline):
    """Where the program logs by reports alone, each is in its own row, at once but for the first; none is lost."""
    run = wandb.run
    exporters = {prefix: WandbExporter(prefix, whole_run=True) for prefix in prefixes}
    for step in range(400):
        for prefix in prefixes:
            tmr.export(exporters[prefix], step=step)
        if step in (0, 399) or not step % 100:
            for exporter in exporters.values():
                exporter.flush()
        if step in (0, 399):
            assert step == run.summary[f"{prefix}/timing/step".strip("/")]
    seen = run.step
    path = offline()

    assert seen >= 399
    for prefix in prefixes:
        steps = kept(path, f"{prefix}/timing/step".strip("/"))
        assert [step for step in range(400) for _ in range(prefixes.count(prefix))] == steps


def test_a_user_who_logs_later_keeps_the_rows(tmr):
    """Reports before the first row of the user's do not advance W&B's step."""
    run = FakeRun()
    exporter = WandbExporter(run=run)
    for step in range(20):
        exporter.export(tmr.snapshot(), step=step)
    exporter.flush()
    for step in range(40):
        run.log({"loss": step}, step=step)
        for part in range(2):
            exporter.export(tmr.snapshot(), step=20 + 2 * step + part)
        exporter.flush()
    run.finish()

    assert list(range(40)) == [row["loss"] for row in run.rows.values() if "loss" in row]
    assert [] == run.ignored


def test_more_reports_than_may_wait_are_counted(tmr):
    """What waits is bounded; the oldest is lost, said and counted."""
    run = FakeRun()
    run.log({"loss": 0})
    exporter = WandbExporter(run=run)
    with pytest.warns(TimingWarning, match="256 reports wait for rows of W&B run fake; the oldest are lost"):
        for step in range(300):
            exporter.export(tmr.snapshot(), step=step)
            exporter.flush()
    run.finish()

    assert 300 == exporter.delivered + exporter.lost
    assert exporter.delivered == len(run.rows) - 1 in (256, 257, 258)
    assert 299 == run.rows[max(run.rows)]["timing/step"]


@pytest.mark.parametrize("begin", [{"step": 900}, {"commit": False}, {}])
def test_a_row_begun_at_this_moment_is_not_ended(tmr, begin):
    """The user's first row may begin while a report ends the row before: the user's next value of it is in it too."""

    class RunInUse(FakeRun):
        def log(self, data, step=None, commit=None):
            if step is not None and self.is_watched:
                self.is_watched = False
                super().log({"loss": 1}, **begin)
            super().log(data, step, commit)

    run = RunInUse()
    run.is_watched = False
    exporter = WandbExporter(run=run, strict=True)
    for step in range(40):
        exporter.export(tmr.snapshot(), step=step)
    run.is_watched = True
    exporter.export(tmr.snapshot(), step=40)
    run.log({"accuracy": 2}, **begin)
    run.finish()

    found = {key: value for row in run.rows.values() for key, value in row.items() if key in ("loss", "accuracy")}
    assert {"loss": 1, "accuracy": 2} == found
    assert "step" not in begin or {"loss": 1, "accuracy": 2}.items() <= run.rows[900].items()


def test_the_end_of_a_run_waits_for_the_reports(tmr):
    """Reports that are under way when the run ends, from several exporters, are in its rows."""
    run = FakeRun()
    exporters = [WandbExporter(prefix, run=run) for prefix in ("train", "val")]
    for step in range(5):
        for exporter in exporters:
            exporter.export(tmr.snapshot(), step=step)
    run.finish()

    for exporter in exporters:
        key = f"{exporter._prefix}timing/step"
        assert [0, 1, 2, 3, 4] == [row[key] for row in run.all_rows() if key in row]
        assert (5, 0, 0) == (exporter.delivered, exporter.pending, exporter.waiting)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_leaves_the_parents_reports(tmr):
    """What waits at a fork is written by the parent alone, and a call to W&B under way does not block the child."""
    run = FakeRun()
    exporter = WandbExporter(run=run, strict=True)
    for step in range(3):
        exporter.export(tmr.snapshot(), step=step)
    rows = deep500_timing.exporters._wandb.rows_of(run)
    with ThreadPoolExecutor(1) as other:
        other.submit(rows._lock.acquire).result()
        child = os.fork()
        if not child:
            run.finish()
            os._exit(len(run.all_rows()))
        other.submit(rows._lock.release).result()
    _, status = os.waitpid(child, 0)
    run.finish()

    assert 1 == os.waitstatus_to_exitcode(status)
    assert [0, 1, 2] == [row["timing/step"] for row in run.all_rows()]


def test_without_a_step_the_axis_grows_by_report(tmr):
    """A report without a step comes after the one before it, not on top of it."""
    run = FakeRun()
    exporter = WandbExporter(run=run, own_rows=True)
    for step in (None, None, 7, None):
        exporter.export(tmr.snapshot(), step=step)
    exporter.flush()

    assert [0, 1, 7, 8] == [row["timing/step"] for row in run.rows.values()]


def test_a_run_is_told_its_axes_once(tmr):
    """However often times are logged, the axis of a prefix and device is defined once for each run."""
    run, other = FakeRun(), FakeRun()
    for prefix in ("train", "train", "test"):
        report(tmr, WandbExporter(prefix, run=run), 1)
    report(tmr, WandbExporter("train", run=other), 1)

    axes = [
        [
            (f"{prefix}/timing/step", {"hidden": True}),
            *((f"{prefix}/{device}/*", {"step_metric": f"{prefix}/timing/step"}) for device in ("CPU", "GPU")),
        ]
        for prefix in ("train", "test")
    ]
    run.finish()
    assert axes[0] + axes[1] == run.axes
    assert axes[0] == other.axes


def test_no_row_for_no_times(snapshot_of, stats_of):
    """A report without a finite number makes no row, step or not."""
    run = FakeRun()
    nothing = RegionTimes("x", "CPU", stats_of(float("nan")), running=1)
    for step in (None, 3):
        WandbExporter(run=run, strict=True).export(snapshot_of(nothing, RegionTimes("y", "GPU", None)), step=step)

    assert ([], []) == (run.all_rows(), run.axes)


def test_a_name_that_cannot_travel_is_escaped(snapshot_of):
    """A lone surrogate in a name does not cost the report; what not every tracker takes is replaced."""
    run = FakeRun()
    WandbExporter(run=run, strict=True).export(snapshot_of(("a\udc80", "CPU", 1.0), ("EPOCH (start)", "CPU", 2.0)))

    assert [{"CPU/a": 1.0, "CPU/EPOCH_start": 2.0, "timing/step": 0}] == run.all_rows()


def test_no_active_run_is_said_once(tmr, monkeypatch, recwarn):
    """Without a run nothing is started; that is said once, with the remedy."""
    monkeypatch.setattr(wandb, "init", pytest.fail)
    tmr.log_wb_all("train")
    tmr.log_wb_all("train")

    assert [
        "Exporting times with WandbExporter failed: no W&B run is active; call wandb.init() first, or pass run=. "
        "The run goes on without this report. Said once."
    ] == [str(warning.message) for warning in recwarn if warning.category is TimingWarning]


def test_a_strict_report_without_a_run_raises(tmr):
    """Asked to be strict, it is an error."""
    with pytest.raises(ExportError, match=r"no W&B run is active; call wandb.init\(\) first"):
        tmr.log_wb_all(strict=True)


def test_a_finished_run_costs_a_warning(tmr, offline):
    """A run that takes nothing any more is reported, and never raises."""
    run = wandb.run
    offline()
    with pytest.warns(TimingWarning, match=r"Exporting times with WandbExporter failed: .*finished"):
        report(tmr, WandbExporter(run=run))


def test_a_run_that_fails_costs_one_warning(tmr, recwarn):
    """A dead service costs the reports, which are counted, and one warning."""
    exporter = WandbExporter(run=FakeRun(BrokenPipeError(32, "Broken pipe")))
    report(tmr, exporter)
    report(tmr, exporter)

    assert ["Broken pipe" in str(warning.message) for warning in recwarn] == [True]
    assert (0, 2) == (exporter.pending, exporter.lost)


def test_bad_arguments_are_refused_where_they_are_given(tmr):
    """An unknown statistic and a wildcard in a prefix are refused when the exporter is made."""
    with pytest.raises(ValueError, match=r"asked to log 'p42'"):
        tmr.log_wb_all(stats=("p42",))
    with pytest.raises(ValueError, match=r"prefix='a\*'; '\*' is W&B's wildcard"):
        WandbExporter("a*")
