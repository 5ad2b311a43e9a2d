"""Every operation on NCCL, blocking and asynchronous, on two ranks: ``all_ops.py functions|kernel``."""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
comm.instrument(kernel=sys.argv[1] == "kernel")
COUNT = 1 << 24  # 64 MiB, 0.68 ms on the link
one, other = torch.ones(COUNT, device="cuda"), torch.ones(COUNT, device="cuda")
both, parts = torch.ones(2 * COUNT, device="cuda"), [torch.ones(COUNT, device="cuda") for _ in range(size)]
outs = [torch.ones(COUNT, device="cuda") for _ in range(size)]
next_rank, last_rank = (rank + 1) % size, (rank - 1) % size
calls = {
    "all_reduce": lambda **how: dist.all_reduce(one, **how),
    "reduce": lambda **how: dist.reduce(one, 0, **how),
    "broadcast": lambda **how: dist.broadcast(one, 0, **how),
    "all_gather": lambda **how: dist.all_gather(parts, one, **how),
    "all_gather_into_tensor": lambda **how: dist.all_gather_into_tensor(both, one, **how),
    "reduce_scatter": lambda **how: dist.reduce_scatter(one, parts, **how),
    "reduce_scatter_tensor": lambda **how: dist.reduce_scatter_tensor(one, both, **how),
    "all_to_all_single": lambda **how: dist.all_to_all_single(both, torch.ones_like(both), **how),
    "all_to_all": lambda **how: dist.all_to_all(outs, parts, **how),
    "gather": lambda **how: dist.gather(one, parts if rank == 0 else None, **how),
    "scatter": lambda **how: dist.scatter(one, parts if rank == 0 else None, **how),
    "barrier": lambda **how: dist.barrier(**how),
}
calls["send, recv"] = lambda **how: (dist.send(one, next_rank), dist.recv(other, last_rank))
calls["isend, irecv"] = lambda **how: [
    work.wait() for work in (dist.isend(one, next_rank), dist.irecv(other, last_rank))
]
second = dist.new_group([0, 1])
calls["a second group"] = lambda **how: dist.all_reduce(one, group=second, **how)
dist.all_reduce(one)
torch.cuda.synchronize()
comm.reset_log()
result = {}
for name, call in calls.items():
    for _ in range(3):
        call()
        work = call(async_op=True)
        if isinstance(work, dist.Work):
            work.wait()
    torch.cuda.synchronize()
    result[name] = {
        op.op: [op.count, op.untimed, op.pending + op.failed, op.busbw_gb_per_s] for op in comm.summary(wait=True).ops
    }
    comm.reset_log()
print(json.dumps(result))
dist.destroy_process_group()
