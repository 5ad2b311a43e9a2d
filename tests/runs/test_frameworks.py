"""Real training leaves runs whose tables equal the snapshots: a loop in PyTorch, DDP on two ranks, a fit in Keras."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import suite_ranks

from deep500_timing.runs import Run

pytestmark = pytest.mark.slow

SAVE = """
def save(tmr, path):
    import json
    from deep500_timing import TimeType
    keys = {region.name for region in tmr.snapshot()}
    with open(path, "w") as file:
        json.dump({key: tmr.intervals(key).tolist() for key in sorted(keys)}, file)
"""

DDP = (
    SAVE
    + """
import os, sys, torch, torch.distributed as dist
from torch import nn
import deep500_timing_torch as timer
from deep500_timing_torch import comm

folder, store = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
comm.configure(enabled=True, prof_all=True)
tmr = timer.CPUGPUTimer(run=folder)
data = [(torch.randn(8, 16), torch.randint(0, 4, (8,))) for _ in range(12)]
with tmr.region(timer.TimeType.EPOCH):
    for step, (x, y) in enumerate(tmr.iterate(data, timer.TimeType.IO)):
        tmr.step(100 + step)
        with tmr.region(timer.TimeType.BATCH):
            with tmr.region(timer.TimeType.FORWARD):
                loss = nn.functional.cross_entropy(model(x), y)
            with tmr.region(timer.TimeType.BACKWARD):
                optimizer.zero_grad()
                loss.backward()
            with tmr.region("optimizer"):
                optimizer.step()
        comm.all_reduce(loss.detach())
save(tmr, f"{store}.{rank}.json")
dist.destroy_process_group()
"""
)

KERAS = (
    SAVE
    + """
import os, sys
import numpy as np, keras
import deep500_timing_tensorflow as timer

folder, out = sys.argv[1:]
os.environ["DEEP500_TIMING_RUN"] = folder
tmr = timer.CPUGPUTimer()
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse")
rng = np.random.default_rng(0)
x, y = rng.random((96, 4)), rng.random((96, 1))
model.fit(x, y, batch_size=16, epochs=2, validation_data=(x[:16], y[:16]), verbose=0,
          callbacks=[timer.TimerCallback(tmr)])
save(tmr, f"{out}.0.json")
"""
)


DEMO = (
    SAVE
    + """
import runpy, sys
import deep500_timing_torch as timer

script, out = sys.argv[1:]
made = []
init = timer.CPUGPUTimer.__init__

def remember(self, *arguments, **settings):
    init(self, *arguments, **settings)
    made.append(self)

timer.CPUGPUTimer.__init__ = remember
sys.argv = [script, "--epochs", "2"]
runpy.run_path(script, run_name="__main__")
(tmr,) = made
save(tmr, out)
"""
)


def assert_equal(run, saved):
    """Every interval of every rank is in the run as the timer had it, and nothing else is."""
    for rank, of_rank in enumerate(saved):
        rows = run.intervals(rank=rank).rows()
        mine = {key: [] for key in of_rank}
        for row in rows:
            if row["region"] == "GC":  # Measured by the log, not by the timer.
                continue
            mine[row["region"]].append([row["start_ns"], row["start_ns"] + row["dur_ns"]])
        assert {key: sorted(pairs) for key, pairs in of_rank.items() if pairs} == {
            key: sorted(pairs) for key, pairs in mine.items() if pairs
        }
        totals = dict.fromkeys(mine, 0)
        for row in run.regions(rank=rank).rows():
            if row["region"] == "GC":
                continue
            totals[row["region"]] += row["total_ns"]  # A region may lie in several: IO in an epoch and in validation.
        assert {key: sum(end - start for start, end in pairs) for key, pairs in of_rank.items()} == totals


def test_the_demo_in_pytorch(forks, tmp_path):
    """The example's loop, which says nothing of runs, leaves one where the environment names a folder."""
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    script = Path(__file__).parents[2] / "examples" / "pytorch_loop.py"
    out = tmp_path / "demo.json"
    variables = suite_ranks.environment(DEEP500_TIMING_RUN=str(tmp_path / "run"))
    log = tmp_path / "log"
    assert 0 == forks.start(["-c", DEMO, str(script), str(out)], variables, log).wait(300), log.read_text()
    saved = json.loads(out.read_text())
    with Run.open(tmp_path / "run") as run:
        assert_equal(run, [saved])
        # 1797 images by 64 are 29 batches in each of the two epochs.
        assert {"EPOCH": 2, "BATCH": 58, "FORWARD": 58, "BACKWARD": 58, "IO": 58} == {
            key: len(pairs) for key, pairs in saved.items()
        }
        assert list(range(58)) == [row["step"] for row in run.steps().rows()]
        assert ["exit"] == [row["end"] for row in run.table("logs").rows()]


def test_a_ddp_run_of_two_ranks(forks, tmp_path):
    """A loop in PyTorch under DDP: both ranks' tables, with the steps that the program numbered."""
    pytest.importorskip("torch")
    store = tmp_path / "store"
    job = suite_ranks.Job(tmp_path, forks.start, ["-c", DDP, str(tmp_path / "run"), str(store)], 2)
    assert [0, 0] == job.wait(300), job.text()
    saved = [json.loads((tmp_path / f"store.{rank}.json").read_text()) for rank in range(2)]
    with Run.open(tmp_path / "run") as run:
        assert_equal(run, saved)
        assert [(rank, 100 + step) for rank in range(2) for step in range(12)] == [
            (row["rank"], row["step"]) for row in run.steps().rows()
        ]
        logs = run.table("logs").rows()
        assert [(0, 2, "exit"), (1, 2, "exit")] == sorted((row["rank"], row["world_size"], row["end"]) for row in logs)
        collectives = run.table("collectives").rows()
        sequences = [
            sorted(row["sequence"] for row in collectives if (row["rank"], row["op"]) == (rank, "all_reduce"))
            for rank in range(2)
        ]
        assert 12 == len(set(sequences[0]))
        assert sequences[0] == sequences[1]
        assert {4} == {row["bytes"] for row in collectives}
        paths = [row["path"] for row in run.regions(rank=1).rows()]
        assert {"EPOCH/BATCH/FORWARD", "EPOCH/BATCH/BACKWARD", "EPOCH/BATCH/optimizer", "EPOCH/IO"} <= set(paths)


def test_a_fit_in_keras(forks, tmp_path):
    """A fit of which the callback knows nothing of runs: the environment says where it is written to."""
    for module in ("keras", "tensorflow"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    log = tmp_path / "log"
    command = ["-c", KERAS, str(tmp_path / "run"), str(tmp_path / "fit")]
    assert 0 == forks.start_tensorflow(command, suite_ranks.environment(), log).wait(300), log.read_text()
    saved = [json.loads((tmp_path / "fit.0.json").read_text())]
    with Run.open(tmp_path / "run") as run:
        assert_equal(run, saved)
        # 96 rows by 16 are 6 batches in each of the two epochs; in the first Keras traces.
        assert (1, 12) == (len(saved[0]["compile"]), len(saved[0]["BATCH"]))
        assert list(range(12)) == [row["step"] for row in run.steps().rows()]
