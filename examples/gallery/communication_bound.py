"""Two ranks send 16 MB of gradients after each small micro-batch.

Fixed: they send after every eighth micro-batch, with gradients accumulated in between.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 8 if "--fixed" in sys.argv else 1

torch.set_num_threads(1)
model = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
dist.init_process_group("gloo")
model = DistributedDataParallel(model)
for _ in range(60):
    for micro_batch in range(MICRO_BATCHES):
        with contextlib.nullcontext() if micro_batch == MICRO_BATCHES - 1 else model.no_sync():
            model(torch.randn(4, 2048)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
