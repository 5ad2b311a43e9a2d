"""Regions inside activation checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from deep500_timing_torch import CPUGPUTimer


class Block(torch.nn.Module):
    """A layer with a forward pass that is timed in one of the ways."""

    def __init__(self, tmr, way):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.tmr, self.way = tmr, way
        self.work = tmr.timed("block")(lambda x: torch.tanh(self.layer(x)))

    def forward(self, x):
        """Time the layer."""
        if self.way == "timed":
            return self.work(x)
        if self.way == "with":
            with self.tmr.region("block"):
                return torch.tanh(self.layer(x))
        self.tmr.start("block")
        y = torch.tanh(self.layer(x))
        self.tmr.end("block")
        return y


@pytest.mark.parametrize("way", ["start/end", "with", "timed"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
def test_a_recomputation_is_counted_as_one(way, reentrant, early_stop):
    """Each forward pass is timed once; its recomputation, stopped early or not, ends nothing and fails nothing."""
    tmr = CPUGPUTimer()
    block = Block(tmr, way)
    with set_checkpoint_early_stop(early_stop):
        for _ in range(3):
            tmr.start("backward")
            checkpoint(block, torch.randn(2, 4, requires_grad=True), use_reentrant=reentrant).sum().backward()
            tmr.end("backward")
    times = tmr.snapshot().get("block")
    counted = times.stats.count, times.recomputed, times.failed, times.discarded, times.running
    assert (3, 3, 0, 0, 0) == counted
    assert 3 == tmr.get_time_stats("backward").count
    assert block.layer.weight.grad is not None


def test_gradients_are_those_without_the_timer():
    """The recomputation gives the same result."""
    torch.manual_seed(0)
    block, x = Block(CPUGPUTimer(), "with"), torch.randn(2, 4)
    block(x).sum().backward()
    expected = block.layer.weight.grad.clone()
    for reentrant in (False, True):
        block.zero_grad()
        checkpoint(block, x.clone().requires_grad_(), use_reentrant=reentrant).sum().backward()
        assert torch.equal(expected, block.layer.weight.grad)
