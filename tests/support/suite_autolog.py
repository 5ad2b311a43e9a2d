"""A plain training program of ten steps, and what its run holds."""

from __future__ import annotations

import pytest

TRAIN = """
import sys, os, signal, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0); torch.set_num_threads(1)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
loader = DataLoader(TensorDataset(torch.randn(320, 16), torch.randint(4, (320,))), 32)
def steps(n=1):
    for _ in range(n):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
"""


def regions_of(run):
    """The regions of a run by name, with their numbers."""
    pytest.importorskip("duckdb", reason="reads a run")
    from deep500_timing.runs import Run

    with Run.open(run) as opened:
        rows = opened.intervals().arrow().to_pylist()
    return {name: sum(row["region"] == name for row in rows) for name in {row["region"] for row in rows}}
