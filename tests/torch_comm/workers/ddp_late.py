"""Four gloo ranks train with DDP, with a delay on rank 2: in the loader, forward, backward, optimizer in turn.

Each place is a run of its own, in a folder of its name below LATE_RUNS. LATE_PLACES names the places, LATE_S the delay.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from deep500_timing_torch import CPUGPUTimer, TimeType
from deep500_timing_torch import comm as dist

STEPS = 56
DELAY_S = float(os.environ["LATE_S"])
LATE = 2

folder = Path(sys.argv[1])
runs = Path(os.environ["LATE_RUNS"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()


class Slow(torch.autograd.Function):
    """Nothing forward; backward takes as long as it is told."""

    @staticmethod
    def forward(ctx, values, delay_s):
        """What it was given."""
        ctx.delay_s = delay_s
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient, late."""
        time.sleep(ctx.delay_s)
        return gradient, None


def delay(place, now):
    """How long rank 2 takes longer in a place."""
    return DELAY_S if (rank, place) == (LATE, now) else 0.0


class Model(torch.nn.Module):
    """Two layers, with a place to be slow in on the way back."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, values):
        """Both layers."""
        return self.second(Slow.apply(self.first(values), delay("BACKWARD", self.place)))


def batches(place):
    """What a loader gives."""
    for _ in range(STEPS):
        time.sleep(delay("IO", place))
        yield torch.ones(8, 16)


for place in os.environ["LATE_PLACES"].split():
    model = torch.nn.parallel.DistributedDataParallel(Model(place))
    dist.instrument_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tmr = CPUGPUTimer(run=runs / place)
    for batch in tmr.iterate(batches(place), TimeType.IO):
        with tmr.region(TimeType.BATCH):
            with tmr.region(TimeType.FORWARD):
                time.sleep(delay("FORWARD", place))
                loss = model(batch).square().mean()
            with tmr.region(TimeType.BACKWARD):
                loss.backward()
            with tmr.region("optimizer"):
                time.sleep(delay("optimizer", place))
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    tmr.run.close()
(folder / f"{rank}.json").write_text("{}")
dist.destroy_process_group()
