from __future__ import annotations

import io
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deep500_timing._summary.snapshot import ClockAnchor, RegionTimes, Snapshot
from deep500_timing._summary.stats import TimeStats
from deep500_timing.exceptions import TimingWarning
from deep500_timing.exporters import JsonLinesExporter, read_json_lines
from deep500_timing.memory import MemoryUsage, RegionMemory

finite = st.floats(allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**63 - 1)
stats = st.builds(
    TimeStats,
    **dict.fromkeys(("min", "mean", "median", "max", "stdev", "total", "p90", "p95", "p99", "quantile_error"), finite),
    count=counts,
    skipped=counts,
    median_ci=st.none() | st.tuples(finite, finite),
)
sizes = st.none() | counts
usages = st.builds(
    MemoryUsage,
    **dict.fromkeys(("host_rss_bytes", "device_allocated_bytes", "device_peak_reserved_bytes"), sizes),
    host_used_percent=st.none() | finite,
    device=st.none() | st.text(),
)
regions = st.builds(
    RegionTimes,
    name=st.text(min_size=1),
    device=st.sampled_from(["CPU", "GPU"]),
    stats=st.none() | stats,
    memory=st.none() | st.builds(RegionMemory, samples=counts, last=usages, max_host_rss_bytes=sizes),
    **dict.fromkeys(("running", "pending", "failed", "discarded", "captured", "recomputed"), counts),
)
snapshots = st.builds(
    Snapshot,
    regions=st.lists(regions, max_size=3).map(tuple),
    unix_time_s=finite,
    host=st.text(),
    pid=counts,
    rank=st.none() | counts,
    world_size=st.none() | counts,
    anchor=st.none() | st.builds(ClockAnchor, counts, counts, counts),
)


@given(st.lists(st.tuples(snapshots, st.none() | st.integers(-(2**63), 2**63 - 1)), max_size=4))
def test_what_was_written_is_read_back(exported):
    """Snapshots come back as they were, with their steps, with any content."""
    with tempfile.TemporaryDirectory() as folder:
        exporter = JsonLinesExporter(Path(folder) / "times.jsonl", strict=True)
        for snapshot, step in exported:
            exporter.export(snapshot, step=step)

        assert exported == read_json_lines(Path(folder) / "times.jsonl")
        assert len(exported) == len((Path(folder) / "times.jsonl").read_bytes().splitlines())


def test_a_line_explains_itself(tmr):
    """A line says its kind, in which version and unit, and holds everything under its name."""
    stream = io.StringIO()
    JsonLinesExporter(stream).export(tmr.snapshot(), step=12)
    line = json.loads(stream.getvalue())

    assert ("deep500-timing/snapshot", 1, "s", 12) == tuple(line[key] for key in ("schema", "version", "unit", "step"))
    assert ("node01", 4711, 1_800_000_000.0) == tuple(line[key] for key in ("host", "pid", "unix_time_s"))
    batch = line["regions"][0]
    assert ("BATCH", "CPU", 2, 1.0) == (batch["name"], batch["device"], batch["stats"]["count"], batch["stats"]["mean"])
    assert batch["stats"]["median_ci"] is None


def test_what_is_not_finite_is_null(snapshot_of, stats_of):
    """JSON has no NaN and no infinity; they become null."""
    stream = io.StringIO()
    snapshot = snapshot_of(RegionTimes("x", "CPU", stats_of(math.nan, max=math.inf, median_ci=(1.0, math.nan))))
    JsonLinesExporter(stream, strict=True).export(snapshot)
    read = json.loads(stream.getvalue(), parse_constant=pytest.fail)["regions"][0]["stats"]

    assert (None, None, [1.0, None]) == (read["mean"], read["max"], read["median_ci"])


def test_a_step_from_numpy_will_do(tmr):
    """A step that is a numpy integer is written as a number."""
    stream = io.StringIO()
    JsonLinesExporter(stream, strict=True).export(tmr.snapshot(), step=np.int64(7))

    assert 7 == json.loads(stream.getvalue())["step"]


class CountingStream(io.StringIO):
    """Counts how often it is flushed."""

    flushes = 0

    def flush(self):
        """Count."""
        self.flushes += 1


def test_a_stream_is_flushed_and_left_open(tmr):
    """A stream belongs to its opener; flushing reaches it, exporting alone does not."""
    stream = CountingStream()
    exporter = JsonLinesExporter(stream)
    exporter.export(tmr.snapshot())
    assert 0 == stream.flushes
    exporter.flush()
    assert 1 == stream.flushes
    exporter.close()

    assert not stream.closed


def test_two_logs_that_fail_are_told_apart(tmr):
    """Each log that cannot be written has its own warning, once."""
    streams = [io.StringIO(), io.StringIO()]
    for stream in streams:
        stream.close()
    with pytest.warns(TimingWarning) as warned:
        for exporter in map(JsonLinesExporter, streams * 2):
            exporter.export(tmr.snapshot())

    assert 2 == len(warned)


def test_two_files_that_fail_are_told_apart(tmr, tmp_path):
    """As two streams are: by their paths, which the warnings name."""
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    exporters = list(map(JsonLinesExporter, paths))
    for path in paths:
        path.unlink()
        path.mkdir()
    with pytest.warns(TimingWarning) as warned:
        for exporter in exporters * 2:
            exporter.export(tmr.snapshot())
            exporter.flush()

    assert [True, True] == [str(path) in str(warning.message) for path, warning in zip(paths, warned, strict=True)]


def test_a_log_is_added_to(tmr, tmp_path):
    """A second run adds its lines below those of the first."""
    path = tmp_path / "times.jsonl"
    for step in (1, 2):
        JsonLinesExporter(path, strict=True).export(tmr.snapshot(), step=step)

    assert [1, 2] == [step for _, step in read_json_lines(path)]


def test_a_line_that_was_cut_off_costs_only_itself(tmr, tmp_path):
    """After a run that was killed during a line, the next run's first line is whole, and reading says the loss."""
    path = tmp_path / "times.jsonl"
    JsonLinesExporter(path, strict=True).export(tmr.snapshot(), step=1)
    with path.open("ab") as file:
        file.write(b'{"schema": "deep500-tim')
    exporter = JsonLinesExporter(path, strict=True)
    exporter.export(tmr.snapshot(), step=2)
    exporter.export(tmr.snapshot(), step=3)

    assert 4 == len(path.read_bytes().split(b"\n")) - 1
    with pytest.warns(TimingWarning, match=r"1 line\(s\) are left out: line 2 \(not JSON: "):
        assert [1, 2, 3] == [step for _, step in read_json_lines(path)]


def changed(line, *path, to):
    """A line of ours with one field changed."""
    record = json.loads(line)
    place = record
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = to
    return json.dumps(record)


@pytest.fixture
def line(tmr, tmp_path):
    """A whole line of ours."""
    JsonLinesExporter(tmp_path / "line.jsonl", strict=True).export(tmr.snapshot(), step=9)
    return (tmp_path / "line.jsonl").read_text()


FOREIGN = {
    "not JSON": (lambda line: "{broken", "not JSON: Expecting property name"),
    "a list": (lambda line: "[]", "not of deep500-timing/snapshot"),
    "a number": (lambda line: "3", "not of deep500-timing/snapshot"),
    "another schema": (lambda line: changed(line, "schema", to="other"), "not of deep500-timing/snapshot"),
    "a later version": (lambda line: changed(line, "version", to=2), "of version 2, where 1 is known"),
    "no version": (lambda line: changed(line, "version", to=0), "of version 0"),
    "a version that is none": (lambda line: changed(line, "version", to=True), "of version True"),
    "another unit": (lambda line: changed(line, "unit", to="ms"), "its times are in 'ms', not in 's'"),
    "a step in words": (lambda line: changed(line, "step", to="7"), "step must be an integer, got '7'"),
    "a step in a list": (lambda line: changed(line, "step", to=[1]), r"step must be an integer, got \[1\]"),
    "a host that is a number": (lambda line: changed(line, "host", to=3), "host is 3, not of type str"),
    "a region without a name": (lambda line: changed(line, "regions", 0, "name", to=None), "name is None, not of"),
    "a mean in words": (lambda line: changed(line, "regions", 0, "stats", "mean", to="fast"), "mean is 'fast'"),
    "half an interval": (lambda line: changed(line, "regions", 0, "stats", "median_ci", to=[1]), "must be a pair"),
    "memory of nothing": (lambda line: changed(line, "regions", 0, "memory", to={"last": None}), "MemoryUsage"),
    "a rank in words": (lambda line: changed(line, "rank", to="first"), r"rank is 'first', not of type int \| None"),
    "no regions": (lambda line: changed(line, "regions", to=None), "regions is None"),
    "a region that is a string": (lambda line: changed(line, "regions", 0, to="BATCH"), ""),
    "a field is missing": (lambda line: json.dumps({"schema": "deep500-timing/snapshot"}), "'version' is missing"),
    "too deep": (lambda line: "[" * 100_000, "nested too deeply"),
    "too many digits": (lambda line: '{"a":' + "9" * 5000 + "}", "digits"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_lines_of_another_kind_are_left_out(tmr, tmp_path, line, kind):
    """What is not ours, of another version or unit, or of a wrong type, costs itself, and is named by its number."""
    make, reason = FOREIGN[kind]
    path = tmp_path / "times.jsonl"
    path.write_text(f"{line}\n{make(line)}\n{line}")

    for _ in range(2):
        with pytest.warns(TimingWarning, match=rf"1 line\(s\) are left out: line 3 \(.*{reason}"):
            assert [(tmr.snapshot(), 9)] * 2 == read_json_lines(path)


def test_a_good_file_is_read_without_a_word(tmr, tmp_path, line, recwarn):
    """A byte order mark, empty lines and glued lines are read; nothing is said."""
    path = tmp_path / "times.jsonl"
    path.write_text("\ufeff" + line + "\n" + line.strip() + line, encoding="utf-8")

    assert [(tmr.snapshot(), 9)] * 3 == read_json_lines(path)
    assert [] == recwarn.list


def test_many_bad_lines_are_named_in_part(tmp_path):
    """Of many lines that cannot be read the first are named, and all are counted."""
    path = tmp_path / "times.jsonl"
    path.write_text("{\n" * 25)
    with pytest.warns(
        TimingWarning, match=r"25 line\(s\) are left out: line 1 .*line 10 \(.*; and 15 more\.$"
    ) as warned:
        assert [] == read_json_lines(path)

    assert [__file__] == [warning.filename for warning in warned]


def test_fields_that_a_later_version_adds_are_ignored(tmr, tmp_path):
    """A line with fields that this version does not know is read without them."""
    path = tmp_path / "times.jsonl"
    JsonLinesExporter(path, strict=True).export(tmr.snapshot())
    line = json.loads(path.read_text())
    line["new"] = line["regions"][0]["new"] = line["regions"][0]["stats"]["new"] = 1
    path.write_text(json.dumps(line))

    assert [(tmr.snapshot(), None)] == read_json_lines(path)


def test_processes_share_a_log(tmp_path):
    """Lines that several processes write at the same time stay whole."""
    program = (
        "import sys; from deep500_timing import Timer; from deep500_timing.exporters import JsonLinesExporter\n"
        "tmr = Timer()\n"
        "for i in range(60): tmr.record('x' * 50 + str(i), 0, i)\n"
        "exporter = JsonLinesExporter(sys.argv[1], strict=True)\n"
        "for step in range(30): exporter.export(tmr.snapshot(), step=step)\n"
    )
    path = tmp_path / "times.jsonl"
    processes = [subprocess.Popen([sys.executable, "-c", program, path]) for _ in range(3)]

    assert [0, 0, 0] == [process.wait(timeout=300) for process in processes]
    read = read_json_lines(path)
    assert sorted(list(range(30)) * 3) == sorted(step for _, step in read)
    assert {process.pid for process in processes} == {snapshot.pid for snapshot, _ in read}
