"""The end of a program: one report, and nothing open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from deep500_timing import Timer
from deep500_timing._base import at_exit
from deep500_timing.testing import InMemoryExporter

PROGRAM = """
import os, signal, sys
import deep500_timing as timer
tmr = timer.Timer()
tmr.report_at_exit()
with tmr.region("work"):
    pass
{end}
"""
INTERRUPTED = subprocess.run([sys.executable, "-c", "raise KeyboardInterrupt"], stderr=subprocess.PIPE).returncode
ENDS = {
    "end": ("", 0),
    "exit": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('broken')", 1),
    "Ctrl-C": ("signal.raise_signal(signal.SIGINT)", INTERRUPTED),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
    "SIGTERM that the program handles": (
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7)); os.kill(os.getpid(), signal.SIGTERM)",
        7,
    ),
    "a forked child": ("os.fork() or sys.exit(); os.wait()", 0),
    "a forked child's SIGTERM": ("os.fork() or os.kill(os.getpid(), signal.SIGTERM); os.wait()", 0),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals and fork")
@pytest.mark.parametrize("name", ENDS)
def test_one_report_however_the_program_ends(name):
    """There is one table, from the process that asked for it, and the exit status is unchanged."""
    end, status = ENDS[name]
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(end=end)], capture_output=True, text=True, check=False)
    rows = [line for line in done.stdout.splitlines() if line.startswith("work ")]
    assert (status, 1) == (done.returncode, len(rows)), done.stdout + done.stderr


WAITING = """
import os, signal, threading
from deep500_timing import Timer
from deep500_timing._base import at_exit
from deep500_timing.exporters._delivery import BackgroundExporter
began = threading.Event()
at_exit.do_after_reports(began.set)
class Exporter(BackgroundExporter):
    def _send(self, snapshot, destination, timeout_s):
        began.wait()
        print("arrived", destination, flush=True)
exporter = Exporter()
Timer().report_at_exit()
exporter.export(Timer().snapshot(), step=1)
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_reports_on_their_way_are_waited_for_at_sigterm():
    """Queued reports of other exporters arrive as well, within their time limit."""
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, check=False)
    assert (-signal.SIGTERM, True) == (done.returncode, "arrived 1" in done.stdout), done.stdout + done.stderr


TWO_SIGNALS = """
import os, signal, threading
from deep500_timing._base import at_exit
at_exit._PAUSE_S = 0.01
terminate = lambda: os.kill(os.getpid(), signal.SIGTERM)
once = threading.Lock()
def close():
    if once.acquire(blocking=False):
        threading.Event().wait(0.5)
        print("whole", flush=True)
at_exit.do_last(close)
at_exit.report_at_exit(lambda: None, terminate)
terminate()
threading.Event().wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
def test_a_second_sigterm_within_the_first_ones_handler():
    """It begins no second ending, which would kill the process while the first one writes the logs."""
    done = subprocess.run([sys.executable, "-c", TWO_SIGNALS], capture_output=True, text=True, check=False)
    assert (-signal.SIGTERM, "whole\n") == (done.returncode, done.stdout), done.stderr


INTERRUPTED_EXPORT = """
import atexit, os, signal, sys, threading, time
from deep500_timing import Timer
from deep500_timing._base import at_exit
at_exit._PAUSE_S = 0.01
class Exporter:
    lock, ended = threading.Lock(), threading.Event()
    def export(self, snapshot, *, step=None):
        with self.lock:
            if step == 1 or sys.argv[1:] == ["report"]:
                tmr.record("second", 0, 5)
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                assert self.ended.wait(300)
            for part in ("begun", "ended"):
                print(part, step, *(region.name for region in snapshot), flush=True)
    def flush(self): pass
    close = flush
tmr, exporter = Timer(), Exporter()
tmr.report_at_exit(exporter)
tmr.record("first", 0, 5)
if sys.argv[1:] == ["export"]:
    tmr.export(exporter, step=1)
    atexit.register(exporter.ended.set)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals")
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("export", ["begun 1 first", "ended 1 first", "begun None second", "ended None second"]),
        ("report", ["begun None first", "ended None first"]),
    ],
)
def test_an_export_that_sigterm_interrupts_is_ended(where, expected):
    """The last report may need the interrupted export: both are made, and then the program ends by it."""
    command = [sys.executable, "-c", INTERRUPTED_EXPORT, where]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (-signal.SIGTERM, expected) == (done.returncode, done.stdout.splitlines()), done.stderr


TERMINATED_WORKERS = """
import multiprocessing, os, signal, threading
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))  # before what is imported below
from deep500_timing import Timer
from deep500_timing.runs import Run, RunLog
ended, folder = [], {folder!r}
def forked():
    ended.append(os.waitpid(os.fork() or os._exit(0), 0)[1])
tmr = Timer()
log = RunLog(folder, tmr, flush_s=None)
for step in range(4):
    {start}
    tmr.record("BATCH", step * 10, step * 10 + 9)
log.close()
with Run.open(folder) as run:
    logs = [row["end"] for row in run.table("logs").rows()]
    print(ended, logs, len(run.steps().rows()), [name for name in os.listdir(folder) if name.isdecimal()])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX signals and fork")
@pytest.mark.parametrize(
    "start",
    [
        "forked()",
        "one = threading.Thread(target=forked); one.start(); one.join()",
        "one = multiprocessing.get_context('fork').Process(); one.start(); one.join(); ended.append(-one.exitcode)",
    ],
)
def test_a_worker_that_is_ended_as_it_is_forked_writes_nothing(tmp_path, start):
    """It dies by the signal, before it has given up the log of its parent, and does not end that one."""
    pytest.importorskip("duckdb", reason="reads a run")
    program = TERMINATED_WORKERS.format(folder=str(tmp_path / "run"), start=start)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "[15, 15, 15, 15] ['closed'] 4 []\n", done.stdout + done.stderr


def test_destinations_are_looked_at_at_once():
    """A wrong exporter is an error at the call, not at the end."""
    with pytest.raises(TypeError):
        Timer().report_at_exit("jsonl")


def test_the_exporters_that_are_given_get_the_report(monkeypatch):
    """The report goes to each of them, once."""
    registered = []
    monkeypatch.setattr(at_exit, "_reports", [])
    monkeypatch.setattr("atexit.register", registered.append)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    tmr, exporter = Timer(), InMemoryExporter()
    tmr.report_at_exit(exporter)
    tmr.record("a", 0, 5)
    for _ in range(2):
        registered[0]()
    assert [["a"]] == [[region.name for region in snapshot] for snapshot, _ in exporter.exported]


class TestBlock:
    def test_what_is_open_at_its_end_is_discarded(self, clock, in_thread):
        """The calling thread's regions are closed; another thread's are its own."""
        with Timer(clock=clock) as tmr:
            tmr.start("a")
            tmr.start("b")
            tmr.end("b")
        times = {region.name: (region.running, region.discarded) for region in tmr.snapshot()}
        assert {"a": (0, 1), "b": (0, 0)} == times
        assert isinstance(tmr, Timer)

    def test_an_exception_counts_as_failed(self, clock):
        """A region left by an exception is counted as a region's own block counts it."""
        tmr = Timer(clock=clock)
        with pytest.raises(ZeroDivisionError), tmr:
            tmr.start("a")
            raise ZeroDivisionError
        times = tmr.snapshot().get("a")
        assert (0, 0, 1) == (times.running, times.discarded, times.failed)
