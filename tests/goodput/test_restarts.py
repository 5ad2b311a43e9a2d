"""A real job that is killed three times: the account equals an independent log of the wall clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from deep500_timing.runs import Run

pytestmark = pytest.mark.slow
pytest.importorskip("torch")
STEPS, EVERY, KILLS = 40, 6, (9, 20, 33)
TRAIN = """
import contextlib, json, os, signal, time
from datetime import timedelta
began = time.time()
import torch, torch.distributed as dist
from deep500_timing import Timer, TimeType
from deep500_timing.runs import RunLog

folder, steps, every, kills = os.environ["FOLDER"], *map(json.loads, os.environ["PLAN"].split(";"))
rank = int(os.environ["RANK"])
notes = open(f"{folder}/truth-{rank}.jsonl", "a", buffering=1)
def note(what, outer, inner, step=None):
    notes.write(json.dumps([what, outer, inner, step]) + "\\n")
@contextlib.contextmanager
def timed(what, region, step=None):
    # A region, and when it began and ended by the wall clock, read outside it and inside.
    outer, inner = [time.time()], []
    with tmr.region(region):
        inner.append(time.time())
        yield
        inner.append(time.time())
    outer.append(time.time())
    note(what, outer, inner, step)
note("begin", [began] * 2, [began] * 2)
# A store for each start: the agent's may hold the addresses of the start before.
store = f"file://{folder}/store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
dist.init_process_group("gloo", store, timedelta(seconds=300), world_size=2, rank=rank)
tmr = Timer(run=RunLog(f"{folder}/run", flush_s=0.02))
model = torch.nn.Linear(8, 8)
path, first = f"{folder}/last.pt", 0
if os.path.exists(path):
    with timed("restore", "load checkpoint"):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        time.sleep(0.05)
        first = state["step"] + 1
for step in range(first, steps):
    tmr.step(step)
    with timed("data", TimeType.IO):
        time.sleep(0.02)
    with timed("step", TimeType.BATCH, step):
        model(torch.ones(4, 8)).sum().backward()
        time.sleep(0.08)
        with tmr.region(TimeType.COMM):
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
    if step in kills and not os.path.exists(f"{folder}/killed-{step}"):
        dist.barrier()
        if rank == 1:
            open(f"{folder}/killed-{step}", "w").close()
            before = time.time()
            tmr.run.flush()  # A machine that is busy may have kept the log's own thread from it.
            note("kill", [time.time()] * 2, [before] * 2)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    if step % every == every - 1:
        with timed("checkpoint", "CHECKPOINT", step):
            if rank == 0:
                torch.save({"model": model.state_dict(), "step": step}, path + ".new")
                os.replace(path + ".new", path)
            time.sleep(0.06)
            dist.barrier()
        tmr.run.mark("checkpoint_saved", step=step)
before = time.time()
tmr.run.close()
note("end", [time.time()] * 2, [before] * 2)
dist.destroy_process_group()
"""


def test_an_account_of_a_killed_job_equals_its_wall_clock(tmp_path):
    """Two gloo ranks under torchrun, killed in steps 9, 20 and 33.

    Each part is between a wall clock's times within it and around it, to 1 % of the whole.
    """
    (tmp_path / "train.py").write_text(TRAIN)
    environment = {**os.environ, "FOLDER": str(tmp_path), "PLAN": f"{STEPS};{EVERY};{json.dumps(KILLS)}"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment.pop("DEEP500_TIMING_RUN", None)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=4"]
    launch += ["--standalone", "--monitor-interval=0.1"]
    command = [*launch, str(tmp_path / "train.py")]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    with Run.open(tmp_path / "run") as run:
        account = run.goodput()
    notes = [json.loads(line) for line in (tmp_path / "truth-1.jsonl").read_text().splitlines()]
    truth, inner = (_truth([(what, *clocks[kind], step) for what, *clocks, step in notes]) for kind in (0, 1))
    assert account.starts == 4
    assert account.failures == 3
    assert account.lost_steps == truth.pop("lost steps")
    mine = dict(account.ranks[1])
    mine["productive"] += mine.pop("communication") + mine.pop("stragglers")
    # The interpreter starts before its first line; the account counts it as start-up, the log as down time.
    mine["stopped"] = sum(mine.pop(name) for name in ("down", "absent", "initialization"))
    for name, seconds in truth.items():
        low, high = sorted((seconds, inner[name]))
        if name == "stopped":  # with what lies between two notes: on a busy machine that is more than nothing
            high = account.wall_s - sum(min(truth[other], inner[other]) for other in truth if other != name)
        assert low - 0.01 * account.wall_s < mine[name] < high + 0.01 * account.wall_s, (name, mine, truth, inner)
    assert account.checkpoints is not None


def _truth(notes):
    # The parts of rank 1 by its own wall clock: what, first, last, step.
    sessions = []
    for note in notes:
        if note[0] == "begin":
            sessions.append([])
        sessions[-1].append(note)
    found = dict.fromkeys(("productive", "data", "checkpoint", "restore", "lost", "stopped"), 0.0)
    lost_steps = 0
    for place, session in enumerate(sessions):
        steps = [note for note in session if note[0] == "step"]
        following = sessions[place + 1] if place + 1 < len(sessions) else []
        redone = next((note[3] for note in following if note[0] == "step"), STEPS)
        lost = [note for note in steps if note[3] >= redone]
        lost_steps += len(lost)
        until = lost[0][1] if lost else session[-1][2]
        found["lost"] += session[-1][2] - until
        for what, first, last, _ in session:
            if first < until and what in ("data", "checkpoint", "restore"):
                found[what] += last - first
        found["productive"] += sum(note[2] - note[1] for note in steps if note[1] < until)
        restored = sum(note[2] - note[1] for note in session if note[0] == "restore")
        # Data before the first step are part of the start.
        first_data = next(note for note in session if note[0] == "data")
        found["data"] -= first_data[2] - first_data[1]
        found["stopped"] += steps[0][1] - session[0][1] - restored
        if place:
            found["stopped"] += session[0][1] - sessions[place - 1][-1][2]
    return found | {"lost steps": lost_steps}
