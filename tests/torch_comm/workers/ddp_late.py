"""Four gloo ranks train with DDP, with a delay on rank 2: in the loader, forward, backward, optimizer in turn.

Each place has its own run, in a folder of its name below LATE_RUNS. The ranks share one clock, which stands still while
they compute: rank 2 moves it once the others wait for it.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from deep500_timing_torch import CPUGPUTimer, TimeType
from deep500_timing_torch import comm as dist
from deep500_timing_torch.comm import _log
from deep500_timing_torch.comm._settings import SETTINGS

STEPS, DELAY_NS = 56, 40_000_000
LATE = 2
PLACES = ("IO", "FORWARD", "BACKWARD", "optimizer")

folder = Path(sys.argv[1])
runs = Path(os.environ["LATE_RUNS"])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
random = np.random.default_rng(rank)
if rank == 0:
    (folder / "shared").write_bytes(bytes(8 * (1 + ranks)))
dist.barrier()
with (folder / "shared").open("r+b") as file:
    shared = np.frombuffer(mmap.mmap(file.fileno(), 0), np.int64)
"""The time in nanoseconds, then the number of messages that each rank has begun to send."""


class Shared:
    """The clock of all ranks. Each reading takes a rank a microsecond, so that none has the time of another."""

    reads = 0

    def now_ns(self):
        """The time."""
        self.reads += 1
        return 1_000_000_000 + int(shared[0]) + 1000 * self.reads


clock = Shared()
SETTINGS.now_ns = clock.now_ns
# Operations go into a run of the system's clock, which this one stands for.
_log.current = lambda: tmr.run
tmr = CPUGPUTimer()


class Counted(torch.nn.parallel.DistributedDataParallel):
    """DDP that counts the messages that it has begun to send."""

    def register_comm_hook(self, state, hook):
        """Count after each call of the hook."""

        def counted(state, bucket):
            future = hook(state, bucket)
            shared[1 + rank] += 1
            return future

        super().register_comm_hook(state, counted)


class Slow(torch.autograd.Function):
    """Nothing forward; backward is late in its place."""

    @staticmethod
    def forward(ctx, values, place):
        """Its input."""
        ctx.place = place
        return values.view_as(values)

    @staticmethod
    def backward(ctx, gradient):
        """The gradient, late."""
        delay("BACKWARD", ctx.place)
        return gradient, None


def delay(here, place):
    """Move the clock if rank 2 is slow here, once the others have begun to send their message."""
    if rank == LATE and here == place:
        sent = shared[1 + LATE]
        # DDP arranges its buckets again before the second step's message, which all ranks do together.
        while first + 2 <= sent < first + STEPS and (np.delete(shared[1:], LATE) <= sent).any():
            time.sleep(0.0005)
        shared[0] += DELAY_NS + int(random.normal(0, DELAY_NS / 20))


class Model(torch.nn.Module):
    """Two layers, with a place to be slow in on the way back."""

    def __init__(self, place):
        super().__init__()
        self.place = place
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 4)

    def forward(self, values):
        """Both layers."""
        return self.second(Slow.apply(self.first(values), self.place))


def batches(place):
    """A loader's batches."""
    for _ in range(STEPS):
        delay("IO", place)
        yield torch.ones(8, 16)


for run, place in enumerate(PLACES):
    first = STEPS * run
    model = Counted(Model(place))
    dist.instrument_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    tmr = CPUGPUTimer(run=runs / place, clock=clock)
    for batch in tmr.iterate(batches(place), TimeType.IO):
        with tmr.region(TimeType.BATCH):
            with tmr.region(TimeType.FORWARD):
                delay("FORWARD", place)
                loss = model(batch).square().mean()
            with tmr.region(TimeType.BACKWARD):
                loss.backward()
            with tmr.region("optimizer"):
                delay("optimizer", place)
                optimizer.step()
                optimizer.zero_grad()
    dist.barrier()
    tmr.run.close()
(folder / f"{rank}.json").write_text("{}")
dist.destroy_process_group()
