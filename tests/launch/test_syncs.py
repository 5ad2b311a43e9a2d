"""What is sampled in a few steps: lines that wait for the GPU, by a stand-in for its warnings, and DDP's own times."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace

import pytest
from suite_autolog import TRAIN

torch = pytest.importorskip("torch", reason="times PyTorch")
pytest.importorskip("duckdb", reason="reads a run")
pytestmark = pytest.mark.slow

# As PyTorch built for CUDA does: it says once that the mode is a prototype, and warns where the Python line is.
STAND_IN = """
import warnings
mode = 0
def is_initialized(): return True
def get_sync_debug_mode(): return mode
def set_sync_debug_mode(debug_mode):
    global mode
    if not known: warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all")
    known.append(mode := {"default": 0, "warn": 1}[debug_mode])
known = []
def wait():
    if mode: warnings.warn("called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:150.)")
"""
PROGRAM = """
import json, sys, warnings
import deep500_timing
from pathlib import Path
log = deep500_timing.autolog("run", quiet=True)
{train}
from deep500_timing.runs import feeders
next(one.__self__ for one in feeders if one.__name__ == "pending_ns").on_device = True  # as with a model on a GPU
stand_in = {{"__name__": "torch.cuda.stand_in"}}
exec({stand_in!r}, stand_in)
for name in ("is_initialized", "get_sync_debug_mode", "set_sync_debug_mode"):
    setattr(torch.cuda, name, stand_in[name])
wait = stand_in["wait"]
Path("train.py").write_text('''
def step(net, optimizer, x, y, wait):
    loss = torch.nn.functional.cross_entropy(net(x), y)
    loss.backward()
    wait()
    wait(); wait()
    warnings.warn("of the program")
    optimizer.step()
''')
space = dict(torch=torch, warnings=warnings, __name__="train")
exec(compile(Path("train.py").read_text(), "train.py", "exec"), space)
shown = []
warnings.showwarning = show = lambda message, *more, **named: shown.append(str(message))
before = [*warnings.filters]
for _ in range(21):
    for x, y in loader:
        space["step"](net, optimizer, x, y, wait)
net.eval(); wait()
same = warnings.filters == before and warnings.showwarning is show and stand_in["mode"] == 0
log.close()
print(json.dumps([same, shown, len(stand_in["known"])]))
"""


def test_lines_are_counted_in_a_few_steps(forks, tmp_path):
    """Counts by line are exact in the sampled steps; the program's filters, warnings and mode stay."""
    from deep500_timing.runs import Run

    program = f"import os\nos.chdir({str(tmp_path)!r})\n" + PROGRAM.format(train=TRAIN, stand_in=STAND_IN)
    same, shown, switched = json.loads(forks.printed(program, tmp_path / "output"))
    assert same
    assert shown == ["of the program"]  # once, as without the timing
    assert switched == 14
    with Run.open(tmp_path / "run") as run:
        rows = run.sql(
            "select line, expression, function, sum(count)::int as n, count(*) as steps from sync_lines group by all "
            "order by n"
        ).rows()
    assert [tuple(row.values()) for row in rows] == [
        (None, None, None, 0, 7),
        ("train.py:5", "wait()", "step", 7, 7),
        ("train.py:6", "wait(); wait()", "step", 14, 7),
    ]


def test_the_stand_in_is_like_pytorch():
    """Its functions take what PyTorch's take."""
    space = {}
    exec(STAND_IN, space)
    for name in ("is_initialized", "get_sync_debug_mode", "set_sync_debug_mode"):
        ours, theirs = (inspect.signature(one).parameters for one in (space[name], getattr(torch.cuda, name)))
        assert list(ours) == list(theirs), name
    assert {"default", "warn"} <= set(inspect.getsource(torch.cuda.set_sync_debug_mode).split('"'))


DDP = """
import os
os.environ["DEEP500_TIMING_COMM_KERNEL"] = "off"
import deep500_timing
log = deep500_timing.autolog({folder!r}, quiet=True)
{train}
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
net = torch.nn.parallel.DistributedDataParallel(net)
sample = net._get_ddp_logging_data
net._get_ddp_logging_data = {read}
steps(6)
log.close()
dist.destroy_process_group()
"""


def kept(forks, folder, read):
    """What a run has of them; None without the table."""
    from deep500_timing.runs import Run

    program = DDP.format(train=TRAIN, folder=str(folder / "run"), read=read)
    forks.printed(program, folder / "output")
    with Run.open(folder / "run") as run:
        if "ddp_samples" not in run.tables:
            return None
        rows = run.sql("select communication_ns, hidden_ns from ddp_samples order by time").rows()
        return [tuple(row.values()) for row in rows]


def test_the_samples_of_ddp_are_kept(forks, tmp_path):
    """Each that PyTorch has taken by the tenth step, once: it takes one in the next step's call of the model."""
    rows = kept(forks, tmp_path, "sample")
    assert 9 == len(rows) == len(set(rows))
    assert all(0 <= hidden <= communication for communication, hidden in rows)


@pytest.mark.parametrize(("models", "expected"), [("twins", 2), ("one, then another", 1)])
def test_the_samples_of_several_models(models, expected):
    """Those of one step are one sample; a model of an earlier training has none in it."""
    rows, read, told = [], [0], []
    run = SimpleNamespace(declare=lambda *_, **__: None, add=lambda _, row: rows.append(row[1:]))
    loops = SimpleNamespace(when_stepped=[], timer=SimpleNamespace(run=run, now_ns=lambda: 1))
    patches = SimpleNamespace(put_after=lambda *given: told.append(given[-1]), sees_buckets=False)

    class Model:
        def __init__(self):
            self.moves = True

        def _get_ddp_logging_data(self):
            self.last = read[0] if self.moves else self.last
            return {"iteration": self.last, "backward_comm_time": 5, "backward_compute_comm_overlap_time": 2}

    from deep500_timing_torch._autolog._ddp import DdpSamples

    samples, made = DdpSamples(loops, patches), [Model(), Model()]
    told[0](None, 0, made[0])
    if models != "twins":
        read[0] += 1
        loops.when_stepped[0](1)
        made[0].moves = False
    told[0](None, 0, made[1])
    for _ in range(3):
        read[0] += 1
        loops.when_stepped[0](1)
    assert [(5 * expected, 2 * expected)] * 3 == rows[-3:]
    samples.undo()
    assert [] == loops.when_stepped


@pytest.mark.parametrize("read", ["lambda: 1 / 0", "dict", "lambda: {'iteration': 3}"])
def test_samples_that_cannot_be_read(read, forks, tmp_path):
    """They are missing, and the program goes on."""
    assert kept(forks, tmp_path, read) is None
