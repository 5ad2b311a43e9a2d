"""One of two ranks computes on a slower host.

Fixed: the host is repaired.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

FIXED = "--fixed" in sys.argv


class Slow(torch.nn.Module):
    """A layer that takes 15 ms longer on rank 1."""

    def forward(self, x):
        """Return the input."""
        time.sleep(0.005 if FIXED or os.environ["RANK"] != "1" else 0.02)
        return x


torch.set_num_threads(1)
model = torch.nn.Sequential(Slow(), torch.nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
for _ in range(100):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
