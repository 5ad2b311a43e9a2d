"""One run is one training, whatever starts it: each has a folder of its own, and a restart goes on in the same one.

The programs train nothing: a module named as a framework begins the log, so no framework has to be imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from deep500_timing import Timer
from deep500_timing.runs import Run, RunLog, _worlds
from deep500_timing.runs._format import parse_name

pytestmark = pytest.mark.one_form  # nothing here depends on the form of the hot path
pytest.importorskip("duckdb", reason="reads a run")
FRAMEWORK = """
import sys
from deep500_timing._launch import autolog
for log in autolog._live:
    log.begin()
    with log.timer().region("BATCH"):
        pass
    log.run.flush()
if sys.argv[1:2] == ["wait"]:
    print("ready", flush=True)
    sys.stdin.read()
if sys.argv[1:2] == ["fail"]:
    raise ValueError("failed")
"""
LOUD = (sys.executable, "-m", "deep500_timing", "run")
RUN = (*LOUD, "--quiet")
DASHES = ("--", sys.executable)
GONE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_CLEAN = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DEEP500_TIMING_RUN"))}


@pytest.fixture
def place(tmp_path):
    """A folder with a program that trains."""
    (tmp_path / "lightning.py").write_text(FRAMEWORK)
    (tmp_path / "train.py").write_text("import lightning\n")
    return tmp_path


def call(place, *command, **environment):
    """Run a command there."""
    variables = {name: value for name, value in _CLEAN.items() if name not in GONE} | environment
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, timeout=300)


class Side:
    """A program that trains until it is told to end, as a context manager."""

    def __init__(self, place, *command, **environment):
        variables = {name: value for name, value in _CLEAN.items() if name not in GONE} | environment
        self._process = subprocess.Popen(
            command, cwd=place, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def __enter__(self):
        assert self._process.stdout.readline() == b"ready\n", self._process.communicate()
        return self

    def __exit__(self, *_):
        self._process.communicate()

    def kill(self):
        """As by the system."""
        self._process.kill()


def runs_in(folder):
    """The ranks and sessions of each run in a folder, by its name there."""
    found = {}
    for path in sorted(folder.rglob("rank-*.d5log")):
        rank, session, _ = parse_name(path.name)
        found.setdefault(str(path.parent.relative_to(folder)), []).append((rank, session))
    return found


ALONE = {".": [(0, 0)], "2": [(0, 0)]}
HOW = {
    "inherited": "subprocess.run(child)",
    "copied": "subprocess.run(child, env=os.environ.copy())",
    "changed": "subprocess.run(child, env={**os.environ, 'CUDA_VISIBLE_DEVICES': ''})",
    "deep copy": "import copy; subprocess.run(child, env=copy.deepcopy(os.environ))",
    "execve": "os.execve(child[0], child, dict(os.environ))",
    "posix_spawn": "os.waitpid(os.posix_spawn(child[0], child, dict(os.environ)), 0)",
    "asyncio": (
        "import asyncio\nasync def main():\n    env = {k: os.environ[k] for k in os.environ}\n"
        "    await (await asyncio.create_subprocess_exec(*child, env=env)).wait()\nasyncio.run(main())"
    ),
    "by a shell": "subprocess.run(' '.join(child), shell=True, env=os.environ | {'EPOCHS': '3'})",
}


@pytest.mark.parametrize(("how", "dashes"), [*((how, ()) for how in HOW), ("inherited", DASHES)])
def test_a_child_is_timed_whatever_its_environment_was_made_from(place, how, dashes):
    """The child is timed, and its parent does not say that nothing was."""
    (place / "launch.py").write_text(f"import os, subprocess, sys\nchild = [sys.executable, 'train.py']\n{HOW[how]}\n")
    done = call(place, *LOUD, "--run", "run", *dashes, "launch.py")
    assert {".": [(0, 0)]} == runs_in(place / "run")
    assert "nothing was timed" not in done.stderr


@pytest.mark.parametrize("named", [(), ("--run", "run")])
def test_a_sweep(place, named):
    """Trainings that a program starts one after another: none is the restart of another."""
    (place / "sweep.py").write_text(
        "import subprocess, sys\nfor _ in range(3):\n    subprocess.run([sys.executable, 'train.py'])\n"
    )
    call(place, *RUN, *named, "sweep.py")
    (folder,) = [place / "run"] if named else (place / "runs").iterdir()
    assert {**ALONE, "3": [(0, 0)]} == runs_in(folder)


@pytest.mark.parametrize("named", [(), ("--run", "run")])
def test_two_at_the_same_time(place, named):
    """Programs of one batch job share a folder, and have a run each."""
    job = {"LSB_JOBID": "77"}
    with Side(place, *RUN, *named, "train.py", "wait", **job), Side(place, *RUN, *named, "train.py", "wait", **job):
        pass
    assert runs_in(place / "run" if named else place / "runs" / "train-77") == ALONE


def test_two_logs_of_one_process(tmp_path):
    """The second is a session of the same training, as a fit after a fit is."""
    for _ in range(2):
        timer = Timer()
        log = RunLog(tmp_path, timer, flush_s=None)
        with timer.region("BATCH"):
            pass
        log.close()
    assert {".": [(0, 0), (0, 1)]} == runs_in(tmp_path)


def test_a_later_program_in_a_folder_that_the_user_named(place):
    """After a kill it is a restart; after a run that finished it is another training, beside that and said."""
    call(place, *RUN, "--run", "run", "train.py")
    with Side(place, *RUN, "--run", "run", "train.py", "wait") as second:
        second.kill()
    third = call(place, *RUN, "--run", "run", "train.py")
    assert {"run": [(0, 0)], "run-2": [(0, 0), (0, 1)]} == runs_in(place)
    assert third.stderr == "deep500-timing: run holds a finished run, so this one is run-2. `--append` adds to it.\n"
    call(place, *RUN, "--run", "run", "--append", "train.py")
    assert {"run": [(0, 0), (0, 1)], "run-2": [(0, 0), (0, 1)]} == runs_in(place)


@pytest.mark.parametrize("how", [{"DEEP500_TIMING_APPEND": "1"}, {"SLURM_RESTART_COUNT": "1"}])
def test_what_else_adds_to_a_finished_run(place, how):
    """A setting, and a batch system that says that it starts a job again."""
    for _ in range(2):
        call(place, *RUN, "--run", "run", "train.py", **how)
    assert {"run": [(0, 0), (0, 1)]} == runs_in(place)


def test_ranks_leave_a_finished_run_alone(place):
    """The ranks of a later world are beside it together; the sentence comes once."""
    (place / "ranks.py").write_text(RANKS.replace("range(2):\n    ranks", "[0]:\n    ranks"))
    for _ in range(2):
        done = call(place, *RUN, "--run", "run", "ranks.py")
    assert {"run": [(0, 0), (1, 0)], "run-2": [(0, 0), (1, 0)]} == runs_in(place)
    assert 1 == done.stderr.count("holds a finished run")


def test_a_folder_that_the_user_did_not_name(place):
    """Two programs of one batch job have a run each inside it."""
    for _ in range(2):
        call(place, *RUN, "train.py", PBS_JOBID="8")
    assert runs_in(place / "runs" / "train-8") == ALONE


def test_a_child_that_is_started_again_after_it_failed(place):
    """Below one ``run`` that is a restart where the user named the folder."""
    (place / "supervise.py").write_text(
        "import subprocess, sys\nfor how in ('fail', ''):\n    subprocess.run([sys.executable, 'train.py', how])\n"
    )
    call(place, *RUN, "--run", "run", "supervise.py")
    assert {".": [(0, 0), (0, 1)]} == runs_in(place / "run")


RANKS = """
import os, subprocess, sys
def start(rank, *how):
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    return subprocess.Popen([sys.executable, "train.py", *how], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for again in range(2):
    ranks = [start(rank, "wait") for rank in range(2)]
    for rank in ranks: rank.stdout.readline()
    for rank in ranks:
        if "kill" in sys.argv: rank.kill()
        rank.communicate()
"""


def test_a_launcher_that_starts_its_ranks_again(place):
    """A later process of a rank is a restart; another launcher on the same port is another training."""
    (place / "launch.py").write_text(RANKS)
    (place / "twice.py").write_text(
        "import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, 'launch.py', 'kill'])\n"
    )
    call(place, *RUN, "twice.py", JSM_NAMESPACE_RANK="7")
    (folder,) = (place / "runs").iterdir()
    world = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {".": world, "2": world} == {name: sorted(found) for name, found in runs_in(folder).items()}


def task(step, rank, of=2):
    """The environment of a task of Slurm."""
    return {
        "SLURM_JOB_ID": "5",
        "SLURM_STEP_ID": str(step),
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(of),
        "SLURM_LOCALID": str(rank),
    }


def test_steps_of_a_batch_job(place):
    """The tasks of a step are one world; another step is another; a step that is queued again is a restart."""
    for step, rank in ((0, 0), (1, 0), (1, 1), (0, 1), (0, 0)):
        call(place, *RUN, "train.py", **task(step, rank))
    assert {".": [(0, 0), (0, 1), (1, 0)], "2": [(0, 0), (1, 0)]} == {
        name: sorted(found) for name, found in runs_in(place / "runs" / "train-5").items()
    }


def test_processes_below_a_rank_that_train_at_the_same_time(place):
    """Each has its rank from the same variables, and a run of its own."""
    (place / "roles.py").write_text(
        "import subprocess, sys\nroles = []\nfor _ in range(2):\n"
        "    roles += [subprocess.Popen([sys.executable, 'train.py', 'wait'], stdin=-1, stdout=-1)]\n"
        "    roles[-1].stdout.readline()\nfor role in roles: role.communicate()\n"
    )
    call(place, *RUN, "--run", "run", "roles.py", **task(0, 1))
    assert {".": [(1, 0)], "2": [(1, 0)]} == runs_in(place / "run")


def test_a_rank_that_begins_while_another_one_looks(tmp_path, monkeypatch):
    """What a rank of the same world does between two looks at the folder sends this one to no other folder."""
    world, look = _worlds.world_of_process(rank_is_given=True), _worlds._owner_of
    with ExitStack() as logs:

        def slowly(file):
            found = look(file)
            monkeypatch.undo()
            tmr = Timer()
            logs.enter_context(RunLog(tmp_path, tmr, rank=0))
            tmr.record("BATCH", 0, 9)
            tmr.run.flush()
            return found

        monkeypatch.setattr(_worlds, "_owner_of", slowly)
        assert (str(tmp_path), None) == _worlds.claim(str(tmp_path), 1, world)


@pytest.mark.parametrize("text", ["", "x\n", "a b c d\n" * 3, "\xff", "0" * 2_000_000])
def test_a_file_of_worlds_that_is_damaged(place, text):
    """The log is written, beside what is there."""
    (place / "run").mkdir()
    (place / "run" / "world").write_text(text, "latin-1")
    call(place, *RUN, "--run", "run", "train.py")
    assert 1 == sum(map(len, runs_in(place / "run").values()))


CHILD = """
import multiprocessing as mp, os, sys
def work():
    import lightning
    {}
if __name__ == "__main__":
    child = mp.get_context("{}").Process(target=work)
    child.start()
    child.join()
"""
ENDS = {
    "nothing": ("", "exit"),
    "exit 0": ("import sys; sys.exit(0)", "exit"),
    "exit 3": ("import sys; sys.exit(3)", "exit status 3"),
    "SystemExit": ("raise SystemExit(4)", "exit status 4"),
    "a text": ("raise SystemExit('no data')", "exit status 1"),
    "an exception": ("raise KeyError('x')", "KeyError"),
}


def end_of(folder):
    """How the only log of a folder says that its process ended."""
    with Run.open(folder) as run:
        (log,) = run.table("logs").rows()
        return log["end"]


@pytest.mark.parametrize(("how", "dashes"), [*((how, ()) for how in ENDS), ("exit 3", DASHES)])
def test_an_end_is_told_as_it_was(place, how, dashes):
    """By the exit status, where that is not 0. ``run -- python train.py`` is ``run train.py``."""
    text, end = ENDS[how]
    (place / "train.py").write_text(f"import lightning\n{text}\n")
    call(place, *RUN, "--run", "run", *dashes, "train.py")
    assert end == end_of(place / "run")


def test_a_program_that_python_itself_runs(place):
    """Its exit status is told where it is given to ``sys.exit``."""
    (place / "train.py").write_text("import sys, lightning\ndef main(): sys.exit(5)\nmain()\n")
    done = call(place, *RUN, "--run", "run", "--", "env", sys.executable, "train.py")
    assert (5, "exit status 5") == (done.returncode, end_of(place / "run"))


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("start", ["spawn", "fork"])
def test_an_end_of_a_child_of_multiprocessing(place, start, how):
    """A child that died is not told as complete: Python tells its error nowhere but while it ends."""
    text, end = ENDS[how]
    (place / "train.py").write_text(CHILD.format(text or "pass", start))
    call(place, *RUN, "--run", "run", "train.py")
    assert end == end_of(place / "run")


def test_a_program_that_is_stopped_before_its_first_step(place):
    """It ends by the signal as without us: a program looks for a handler before it sets its own, as Lightning does."""
    (place / "lightning.py").write_text("")
    (place / "train.py").write_text(
        "import lightning, os, signal\nassert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n"
        "os.kill(os.getpid(), signal.SIGTERM)\nsignal.pause()\n"
    )
    done = call(place, *LOUD, "--run", "run", "train.py")
    assert (-15, "") == (done.returncode, done.stdout)
    assert not (place / "run").exists()


def test_it_can_be_read(place):
    """Each is a run of its own, whose steps are its own."""
    with Side(place, *RUN, "--run", "run", "train.py", "wait"), Side(place, *RUN, "--run", "run", "train.py", "wait"):
        pass
    for folder in ("run", "run/2"):
        with Run.open(place / folder) as run:
            assert 1 == len(run.steps().rows())
            (log,) = run.table("logs").rows()
            assert 0 == json.loads(log["header"])["session"]
