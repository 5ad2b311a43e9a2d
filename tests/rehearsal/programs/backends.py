"""The facts that the timing of NCCL relies on, for each way of naming backends, and the flight recorder's ring."""

from __future__ import annotations

import json
import pickle
import time

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

result = {"durations": {}}
for backend in ("nccl", "cpu:gloo,cuda:nccl", None):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.GroupMember.WORLD
    group._enable_collectives_timing()
    x = torch.ones(1 << 20, device="cuda")
    for _ in range(3):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
    torch.cuda.synchronize()
    result["durations"][str(backend)] = work._get_duration()
    result["on_backend"] = hasattr(group._get_backend(torch.device("cuda:0")), "_enable_collectives_timing")
    if backend == "nccl":
        for _ in range(3000):
            dist.all_reduce(x, async_op=True).wait()
        torch.cuda.synchronize()
        time.sleep(1)  # until the watchdog has retired the last ones
        begin = time.perf_counter()
        entries = pickle.loads(c10d._dump_nccl_trace(True, False, False))["entries"]
        result["dump_ms"] = (time.perf_counter() - begin) * 1e3
        result["entries"] = len(entries)
        result["timed"] = sum(entry.get("duration_ms") is not None for entry in entries)
        result["newest"] = entries[-1]["collective_seq_id"]
    dist.destroy_process_group()
print(json.dumps(result))
