"""Every path of communication on ProcessGroupNCCL: ``nccl_paths.py functions|kernel|import``; prints the counts."""

# ruff: noqa: D102, D103

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
how = sys.argv[1]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
if how != "import":
    comm.instrument(kernel=how == "kernel")
d = comm if how == "import" else dist
GIB = torch.ones(1 << 28, device="cuda")  # 10.75 ms on the fake link
result = {}


def note(name):
    torch.cuda.synchronize()
    found = comm.summary(wait=True)
    result[name] = [
        {
            "op": op.op, "bytes": op.message_bytes, "count": op.count, "pending": op.pending, "failed": op.failed,
            "untimed": op.untimed, "captured": op.captured, "bound": op.upper_bound, "overlap": op.overlap,
            "mean_ms": None if op.mean_s is None else op.mean_s * 1e3,
            "exposed_ms": None if op.exposed_s is None else op.exposed_s * 1e3, "algbw": op.algbw_gb_per_s,
        }
        for op in found.ops
    ]  # fmt: skip
    result["device_times"] = found.device_times or result.get("device_times")
    comm.reset_log()


dist.all_reduce(GIB)
torch.cuda.synchronize()
comm.reset_log()

works = [d.all_reduce(GIB, async_op=True) for _ in range(6)]
for work in works:
    work.wait()
note("together")

for _ in range(4):
    work = d.all_reduce(GIB, async_op=True)
    torch.cuda._sleep(int(30e6 * 1.755))
    work.wait()
note("behind 30 ms")

for _ in range(3):
    ops = [d.P2POp(d.isend, GIB, (rank + 1) % size), d.P2POp(d.irecv, GIB, (rank - 1) % size)]
    for work in d.batch_isend_irecv(ops):
        work.wait()
note("batch")

outs = [torch.empty(1 << 20, device="cuda") for _ in range(size)]
for _ in range(3):
    d.all_gather(outs, torch.ones(1 << 20, device="cuda"))
d.all_gather(outs, torch.ones(1 << 20, device="cuda"), async_op=True).wait()
note("all_gather")

uneven = [torch.empty((1 << 20) << other, device="cuda") for other in range(size)]
shard = torch.ones((1 << 20) << rank, device="cuda")
for _ in range(3):
    d.all_gather(uneven, shard)
d.all_gather(uneven, shard, async_op=True).wait()
note("uneven all_gather")

for asynchronous in (False, True):
    with dist._coalescing_manager(async_ops=asynchronous, device=torch.device("cuda:0")) as manager:
        for _ in range(3):
            d.all_reduce(GIB)
    if asynchronous:
        manager.wait()
note("coalesced")

if how == "kernel":
    import torch.distributed._functional_collectives as functional

    for _ in range(3):
        functional.wait_tensor(functional.all_reduce(GIB, "sum", dist.group.WORLD))
    note("functional")


class Net(nn.Module):
    def __init__(self, layers, width=4096):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False, device="cuda") for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


x = torch.randn(8, 4096, device="cuda")
model = nn.parallel.DistributedDataParallel(Net(4), device_ids=[0], bucket_cap_mb=64)
if how == "import":
    comm.instrument_ddp(model)
model(x).sum().backward()  # DDP's first bucket has another size
torch.cuda.synchronize()
comm.summary(wait=True)
comm.reset_log()
for _ in range(3):
    model(x).sum().backward()
note("ddp")

if how != "import":
    from torch.distributed.fsdp import fully_shard

    net = Net(12)
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    for _ in range(2):
        net(x).sum().backward()
    torch.cuda.synchronize()
    comm.summary(wait=True)
    comm.reset_log()
    for _ in range(3):
        net(x).sum().backward()
    note("fsdp")

graph, data = torch.cuda.CUDAGraph(), torch.ones(1 << 20, device="cuda")
with torch.cuda.stream(torch.cuda.Stream()):
    for _ in range(3):
        d.all_reduce(data)
torch.cuda.synchronize()
comm.summary(wait=True)
comm.reset_log()
with torch.cuda.graph(graph):
    d.all_reduce(data)
    d.all_reduce(data, async_op=True).wait()
graph.replay()
torch.cuda.synchronize()
d.all_reduce(data)
note("captured")
print(json.dumps(result))
dist.destroy_process_group()
