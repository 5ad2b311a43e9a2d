"""Shared by the tests of runs: clocks that stand still, logs without a thread, readers of rows."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deep500_timing import Timer
from deep500_timing.runs import RunLog
from deep500_timing.runs._format import Frame, read_frames
from deep500_timing.runs._tables import Log, read_log


@pytest.fixture(autouse=True)
def _no_run_of_the_caller(monkeypatch):
    """Let no test write to a run of the caller's."""
    monkeypatch.delenv("DEEP500_TIMING_RUN", raising=False)


@pytest.fixture
def tmr(clock):
    """A timer on that clock."""
    return Timer(clock=clock)


@pytest.fixture
def log(tmr, tmp_path):
    """A log of that timer without a thread: it writes on request."""
    log = RunLog(tmp_path / "run", tmr, rank=0, flush_s=None)
    yield log
    log.close()


@pytest.fixture
def timed(clock):
    """Time a region for so many nanoseconds."""

    def run(tmr, key, nanoseconds, inside=None):
        with tmr.region(key):
            if inside is not None:
                inside()
            clock.advance_ns(nanoseconds)

    return run


def rows_of(path, table="intervals"):
    """The rows of a table of one log, as dictionaries, names as texts; no samples of resident memory.

    The table of intervals includes those of a device with a known host interval.
    """
    log = Log(str(path))
    if table == "intervals":
        return _rows_of(log, "intervals") + _rows_of(Log(str(path)), "device_intervals")
    return [row for row in _rows_of(log, table) if row.get("metric") != "process.rss_bytes"]


def _rows_of(log, table):
    batches = [batch for batch in read_log(log) if batch.table == table]
    rows = []
    for batch in batches:
        kinds = {column.name: column.type for column in log.tables[table][1]}
        columns = {
            name: [log.text(int(value)) for value in values] if kinds[name] == "name" else values.tolist()
            for name, values in batch.arrays.items()
        }
        rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return rows


def log_of(path):
    """A log that was gone through."""
    log = Log(str(path))
    for _ in read_log(log):
        pass
    return log


def frames_of(path):
    """The whole frames of a file."""
    return [frame for frame in read_frames(path.read_bytes()) if isinstance(frame, Frame)]


@pytest.fixture
def rows():
    """Read the rows of a table."""
    return rows_of


@pytest.fixture
def whole():
    """Read a log through."""
    return log_of


@pytest.fixture
def frames():
    """Read the frames of a file."""
    return frames_of


@pytest.fixture
def start():
    """Start a program in its own interpreter; the rest is killed at the end."""
    started = []

    def run(program, *arguments, **variables):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
