"""The content of a report: the times since the same exporter's last one of the same timer, or the whole run."""

from __future__ import annotations

import csv
import gc
import io
import weakref
from typing import ClassVar

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters import (
    BaseExporter,
    CsvExporter,
    JsonLinesExporter,
    TerminalExporter,
    _base,
    kept_exporter,
    read_json_lines,
)
from deep500_timing.testing import InMemoryExporter

EPOCHS = (1.0, 1.0, 1.0, 1.0, 4.0, 4.0)


@pytest.fixture
def run(clock, machine):
    """Train: each call is an epoch of so many seconds."""
    timer = Timer(clock=clock)

    def epoch(seconds):
        with timer.region(TimeType.EPOCH):
            clock.advance(seconds)

    epoch.timer = timer
    return epoch


def means_of(exporter):
    """The mean of the epochs in each report."""
    return [snapshot.get(TimeType.EPOCH).stats.mean for snapshot, _ in exporter.exported]


def test_a_report_holds_what_came_since(run):
    """The value at step 4 is epoch 4's, and reports add up to the run."""
    exporter = InMemoryExporter()
    for step, seconds in enumerate(EPOCHS):
        run(seconds)
        run.timer.export(exporter, step=step)

    assert list(EPOCHS) == means_of(exporter)
    assert [1] * 6 == [snapshot.get(TimeType.EPOCH).stats.count for snapshot, _ in exporter.exported]
    assert [None] == [snapshot.since_unix_time_s for snapshot, _ in exporter.exported][:1]


def test_each_exporter_has_its_own_last_report(run):
    """An exporter that is asked less often has more in each report."""
    each, every_second = InMemoryExporter(), InMemoryExporter()
    for step, seconds in enumerate(EPOCHS):
        run(seconds)
        run.timer.export(*([each, every_second] if step % 2 else [each]))

    assert list(EPOCHS) == means_of(each)
    assert [1.0, 1.0, 4.0] == means_of(every_second)


def test_timers_are_kept_apart(run, clock):
    """One exporter may serve several timers."""
    other, exporter = Timer(clock=clock), InMemoryExporter()
    for seconds in (1.0, 2.0):
        run(seconds)
        with other.region(TimeType.EPOCH):
            clock.advance(10 * seconds)
        run.timer.export(exporter)
        other.export(exporter)

    assert [1.0, 10.0, 2.0, 20.0] == means_of(exporter)


def test_the_whole_run_on_request(run):
    """An exporter that says so gets the run so far each time."""
    exporter = InMemoryExporter()
    exporter.whole_run = True
    for seconds in (1.0, 2.0):
        run(seconds)
        run.timer.export(exporter)

    assert [1.0, 1.5] == means_of(exporter)


def test_a_table_shows_the_whole_run(run):
    """A table is of the run so far, unless it is asked to be of what came since; then it says since when."""
    whole, since = io.StringIO(), io.StringIO()
    exporters = TerminalExporter(whole), TerminalExporter(since, whole_run=False)
    for seconds in (1.0, 2.0):
        run(seconds)
        run.timer.export(*exporters)

    assert "3.00 s" in whole.getvalue()
    assert "3.00 s" not in since.getvalue()
    assert 1 == since.getvalue().count("  since 2027-01-15 08:00:00 +0000\n")
    assert "since" not in whole.getvalue()


def test_lines_and_rows_say_since_when(run, tmp_path):
    """A log's lines add up, and say from when to when they are."""
    lines, rows = tmp_path / "times.jsonl", tmp_path / "times.csv"
    exporters = JsonLinesExporter(lines), CsvExporter(rows)
    for seconds in EPOCHS:
        run(seconds)
        run.timer.export(*exporters)
        for exporter in exporters:
            exporter.flush()

    read = [snapshot for snapshot, _ in read_json_lines(lines)]
    assert list(EPOCHS) == [snapshot.get(TimeType.EPOCH).stats.total for snapshot in read]
    assert [None] + [1_800_000_000.0] * 5 == [snapshot.since_unix_time_s for snapshot in read]
    with rows.open(newline="") as file:
        table = list(csv.DictReader(file))
    assert list(map(str, EPOCHS)) == [row["total_s"] for row in table]
    assert [""] + ["1800000000.0"] * 5 == [row["since_unix_time_s"] for row in table]


class Flaky(BaseExporter):
    """Fails on request."""

    def __init__(self):
        super().__init__()
        self.fails = False
        self.exported = []

    def _export(self, snapshot, step):
        if self.fails:
            raise OSError("full")
        self.exported.append((snapshot, step))


def test_what_could_not_be_written_is_in_the_next_report(run):
    """A report that failed is not subtracted: the next one holds its times as well."""
    exporter = Flaky()
    with pytest.warns(TimingWarning, match="full"):
        for seconds, exporter.fails in ((1.0, False), (2.0, True), (3.0, True), (4.0, False)):
            run(seconds)
            run.timer.export(exporter)

    assert [1.0, 3.0] == means_of(exporter)
    assert [1, 3] == [snapshot.get(TimeType.EPOCH).stats.count for snapshot, _ in exporter.exported]


class NotToBeRemembered:
    """An exporter of someone else that can neither be hashed nor referred to."""

    __hash__ = None
    __slots__ = ("exported",)

    def __init__(self):
        self.exported = []

    def export(self, snapshot, *, step=None):
        """Keep it."""
        self.exported.append((snapshot, step))


def test_an_exporter_that_cannot_be_remembered_gets_the_whole_run(run):
    """What cannot be told apart from others is not given a difference."""
    exporter = NotToBeRemembered()
    for seconds in (1.0, 2.0):
        run(seconds)
        run.timer.export(exporter)

    assert [1.0, 1.5] == means_of(exporter)


@pytest.mark.parametrize("name", ["RANK", None])
def test_rank_and_world_are_in_every_output(monkeypatch, tmp_path, name, capsys):
    """Files and the table's head say which rank of how many it was, where that is known; one rank prints."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    if name:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv("WORLD_SIZE", "8")
    timer = Timer()
    timer.record("x", 0, 1000)
    table = io.StringIO()
    files = JsonLinesExporter(tmp_path / "j", strict=True), CsvExporter(tmp_path / "c", strict=True)
    timer.export(*files, TerminalExporter(table), TerminalExporter())

    ((snapshot, _),) = read_json_lines(tmp_path / "j")
    with (tmp_path / "c").open(newline="") as file:
        (row,) = csv.DictReader(file)
    if name:
        assert (3, 8, "3", "8") == (snapshot.rank, snapshot.world_size, row["rank"], row["world_size"])
        assert ", rank 3 of 8  " in table.getvalue().splitlines()[0]
        assert "" == capsys.readouterr().out
        TerminalExporter(all_ranks=True).export(timer.snapshot())
        assert "rank 3 of 8" in capsys.readouterr().out
    else:
        assert (None, None, "", "") == (snapshot.rank, snapshot.world_size, row["rank"], row["world_size"])
        assert "rank" not in table.getvalue()
        assert "Times by region" in capsys.readouterr().out


class Tracker(InMemoryExporter):
    """Notes how often one is made."""

    made: ClassVar = []

    def __init__(self, prefix, *, stats=("mean",)):
        super().__init__()
        if stats == "mean":
            raise TypeError("a string")
        self.made.append((prefix, stats))


def test_a_timers_own_methods_keep_their_exporters(run, monkeypatch):
    """Calls with the same prefix and settings are one exporter's reports; others, and other timers, have their own."""
    monkeypatch.setattr(Tracker, "made", [])
    other = Timer()
    first = kept_exporter(run.timer, Tracker, "train", {"stats": ("mean",)})

    assert first is kept_exporter(run.timer, Tracker, "train/", {"stats": ("mean",)})
    assert first is kept_exporter(run.timer, Tracker, "/train", {"stats": ["mean"]})
    assert first is not kept_exporter(run.timer, Tracker, "val", {"stats": ("mean",)})
    assert first is not kept_exporter(run.timer, Tracker, "train", {"stats": ("mean", "p95")})
    assert first is not kept_exporter(other, Tracker, "train", {"stats": ("mean",)})
    assert 4 == len(Tracker.made)


@pytest.mark.parametrize("settings", [{"stats": "mean"}, {"stats": ("mean",), "unknown": []}])
def test_wrong_settings_say_so_themselves(run, settings):
    """An exporter's refusal reaches the caller, hashable or not."""
    with pytest.raises(TypeError, match=r"a string|unknown"):
        kept_exporter(run.timer, Tracker, "train", settings)


def test_an_exporter_is_forgotten_with_its_timer(clock):
    """The memory of reports keeps no timer and no exporter alive."""
    timer, exporter = Timer(clock=clock), InMemoryExporter()
    kept = weakref.ref(kept_exporter(timer, Tracker, "train", {"stats": ("mean",)}))
    timer.record("x", 0, 1000)
    timer.export(exporter)
    gone = weakref.ref(timer)
    of_exporter = _base._reported[exporter]
    assert 1 == len(of_exporter)
    del timer
    gc.collect()

    assert (None, None, 0) == (gone(), kept(), len(of_exporter))
