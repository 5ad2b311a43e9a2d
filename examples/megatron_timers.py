"""A training loop written for Megatron's named timers: only the import is another.

    python examples/megatron_timers.py
    torchrun --nproc-per-node 2 examples/megatron_timers.py

Before, the import read ``from megatron.core.timers import Timers``. What changes with it: no start and no stop
synchronizes the GPU, there need not be one, and a report across ranks does not hang when one of them has timed other
regions than the rest.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from deep500_timing_torch.megatron import Timers

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "0")
rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=world_size)
device = "cuda" if cuda else "cpu"

LOG_INTERVAL, ITERATIONS = 4, 8


class Writer:
    """Stands for TensorBoard's SummaryWriter."""

    def add_scalar(self, name, value, iteration):
        """Show one value."""
        print(f"iteration {iteration}: {name} = {value * 1000:.3f} ms")


torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.CrossEntropyLoss()
writer = Writer() if rank == world_size - 1 else None

timers = Timers(log_level=1, log_option="minmax")
timers("interval-time", log_level=0).start(barrier=True)
for iteration in range(1, ITERATIONS + 1):
    timers("batch-generator", log_level=1).start()
    inputs = torch.randn(32, 64, device=device)
    labels = torch.randint(0, 10, (32,), device=device)
    timers("batch-generator").stop()

    timers("forward-backward", log_level=1).start(barrier=False)
    timers("forward-compute", log_level=2).start()  # above the group's level: not timed
    loss = criterion(model(inputs), labels)
    timers("forward-compute").stop()
    loss.backward()
    timers("forward-backward").stop()

    timers("optimizer", log_level=1).start()
    optimizer.step()
    optimizer.zero_grad()
    timers("optimizer").stop()

    if iteration % LOG_INTERVAL == 0:
        elapsed_s = timers("interval-time").elapsed(barrier=True)
        if rank == world_size - 1:
            print(f"iteration {iteration}: {elapsed_s / LOG_INTERVAL * 1000:.3f} ms per iteration")
        names = ["batch-generator", "forward-backward", "forward-compute", "optimizer"]
        timers.write(names, writer, iteration, normalizer=LOG_INTERVAL, reset=False)
        timers.log(names, normalizer=LOG_INTERVAL)

dist.destroy_process_group()
