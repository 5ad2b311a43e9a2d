"""Blocking operations of one group on two side streams in turn: ``streams.py functions|kernel``; true: 2.69 ms each."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
comm.instrument(kernel=sys.argv[1] == "kernel")
one, other = torch.ones(1 << 26, device="cuda"), torch.ones(1 << 26, device="cuda")
dist.all_reduce(one)
torch.cuda.synchronize()
comm.summary(wait=True)
comm.reset_log()
first, second = torch.cuda.Stream(), torch.cuda.Stream()
for _ in range(6):  # as FSDP2: gathers on one stream, reductions on another
    with torch.cuda.stream(first):
        dist.all_reduce(one)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        dist.broadcast(other, 0)
    first.wait_stream(second)
torch.cuda.synchronize()
print(json.dumps({op.op: [op.count, op.mean_s * 1e3, op.upper_bound] for op in comm.summary(wait=True).ops}))
dist.destroy_process_group()
