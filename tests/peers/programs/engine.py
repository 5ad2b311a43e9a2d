"""Trains a DeepSpeed engine of one process on the CPU with our timers instead of its own; prints the findings.

The clock moves only in the forward pass, the backward pass and the optimizer, by known times.
"""

# ruff: noqa: E402 (DeepSpeed looks for MLflow)

from __future__ import annotations

import json
import sys

# Its tuner would import MLflow, and with that pandas and polars: three seconds that have no part in this.
sys.modules["mlflow"] = None

import deepspeed
import torch

from deep500_timing.testing import ManualClock
from deep500_timing_deepspeed.wallclock import SynchronizedWallClockTimer, ThroughputTimer, time_engine

FORWARD_S, BACKWARD_S, STEP_S = 0.010, 0.020, 0.040
clock = ManualClock()


class Work(torch.autograd.Function):
    """Takes a known time forward and another backward."""

    @staticmethod
    def forward(ctx, inputs):
        """Work."""
        clock.advance(FORWARD_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        """Work."""
        clock.advance(BACKWARD_S)
        return gradient


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 4)

    def forward(self, inputs):
        """Work, then a layer."""
        return self.linear(Work.apply(inputs))


class Optimizer(torch.optim.SGD):
    def step(self, closure=None):
        """Work, then update."""
        clock.advance(STEP_S)
        return super().step(closure)


# Else it compiles an operator for inference, which takes two minutes and has no part in this.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
model = Model()
engine, *_ = deepspeed.initialize(
    model=model,
    optimizer=Optimizer(model.parameters(), lr=0.1),
    config={
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "wall_clock_breakdown": True,
        "memory_breakdown": False,
        "zero_allow_untested_optimizer": True,
    },
)
lines: list[str] = []
timers = time_engine(engine, SynchronizedWallClockTimer(clock=clock, device="cpu", logging_fn=lines.append))
engine.tput_timer = ThroughputTimer(8, 0, clock=clock, device="cpu", logging_fn=lines.append)
caches = []
for _ in range(6):
    inputs = torch.randn(4, 8, requires_grad=True)
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    caches.append(engine.get_wall_clock_timers())
json.dump(
    {
        "lines": lines,
        "caches": caches,
        "rate": engine.tput_timer.avg_samples_per_sec(),
        "steps": engine.tput_timer.global_step_count,
        "regions": {region.name: region.stats.count for region in timers.timer.snapshot()},
    },
    sys.stdout,
)
