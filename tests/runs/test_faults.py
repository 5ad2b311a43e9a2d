"""What may befall a log while it is written: it costs a warning, and as little else as can be."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import warnings

import pytest
from mischief import full_disk

from deep500_timing import Timer, TimingWarning
from deep500_timing.runs import RunLog, _log

RANK_0 = "rank-00000.d5log"


@contextlib.contextmanager
def no_permission(folder):
    """Take from this process the permission to write into a folder."""
    folder.chmod(0o555)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_a_disk_that_is_full_for_a_while(tmr, log, timed, rows, whole, tmp_path):
    """While the disk is full nothing is lost: intervals wait in the timer; the fault is warned of and written down."""
    path = tmp_path / "run" / RANK_0
    timed(tmr, "a", 1)
    log.flush()
    size = path.stat().st_size
    with full_disk(size + 50), pytest.warns(TimingWarning, match="File too large") as said:
        for number in range(2, 40):
            timed(tmr, "a", number)
            log.flush()
    assert 1 == len(said)
    assert path.stat().st_size == size
    log.flush()
    timed(tmr, "a", 40)
    log.close()
    assert list(range(1, 41)) == [row["dur_ns"] for row in rows(path)]
    found = whole(path)
    assert ([], 0) == (found.damage, found.missing_frames)
    assert {"fault"} == {event["what"] for event in found.events}


def test_a_disk_that_stays_full(clock, timed, rows, tmp_path):
    """A log that cannot write its end says so once, and raises nothing; flushed blocks are there."""
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None)
    timed(tmr, "a", 1)
    log.flush()
    timed(tmr, "a", 2)
    with full_disk((tmp_path / RANK_0).stat().st_size), pytest.warns(TimingWarning) as said:
        log.close()
    assert ["File too large" in str(said[0].message), "could not be written" in str(said[1].message)] == [True, True]
    assert [1] == [row["dur_ns"] for row in rows(tmp_path / RANK_0)]
    assert 2 == len(tmr.get_time("a"))


def test_a_folder_that_may_not_be_written(clock, timed, rows, tmp_path):
    """Without permission the run is not written, the training goes on; once it is given, everything is there."""
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path / "run", tmr, rank=0, flush_s=None)
    timed(tmr, "a", 1)
    with no_permission(tmp_path), pytest.warns(TimingWarning, match="Permission denied"):
        log.flush()
        timed(tmr, "a", 2)
        log.flush()
    log.close()
    assert [1, 2] == [row["dur_ns"] for row in rows(tmp_path / "run" / RANK_0)]


def test_a_flush_after_the_end_begins_no_other_file(tmr, log, timed, tmp_path):
    """Such as that of a signal's handler, or of a thread that was on its way while the log was closed."""
    timed(tmr, "a", 1)
    log.close()
    log.flush()
    assert [RANK_0] == [path.name for path in (tmp_path / "run").glob("rank-*")]


def test_an_end_that_cannot_be_written_because_a_flush_never_ends_is_told(tmr, log, timed, monkeypatch):
    """A disk that hangs costs what came since, and says so."""
    timed(tmr, "a", 1)
    log.flush()
    monkeypatch.setattr(_log, "_LOCK_S", 0.01)
    with log._flushing, pytest.warns(TimingWarning, match="another flush is under way"):
        log.close()


def test_permission_lost_at_a_rotation(clock, timed, rows, tmp_path):
    """Where no next file can be begun, the log goes on in the one that it has."""
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path, tmr, rank=0, flush_s=None, rotate_bytes=1)
    timed(tmr, "a", 0)
    log.flush()
    assert 2 == len(list(tmp_path.glob("rank-*")))
    with no_permission(tmp_path), pytest.warns(TimingWarning, match="Permission denied"):
        for number in range(1, 4):
            timed(tmr, "a", number)
            log.flush()
    log.close()
    assert [1, 2, 3] == [row["dur_ns"] for row in rows(tmp_path / "rank-00000.0001.d5log")]


def test_a_folder_that_is_removed(tmr, log, timed, rows, whole, tmp_path):
    """When someone deletes the folder the log goes on in a new file, and says that there was one before."""
    timed(tmr, "a", 1)
    log.flush()
    shutil.rmtree(tmp_path / "run")
    timed(tmr, "a", 2)
    with pytest.warns(TimingWarning, match="was deleted"):
        log.flush()
    log.close()
    path = tmp_path / "run" / "rank-00000.0001.d5log"
    assert [2] == [row["dur_ns"] for row in rows(path)]
    assert ["fault"] == [event["what"] for event in whole(path).events]
    assert 2 == whole(path).end["written"]


def test_a_file_in_the_place_of_the_folder(clock, timed, tmp_path):
    """A file of the folder's name costs a warning and the run, never the training."""
    (tmp_path / "run").write_text("mine")
    tmr = Timer(clock=clock)
    log = RunLog(tmp_path / "run", tmr, rank=0, flush_s=None)
    timed(tmr, "a", 1)
    with pytest.warns(TimingWarning, match="File exists|Not a directory"):
        log.close()
    assert "mine" == (tmp_path / "run").read_text()


def test_two_writers_of_one_rank(clock, timed, rows, tmp_path):
    """Two processes that believe to be the same rank at the same time write two files, each whole."""
    timers = [Timer(clock=clock) for _ in range(2)]
    logs = [RunLog(tmp_path, tmr, rank=0, flush_s=None) for tmr in timers]
    for number in range(4):
        for tmr, log in zip(timers, logs, strict=True):
            timed(tmr, "a", number)
            log.flush()
    for log in logs:
        log.close()
    for name in (RANK_0, "rank-00000.s1.d5log"):
        assert [0, 1, 2, 3] == [row["dur_ns"] for row in rows(tmp_path / name)]


def test_a_file_of_another_origin_is_left_alone(clock, timed, rows, tmp_path):
    """A file that has a log's name already is never written to: the log is beside it."""
    (tmp_path / RANK_0).write_text("somebody's")
    tmr = Timer(clock=clock)
    with RunLog(tmp_path, tmr, rank=0, flush_s=None):
        timed(tmr, "a", 1)
    assert "somebody's" == (tmp_path / RANK_0).read_text()
    assert [1] == [row["dur_ns"] for row in rows(tmp_path / "2" / RANK_0)]


def test_a_fault_of_ours_ends_nothing(tmr, log, timed, rows, tmp_path, monkeypatch):
    """An exception inside the log is one warning; the next flush goes on."""
    timed(tmr, "a", 1)
    with monkeypatch.context() as patch, pytest.warns(TimingWarning, match="ZeroDivisionError") as said:
        patch.setattr("deep500_timing.runs._log.take_anchor", lambda _: 1 / 0)
        log.flush()
        log.flush()
    assert 1 == len(said)
    log.close()
    assert [1] == [row["dur_ns"] for row in rows(tmp_path / "run" / RANK_0)]


def test_a_handler_that_comes_between(tmr, log, timed, rows, tmp_path, monkeypatch):
    """A signal handler that flushes while its own thread is flushing neither waits for itself nor writes twice."""
    timed(tmr, "a", 1)
    real = log._writer.prepare

    def interrupted():
        log.flush()
        return real()

    monkeypatch.setattr(log._writer, "prepare", interrupted)
    log.flush()
    log.close()
    assert [1] == [row["dur_ns"] for row in rows(tmp_path / "run" / RANK_0)]


PROGRAM = """
import os, signal, sys, time
from deep500_timing import Timer

tmr = Timer(run=sys.argv[1])
for _ in range(1000):
    with tmr.region("a"):
        pass
how = sys.argv[2]
print("ready", flush=True)
if how == "exception":
    raise KeyError("lost")
elif how == "fork":
    if os.fork() == 0:
        with tmr.region("child"):
            pass
        sys.exit(0)
    os.wait()
elif how == "user":
    def mine(*_):
        print("mine", flush=True)
        sys.exit(3)
    signal.signal(signal.SIGTERM, mine)
    os.kill(os.getpid(), signal.SIGTERM)
elif how != "exit":
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)
"""


@pytest.mark.parametrize(
    ("how", "code", "reason"),
    [
        ("exit", 0, "exit"),
        ("exception", 1, "KeyError"),
        ("SIGINT", -2, "KeyboardInterrupt"),
        ("SIGTERM", -15, "SIGTERM"),
        ("user", 3, "exit"),
        ("fork", 0, "exit"),
    ],
)
def test_however_a_process_ends(start, rows, whole, tmp_path, how, code, reason):
    """At exit, after an exception, by SIGINT and SIGTERM the log is written to its end, by its own process alone.

    The process ends as it would have without a log.
    """
    process = start(PROGRAM, tmp_path / "run", how)
    out, error = process.communicate(timeout=300)
    assert (code, out.split()[0]) == (process.returncode, "ready"), error
    assert [RANK_0] == [path.name for path in (tmp_path / "run").glob("rank-*")]
    path = tmp_path / "run" / RANK_0
    assert ["a"] * 1000 == [row["region"] for row in rows(path)]
    assert reason == whole(path).end["reason"]


AND_A_REPORT = """
import os, signal, sys
from deep500_timing import Timer
if sys.argv[2] == "log first":
    tmr = Timer(run=sys.argv[1])
    tmr.report_at_exit()
else:
    Timer().report_at_exit()
    tmr = Timer(run=sys.argv[1])
with tmr.region("a"):
    pass
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("order", ["log first", "report first"])
def test_a_log_and_a_report_end_together(start, whole, tmp_path, order):
    """At SIGTERM the log is written to its end and the report is made, whichever was asked for first."""
    process = start(AND_A_REPORT, tmp_path / "run", order)
    out, error = process.communicate(timeout=300)
    assert (-15, True) == (process.returncode, out.startswith("Times by region")), error
    assert "SIGTERM" == whole(tmp_path / "run" / RANK_0).end["reason"]


A_POOL = """
import multiprocessing, sys
from deep500_timing import Timer

def work(_):
    tmr = Timer()
    for _ in range(10):
        with tmr.region("work"):
            pass

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(work, range(4))
"""


def test_workers_of_a_pool_that_is_terminated(rows, tmp_path):
    """Leaving the pool sends SIGTERM to its workers while they end: their records is in the run."""
    program = tmp_path / "pool.py"
    program.write_text(A_POOL)
    env = {**os.environ, "DEEP500_TIMING_RUN": str(tmp_path / "run")}
    subprocess.run([sys.executable, str(program)], env=env, timeout=300, check=True)
    logs = sorted((tmp_path / "run").rglob("rank-*"))
    found = [row["region"] for log in logs for row in rows(log)]
    assert 40 == found.count("work"), found


@pytest.mark.parametrize("fault", ["full disk", "no permission", "gone"])
def test_a_warning_that_is_an_error_ends_no_thread_of_ours(clock, timed, rows, tmp_path, capsys, in_thread, fault):
    """As by ``python -W error``: the log's thread says it on standard error, and writes everything later."""
    tmr, folder = Timer(clock=clock), tmp_path / "run"
    log = RunLog(folder, tmr, rank=0, flush_s=None)
    timed(tmr, "a", 1)
    hinders = {"full disk": lambda: full_disk(0), "no permission": lambda: no_permission(tmp_path)}
    if fault == "gone":
        folder.write_text("a file")
    with hinders.get(fault, contextlib.nullcontext)(), warnings.catch_warnings():
        warnings.simplefilter("error")
        in_thread(log.flush)
    assert "TimingWarning" in capsys.readouterr().err
    if fault == "gone":
        folder.unlink()
    log.close()
    assert [1] == [row["dur_ns"] for row in rows(folder / RANK_0)]


def test_no_warning_in_an_ordinary_run(tmr, log, timed):
    """An ordinary run warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        timed(tmr, "a", 1)
        log.flush()
        log.close()
