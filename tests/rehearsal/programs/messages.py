"""Batches of one message to this rank itself: ``messages.py import|functions|kernel``; true: 2.69 ms each."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
if sys.argv[1] != "import":
    comm.instrument(kernel=sys.argv[1] == "kernel")
d = comm if sys.argv[1] == "import" else dist
sent, received = torch.ones(1 << 26, device="cuda"), torch.ones(1 << 26, device="cuda")
dist.all_reduce(sent)
torch.cuda.synchronize()
result = {}
for count in (1, 3, 6):
    comm.summary(wait=True)
    comm.reset_log()
    for _ in range(count):
        for work in d.batch_isend_irecv([d.P2POp(d.isend, sent, 0), d.P2POp(d.irecv, received, 0)]):
            work.wait()
    torch.cuda.synchronize()
    result[count] = [[op.op, op.count, op.mean_s * 1e3, op.upper_bound] for op in comm.summary(wait=True).ops]
print(json.dumps(result))
dist.destroy_process_group()
