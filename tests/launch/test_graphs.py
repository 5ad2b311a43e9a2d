"""Captured graphs under ``autolog``, by a stand-in for PyTorch's class: no GPU is needed."""

from __future__ import annotations

import inspect

import pytest
from suite_autolog import TRAIN, regions_of

torch = pytest.importorskip("torch", reason="times PyTorch")
pytestmark = pytest.mark.slow

STAND_IN = """
class CUDAGraph:
    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False): pass
    def capture_end(self): pass
    def replay(self): replays.append(self)
replays = []
"""
PROGRAM = """
import os; os.chdir({folder!r})
import torch
{stand_in}
torch.cuda.CUDAGraph = CUDAGraph
import deep500_timing
log = deep500_timing.autolog("run", quiet=True)
{train}
x, y = next(iter(loader))
def step():
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
for _ in range(3): step()
graph, inference = CUDAGraph(), CUDAGraph()
graph.capture_begin()
step()
graph.capture_end()
with torch.no_grad():
    inference.capture_begin()
    net(x)
    inference.capture_end()
for _ in range(200):
    x.copy_(torch.randn_like(x))
    inference.replay()
    graph.replay()
log.close()
print(len(replays), torch.cuda.CUDAGraph.replay is CUDAGraph.replay, CUDAGraph.replay.__name__)
"""


def test_replays_are_steps(forks, tmp_path):
    """Three steps to warm up, a capture that is none, and 200 replays; a graph without a step is not timed."""
    program = PROGRAM.format(folder=str(tmp_path), stand_in=STAND_IN, train=TRAIN)
    assert "400 True replay\n" == forks.printed(program, tmp_path / "output")
    found = regions_of(tmp_path / "run")
    assert {"BATCH": 203, "graph replay": 200, "optimizer": 3, "BACKWARD": 3} == {
        name: found[name] for name in ("BATCH", "graph replay", "optimizer", "BACKWARD")
    }


def test_the_stand_in_is_like_pytorch():
    """Its methods take what PyTorch's take."""
    space = {}
    exec(STAND_IN, space)
    for name in ("capture_begin", "capture_end", "replay"):
        ours, theirs = (
            inspect.signature(getattr(one, name)).parameters for one in (space["CUDAGraph"], torch.cuda.CUDAGraph)
        )
        assert list(ours) == list(theirs), name
