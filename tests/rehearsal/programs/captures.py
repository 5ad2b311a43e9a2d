"""Regions and collectives inside a CUDA graph, each the first use of its clock: ``captures.py regions|collectives``."""

from __future__ import annotations

import json
import sys
import warnings

import torch
import torch.distributed as dist

import deep500_timing_torch as timer
from deep500_timing_torch import comm

said: list[str] = []
warnings.showwarning = lambda message, kind, *rest, **more: said.append(f"{kind.__name__}: {message}")


def regions():
    """A timer of a numbered device with a first region in a capture."""
    x = torch.ones(8, device="cuda")
    torch.cuda.synchronize()
    tmr = timer.CPUGPUTimer("cuda:0")
    with torch.cuda.graph(torch.cuda.CUDAGraph()), tmr.region("in", gpu=True):
        x.add_(1)
    for _ in range(3):
        with tmr.region("after", gpu=True):
            x.add_(1)
    torch.cuda.synchronize()
    tmr.complete_all()
    found = {}
    for key in ("in", "after"):
        times = tmr.snapshot().get(key, "GPU")
        count = 0 if times.stats is None else times.stats.count
        found[key] = {"count": count, "captured": times.captured, "pending": times.pending, "failed": times.failed}
    return found


def collectives():
    """Two collectives in a capture, then some outside of it."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    data, graph = torch.ones(1 << 24, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    comm.reset_log()
    with torch.cuda.graph(graph):
        comm.all_reduce(data)
        comm.all_reduce(data, async_op=True).wait()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(3):
        comm.all_reduce(data)
        comm.all_reduce(data, async_op=True).wait()
    torch.cuda.synchronize()
    op = comm.summary(wait=True).find("all_reduce")
    dist.destroy_process_group()
    return {
        "count": op.count, "captured": op.captured, "pending": op.pending, "failed": op.failed, "untimed": op.untimed,
        "mean_ms": op.mean_s * 1e3,
    }  # fmt: skip


found = {"regions": regions, "collectives": collectives}[sys.argv[1]]()
print(json.dumps(found | {"said": said}))
