"""The rows of intervals in a log: their steps, their host intervals, and their order."""

from __future__ import annotations

import errno
import gc
import shutil
import signal
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deep500_timing import Timer
from deep500_timing.runs import Run, RunLog, _collector
from deep500_timing.runs import _compact as compacting
from deep500_timing.runs._collector import StepCounter
from deep500_timing.testing import ManualDeviceClock

MS = 1_000_000


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=40))
def test_the_newest_ends_are_remembered(counts):
    """The last BATCH ends are known, in order, and all are counted."""
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_collector, "_STEPS_REMEMBERED", 5)
        steps = StepCounter(3)
        for count in counts:
            fresh = [10 * (len(ends) + number) for number in range(count)]
            steps.add_batches(np.array(fresh[::-1], dtype=np.int64))
            ends += fresh
            assert (ends[-5:], 3 + len(ends)) == (steps._ends.tolist(), steps.batches)


@pytest.mark.parametrize("lag", [False, True])
def test_device_times_of_a_region_at_two_paths(clock, tmp_path, lag):
    """Each device interval has the path of its host interval, also if the device is late."""
    device = ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None) as log:
        for outer in ("BATCH", "VALIDATION"):
            for _ in range(30):
                with tmr.region(outer):
                    with tmr.region("FORWARD", gpu=True):
                        device.launch(0.001 if outer == "BATCH" else 0.003)
                        clock.advance(0.001)
                    clock.advance(0.001)
                if not lag:
                    device.finish()
            log.flush()
        device.finish()
        tmr.complete_all()
    with Run.open(tmp_path) as run:
        rows = run.sql(
            "select path, count(*) as n, max(dur_ns) as longest from intervals where device = 'GPU' group by path"
        )
        found = {row["path"]: (row["n"], row["longest"]) for row in rows.rows()}
        assert {"BATCH/FORWARD": (30, MS), "VALIDATION/FORWARD": (30, 3 * MS)} == found
        unknown = run.sql("select count(*) as n from intervals where device = 'GPU' and host_start_ns is null").rows()
        assert [{"n": 0}] == unknown


def test_steps_of_rotated_logs(tmr, clock, tmp_path):
    """The steps of a log's first file keep their numbers after a rotation."""
    with RunLog(tmp_path, tmr, rank=0, flush_s=None, rotate_bytes=1) as log:
        for step in range(200):
            tmr.step(step)
            with tmr.region("BATCH"):
                clock.advance(0.001)
            if step % 40 == 39:
                log.flush()
    with Run.open(tmp_path) as run:
        assert list(range(200)) == [row["step"] for row in run.steps().rows()]
        assert 10 == run.why(10).step


def test_milestones_are_a_table(log, tmr, clock, tmp_path):
    """Checkpoints have a time, a step and a duration; unknown values are null."""
    tmr.record("BATCH", 0, MS)
    tmr.run.mark("checkpoint_saved", step=40, dur_s=0.5)
    clock.advance(1.0)
    tmr.run.mark("checkpoint_restored", step=40)
    tmr.run.mark("evaluated")
    log.close()
    with Run.open(log.folder) as run:
        rows = run.table("milestones").rows()
        found = [(row["what"], row["step"], row["dur_ns"]) for row in rows]
        assert [
            ("checkpoint_saved", 40, 500 * MS),
            ("checkpoint_restored", 40, None),
            ("evaluated", None, None),
        ] == found
        assert 1000 * MS == rows[1]["unix_ns"] - rows[0]["unix_ns"]


def test_the_header_says_when_the_process_began(log, tmr, whole):
    """The start of the process lies before the log's, by less than the age of this test run."""
    tmr.record("a", 0, 1)
    log.close()
    header = whole(Path(log.folder) / "rank-00000.d5log").header
    age_s = (time.time_ns() - header["process_start_unix_ns"]) / 1e9
    assert 0 < age_s < 36_000


def test_collections_are_intervals_of_their_thread(log, tmr, clock, monkeypatch):
    """A collection of 1 ms or longer is an interval of the region GC in the region that it interrupts."""
    measure = log._collector.gc_times._measure
    with tmr.region("BATCH"):
        for length_ns in (2 * MS, MS - 1):
            measure("start", {})
            clock.advance_ns(length_ns)
            measure("stop", {})
    log.close()
    with Run.open(log.folder) as run:
        rows = run.sql("select path, dur_ns from intervals where region = 'GC'").rows()
    assert [{"path": "BATCH/GC", "dur_ns": 2 * MS}] == rows


def test_a_closed_log_measures_no_collections(log, tmr, tmp_path):
    """The callback is registered once and removed when the log closes; ``gc=False`` registers none."""
    measure = log._collector.gc_times._measure
    assert 1 == gc.callbacks.count(measure)
    log.close()
    assert 0 == gc.callbacks.count(measure)
    with RunLog(tmp_path / "other", Timer(clock=tmr._clock), flush_s=None, gc=False) as other:
        assert other._collector.gc_times is None


def test_resident_memory_is_sampled_once_a_second(log, tmr, clock):
    """Without any option a run has the resident memory over time."""
    for _ in range(5):
        tmr.record("a", 0, 1)
        clock.advance(0.5)
        log.flush()
    log.close()
    with Run.open(log.folder) as run:
        values = [
            row["value"] for row in run.sql("select value from samples where metric = 'process.rss_bytes'").rows()
        ]
    assert 3 == len(values)
    assert min(values) > 1 << 20


@pytest.mark.parametrize("at_exit", [False, True])
def test_a_second_sigterm_waits_for_the_log(tmp_path, start, at_exit):
    """All intervals are written if a second signal comes while the first one ends the process."""
    program = """
        import sys
        from deep500_timing import Timer
        from deep500_timing.runs import RunLog
        tmr = Timer(run=RunLog(sys.argv[1], rank=0, flush_s=60))
        for _ in range(100_000):
            tmr.start("a")
            tmr.end("a")
        print("up", flush=True)
        import time
    """
    program = textwrap.dedent(program) + ("" if at_exit else "time.sleep(60)")
    process = start(program, str(tmp_path / "run"))
    assert "up" == process.stdout.readline().strip()
    if not at_exit:
        process.send_signal(signal.SIGTERM)
    time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=300)
    with Run.open(tmp_path / "run") as run:
        assert [{"n": 100_000}] == run.sql("select count(*) as n from intervals").rows()
        assert ["SIGTERM"] == [row["end"] for row in run.table("logs").rows()] or at_exit


@pytest.mark.parametrize("how", ["in one part", "in parts by a thread", "in parts while the interpreter ends"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_run_on_a_full_disk_is_read_from_a_temporary_folder(log, tmr, monkeypatch, code, how):
    """The Parquet goes to a temporary folder if the run's folder takes none of it; both full is an error."""
    if "parts" in how:
        monkeypatch.setattr(compacting, "CHUNK_ROWS", 0)
    if "ends" in how:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", Mock(side_effect=RuntimeError("interpreter shutdown")))
    tmr.record("a", 0, MS)
    log.close()
    write, full = pyarrow.parquet.ParquetWriter.write_table, [log.folder]

    def refuse(self, *args, **more):
        if str(self.where).startswith(tuple(full)):
            raise OSError(code, "no")
        return write(self, *args, **more)

    monkeypatch.setattr(pyarrow.parquet.ParquetWriter, "write_table", refuse)
    with Run.open(log.folder) as run:
        assert [{"n": 1}] == run.sql("select count(*) as n from intervals").rows()
        where = run.tables["intervals"][0]
    assert not where.startswith(log.folder)
    full.append("/")
    with pytest.raises(OSError, match="Set TMPDIR to a folder with free space"):
        Run.open(shutil.copytree(log.folder, log.folder + "2"))
