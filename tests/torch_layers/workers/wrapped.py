"""One of two ranks: trains a model in DDP and in FSDP2, timed and not, and writes its results."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deep500_timing_torch import CPUGPUTimer
from deep500_timing_torch.layers import LayerTimer

STEPS = 3


def make_model():
    """The same on each rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 16)), nn.Linear(16, 4))


def shard(model, mesh):
    """Each layer with its own parameters, and the rest."""
    for layer in (model[0], model[1], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model, timed=None):
    """The weights after three steps, as one list of numbers, and the counts of regions if it is timed."""
    timer = CPUGPUTimer("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layers = None if timed is None else LayerTimer(timed, timer, gpu=False).attach()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()
    found = {}
    if layers is not None:
        layers.detach()
        found = {region.name: region.stats.count for region in timer.snapshot()}
        found["faults and untimed"] = layers.faults + layers.untimed
        found["not ended"] = sum(region.running + region.failed for region in timer.snapshot())
    weights = [getattr(one, "full_tensor", lambda one=one: one)().detach().flatten() for one in model.parameters()]
    return torch.cat(weights).tolist(), found


def main():
    """Run, and write ``RANK.json``."""
    folder, rank = sys.argv[1], int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=40)
    )
    mesh = init_device_mesh("cpu", (2,))
    ddp, fsdp = DistributedDataParallel(make_model()), shard(make_model(), mesh)
    inner = make_model()
    results = {
        "ddp": [train(DistributedDataParallel(make_model())), train(ddp, ddp)],
        "ddp, the model within": [
            train(DistributedDataParallel(make_model())),
            train(DistributedDataParallel(inner), inner),
        ],
        "fsdp": [train(shard(make_model(), mesh)), train(fsdp, fsdp)],
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
