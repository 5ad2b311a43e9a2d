"""CUDA calls of 2 000 regions, events and memory of many, counted below PyTorch: ``regions.py COUNT [DEVICE]``."""

from __future__ import annotations

import ctypes
import json
import sys

import torch

import deep500_timing_torch as timer

fake = ctypes.CDLL(None)
fake.fake_count.restype = ctypes.c_long
CALLS = ["cudaEventRecordWithFlags", "cudaEventQuery", "cudaEventElapsedTime", "cudaStreamIsCapturing"]
WAITS = ["cudaEventSynchronize", "cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaSetDevice"]
device = sys.argv[2] if len(sys.argv) > 2 else None
tmr = timer.CPUGPUTimer(device, keep_last=100)
torch.zeros(1, device=device or "cuda")
for _ in range(200):
    with tmr.region("warm", gpu=True):
        pass
torch.cuda.synchronize(device)
tmr.snapshot()
fake.fake_counts_reset()
for _ in range(2000):
    with tmr.region("region", gpu=True):
        pass
calls, waits = ({name: fake.fake_count(name.encode()) for name in names} for names in (CALLS, WAITS))
for _ in range(int(sys.argv[1])):
    with tmr.region("many", gpu=True):
        pass
times = tmr.snapshot().get("region", "GPU")
result = {
    "waits": waits,
    "calls": {name: count / 2000 for name, count in calls.items()},
    "counted": times.stats.count + times.pending,
    "events": tmr.device.events,
    "contexts": fake.fake_contexts(),
    "current": torch.cuda.current_device(),
}
print(json.dumps(result))
