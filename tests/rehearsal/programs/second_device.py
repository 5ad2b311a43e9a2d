"""Collectives on the second of two devices while the first is current: ``second_device.py auto|stream_events``."""

from __future__ import annotations

import ctypes
import json
import sys
import warnings

import torch
import torch.distributed as dist

from deep500_timing_torch import comm

said: list[str] = []
warnings.showwarning = lambda message, kind, *rest, **more: said.append(f"{kind.__name__}: {message}")
device = torch.device("cuda:1")
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
comm.configure(device_times=sys.argv[1])
tensor = torch.ones(1 << 26, device=device)
for _ in range(3):
    comm.all_reduce(tensor)
    comm.all_reduce(tensor, async_op=True).wait()
torch.cuda.synchronize(device)
op = comm.summary(wait=True).find("all_reduce")
contexts = ctypes.CDLL(None).fake_contexts()
print(json.dumps({"count": op.count, "mean_ms": op.mean_s * 1e3, "contexts": contexts, "said": said,
                  "current": torch.cuda.current_device()}))  # fmt: skip
dist.destroy_process_group()
