"""A small GPT under FSDP2 on two ranks, with regions, layers and the compiled kernel of communication."""

from __future__ import annotations

import json
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import deep500_timing_torch as timer
from deep500_timing_torch import comm
from deep500_timing_torch.layers import LayerTimer

said: list[str] = []
warnings.showwarning = lambda message, kind, *rest, **more: said.append(f"{kind.__name__}: {message}")
rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
comm.instrument(kernel=True)
with torch.device("cuda"):
    block = [nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, dropout=0.0) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(512, 256), *block, nn.Linear(256, 512))
    tokens = torch.zeros(2, 64, dtype=torch.long)
for layer in block:
    fully_shard(layer)
fully_shard(model)
tmr = timer.CPUGPUTimer()
comm.configure(timer=tmr)
layers = LayerTimer(model, timer=tmr)
layers.attach()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(5):
    with tmr.region(timer.TimeType.BATCH, gpu=True):
        with tmr.region(timer.TimeType.FORWARD, gpu=True):
            loss = model(tokens).float().mean()
        with tmr.region(timer.TimeType.BACKWARD, gpu=True):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
torch.cuda.synchronize()
found = comm.summary(wait=True)
tmr.complete_all()
snapshot = tmr.snapshot()
result = {
    "ops": {op.op: [op.count, op.pending, op.failed, op.untimed, op.upper_bound] for op in found.ops},
    "unseen": found.unseen,
    "device_times": found.device_times,
    "regions": {
        str(key.value): [times.stats.count, times.pending, times.failed, times.captured]
        for key in (timer.TimeType.BATCH, timer.TimeType.FORWARD, timer.TimeType.BACKWARD, timer.TimeType.COMM)
        if (times := snapshot.get(key, "GPU")) is not None
    },
    "layers": len(layers.times().layers),
    "said": said,
}
print(json.dumps(result))
dist.destroy_process_group()
