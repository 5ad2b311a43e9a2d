"""Peak memory of asynchronous gathers while the host is ahead: ``memory.py untimed|timed``."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
d = comm if sys.argv[1] == "timed" else dist
if sys.argv[1] == "kernel":
    comm.instrument(kernel=True)
shard = torch.ones(1 << 24, device="cuda")  # 64 MiB
dist.all_reduce(shard)
torch.cuda.synchronize()
for _ in range(2):
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(24):
        full = torch.empty_like(shard)
        work = d.all_gather_into_tensor(full, shard, async_op=True)
        work.wait()
        torch.cuda._sleep(int(5e-3 * 1.755e9))
        del work, full
    peak = torch.cuda.max_memory_allocated() - before
    torch.cuda.synchronize()
found = comm.summary(wait=True).find("all_gather_into_tensor")
print(json.dumps({"peak_mib": peak >> 20, "count": 0 if found is None else found.count}))
dist.destroy_process_group()
