from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest

from deep500_timing._summary.snapshot import RegionTimes
from deep500_timing.exceptions import ExportError, TimingWarning
from deep500_timing.exporters import WandbExporter

wandb = pytest.importorskip("wandb")


class FakeRun:
    """A run that notes what is logged, for what a real one does not show, or fails."""

    def __init__(self, error=None):
        self.rows = []
        self.axes = []
        self.error = error

    def log(self, data):
        """Note a row, or fail."""
        if self.error is not None:
            raise self.error
        self.rows.append(data)

    def define_metric(self, name, **settings):
        """Note an axis."""
        self.axes.append((name, settings))


def records_of(path):
    """The records of a run's file: blocks of 32 KiB, in which a record is split as in LevelDB's log."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert b":W&B" == data[:4]
    position, joined = 7, b""
    while position + 7 <= len(data):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        joined += data[position + 7 : position + 7 + length]
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


def axes_of(path):
    """The axis of each metric, or glob of metrics, that a run's file defines."""
    metrics = [record.metric for record in records_of(path) if record.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in metrics}


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """A real offline run; finish it and get its file with ``offline()``."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, x_disable_machine_info=True)
    run = wandb.init(project="timing", dir=tmp_path, settings=settings)

    def finish():
        run.finish()
        (path,) = Path(tmp_path).glob("wandb/offline-run-*/*.wandb")
        # W&B's service writes the end of the file a moment after finish() has returned.
        deadline = time.monotonic() + 30
        while "exit" not in [record.WhichOneof("record_type") for record in records_of(path)]:
            assert time.monotonic() < deadline, "W&B has not finished the run's file"
            time.sleep(0.01)
        return path

    yield finish
    run.finish()


def test_one_row_for_each_report(tmr, clock, offline):
    """A real run's file holds one row for each report, CPU and GPU together."""
    tmr.log_wb_all("train")
    with tmr.region("data/load"):
        clock.advance(0.5)
    tmr.log_wb_all("train/")
    tmr.log_wb_all()

    first = {"train/CPU/BATCH": 1.0, "train/GPU/BATCH": 2.0, "train/CPU/IO": 0.25}
    second = {**first, "train/CPU/data/load": 0.5}
    third = {"CPU/BATCH": 1.0, "GPU/BATCH": 2.0, "CPU/IO": 0.25, "CPU/data/load": 0.5}
    assert [first, second, third] == rows_of(offline())


def test_a_step_is_an_axis_of_its_own(tmr, offline):
    """With steps there is one row for each report as well, though the step goes back and W&B's own cannot."""
    wandb.run.log({"loss": 1.0})
    tmr.log_wb_all("train", step=100)
    tmr.log_wb_all("train", step=50)
    path = offline()

    times = {"train/CPU/BATCH": 1.0, "train/GPU/BATCH": 2.0, "train/CPU/IO": 0.25}
    assert [{"loss": 1.0}, {**times, "timing/step": 100}, {**times, "timing/step": 50}] == rows_of(path)
    assert {"timing/step": "", "train/CPU/*": "timing/step", "train/GPU/*": "timing/step"} == axes_of(path)


def test_more_statistics(tmr, offline):
    """Other statistics than the mean have their name at the end of the key; what is unknown is left out."""
    tmr.log_wb_all(stats=("mean", "p95", "count", "median_ci"))

    (row,) = rows_of(offline())
    assert (1.0, 1.0, 2) == (row["CPU/BATCH"], row["CPU/BATCH/p95"], row["CPU/BATCH/count"])
    assert 9 == len(row)


def test_nothing_is_printed(tmr, offline, capfd):
    """Logging prints nothing."""
    capfd.readouterr()
    tmr.log_wb_all("train", step=1)

    assert ("", "") == tuple(capfd.readouterr())


def test_a_run_is_told_its_axes_once(tmr):
    """However often times are logged, the axis of a prefix and device is defined once for each run."""
    run, other = FakeRun(), FakeRun()
    for prefix in ("train", "train", "test"):
        WandbExporter(prefix, run=run).export(tmr.snapshot(), step=1)
    WandbExporter("train", run=other).export(tmr.snapshot(), step=1)

    axis = {"step_metric": "timing/step"}
    assert [
        ("timing/step", {"hidden": True}),
        *((f"{prefix}/{device}/*", axis) for prefix in ("train", "test") for device in ("CPU", "GPU")),
    ] == run.axes
    assert 3 == len(other.axes)


def test_without_a_step_no_axis_is_defined(tmr):
    """A report without a step uses W&B's own."""
    run = FakeRun()
    WandbExporter(run=run).export(tmr.snapshot())

    assert [] == run.axes
    assert "timing/step" not in run.rows[0]


def test_no_row_for_no_times(snapshot_of, stats_of):
    """A report without a finite number makes no row, step or not."""
    run = FakeRun()
    nothing = RegionTimes("x", "CPU", stats_of(float("nan")), running=1)
    for step in (None, 3):
        WandbExporter(run=run).export(snapshot_of(nothing, RegionTimes("y", "GPU", None)), step=step)

    assert ([], []) == (run.rows, run.axes)


def test_a_name_that_cannot_travel_is_escaped(snapshot_of):
    """A lone surrogate in a name does not cost the report."""
    run = FakeRun()
    WandbExporter(run=run).export(snapshot_of(("a\udc80", "CPU", 1.0)))

    assert [{"CPU/a\\udc80": 1.0}] == run.rows


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
        WandbExporter(run=run).export(tmr.snapshot())


def test_a_run_that_fails_costs_one_warning(tmr, recwarn):
    """Whatever W&B raises is reported once."""
    exporter = WandbExporter(run=FakeRun(BrokenPipeError(32, "Broken pipe")))
    exporter.export(tmr.snapshot())
    exporter.export(tmr.snapshot())

    assert ["Broken pipe" in str(warning.message) for warning in recwarn] == [True]


def test_bad_arguments_are_refused_where_they_are_given(tmr):
    """An unknown statistic and a wildcard in a prefix are refused when the exporter is made."""
    with pytest.raises(ValueError, match=r"asked to log 'p42'"):
        tmr.log_wb_all(stats=("p42",))
    with pytest.raises(ValueError, match=r"prefix='a\*'; W&B takes '\*' for a wildcard"):
        WandbExporter("a*")
