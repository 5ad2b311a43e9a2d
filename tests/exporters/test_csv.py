from __future__ import annotations

import csv
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deep500_timing._summary.snapshot import COUNTERS, RegionTimes, Snapshot
from deep500_timing.exporters import CsvExporter
from deep500_timing.memory import MemoryUsage, RegionMemory


def rows_of(path):
    """The file as the csv module reads it, one dict for each row."""
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, strict=True))


def test_the_whole_file(tmr, tmp_path):
    """A header with units, then a row for each region and device."""
    CsvExporter(tmp_path / "times.csv", strict=True).export(tmr.snapshot(), step=4)

    assert """\
step,since_unix_time_s,unix_time_s,host,pid,rank,world_size,region,device,count,total_s,min_s,mean_s,median_s,p90_s,p95_s,p99_s,max_s,stdev_s,\
median_ci_low_s,median_ci_high_s,quantile_error,skipped,running,pending,failed,discarded,captured,recomputed,\
max_host_rss_bytes,max_device_allocated_bytes,max_device_reserved_bytes
4,,1800000000.0,node01,4711,,,BATCH,CPU,2,2.0,1.0,1.0,1.0,1.0,1.0,1.0,1.0,0.0,,,0.0,0,0,0,0,0,0,0,,,
4,,1800000000.0,node01,4711,,,BATCH,GPU,2,4.0,2.0,2.0,2.0,2.0,2.0,2.0,2.0,0.0,,,0.0,0,0,0,0,0,0,0,,,
4,,1800000000.0,node01,4711,,,IO,CPU,1,0.25,0.25,0.25,0.25,0.25,0.25,0.25,0.25,0.0,,,0.0,0,0,0,0,0,0,0,,,
""" == (tmp_path / "times.csv").read_text("utf-8")


def test_the_header_is_written_once(tmr, tmp_path):
    """Later exports, and later runs, add rows below the same header."""
    path = tmp_path / "times.csv"
    exporter = CsvExporter(path, strict=True)
    exporter.export(tmr.snapshot(), step=1)
    exporter.export(tmr.snapshot())
    CsvExporter(path, strict=True).export(tmr.snapshot(), step=3)

    assert ["1"] * 3 + [""] * 3 + ["3"] * 3 == [row["step"] for row in rows_of(path)]


def test_another_header_is_refused(tmr, tmp_path):
    """A file that holds something else is refused when the exporter is made, and left as it is."""
    path = tmp_path / "times.csv"
    path.write_text("epoch,loss\n1,0.5\n")
    with pytest.raises(ValueError, match=r"times.csv': its first line, 'epoch,loss', is not the header of"):
        CsvExporter(path)

    assert "epoch,loss\n1,0.5\n" == path.read_text()


def test_a_row_that_was_cut_off_costs_only_itself(tmr, tmp_path):
    """After a run that was killed during a row, the next row begins on its own line."""
    path = tmp_path / "times.csv"
    CsvExporter(path, strict=True).export(tmr.snapshot(), step=1)
    path.write_bytes(path.read_bytes()[:-20])
    CsvExporter(path, strict=True).export(tmr.snapshot(), step=2)

    assert ["2"] * 3 == [row["step"] for row in rows_of(path)][-3:]


def test_a_region_without_times_has_its_counters(tmp_path, snapshot_of):
    """An unknown value is an empty field, never 0; counts are there."""
    region = RegionTimes("load", "GPU", None, running=1, pending=2, failed=3, discarded=4, captured=5, recomputed=6)
    CsvExporter(tmp_path / "times.csv", strict=True).export(snapshot_of(region))
    (row,) = rows_of(tmp_path / "times.csv")

    assert ("0", "", "", "") == (row["count"], row["mean_s"], row["median_ci_low_s"], row["skipped"])
    assert ["1", "2", "3", "4", "5", "6"] == [row[name] for name in COUNTERS]


def test_memory_has_columns(tmp_path, snapshot_of, stats_of):
    """Where memory was asked for, the most of each kind is in a column that names its unit."""
    memory = RegionMemory(3, MemoryUsage(host_rss_bytes=10), max_host_rss_bytes=20, max_device_allocated_bytes=30)
    CsvExporter(tmp_path / "times.csv", strict=True).export(
        snapshot_of(RegionTimes("x", "CPU", stats_of(1.0), memory=memory))
    )
    (row,) = rows_of(tmp_path / "times.csv")

    assert ["20", "30", ""] == [
        row[f"max_{name}_bytes"] for name in ("host_rss", "device_allocated", "device_reserved")
    ]


def test_what_is_not_finite_is_empty(tmp_path, snapshot_of, stats_of):
    """A NaN is written as an empty field."""
    snapshot = snapshot_of(RegionTimes("x", "CPU", stats_of(1.0, p95=float("nan"), median_ci=(0.5, 2.0))))
    CsvExporter(tmp_path / "times.csv", strict=True).export(snapshot)
    (row,) = rows_of(tmp_path / "times.csv")

    assert ("", "0.5", "2.0") == (row["p95_s"], row["median_ci_low_s"], row["median_ci_high_s"])


@given(st.lists(st.text(min_size=1), min_size=1, max_size=5))
@example(["a,b", 'say "x"', "two\nlines", "cr\rlf\r\n", " blanks ", "=1+1"])
def test_any_name_is_read_back(stats_of, names):
    """Commas, quotes and line ends in names come back as they were; a spreadsheet's formula has a quote before."""
    snapshot = Snapshot(tuple(RegionTimes(name, "CPU", stats_of(1.0)) for name in names), 0.0, "node01", 1)
    with tempfile.TemporaryDirectory() as folder:
        CsvExporter(Path(folder) / "times.csv", strict=True).export(snapshot)

        expected = [f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name for name in names]
        assert expected == [row["region"] for row in rows_of(Path(folder) / "times.csv")]
