"""A small GPT on torch.cuda with regions, layers, checkpointing, autocast and snapshots from another thread."""

# ruff: noqa: D102, D103

from __future__ import annotations

import json
import threading
import warnings

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import deep500_timing_torch as timer
from deep500_timing_torch.layers import LayerTimer

said: list[str] = []
warnings.showwarning = lambda message, kind, *rest, **more: said.append(f"{kind.__name__}: {message}")


class Block(nn.Module):
    def __init__(self, width=256, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = (query @ key.transpose(-2, -1)).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, blocks=6, width=256, checkpointed=False):
        super().__init__()
        self.embed, self.head = nn.Embedding(512, width), nn.Linear(width, 512)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.checkpointed = checkpointed

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def run(how, *, checkpointed=False, steps=6):
    with torch.device("cuda"):
        model, tokens = GPT(checkpointed=checkpointed), torch.zeros(2, 64, dtype=torch.long)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tmr = timer.CPUGPUTimer()
    layers = None
    if how == "layers":
        layers = LayerTimer(model, timer=tmr)
        layers.attach()
    stop = threading.Event()

    def watch():
        while not stop.wait(0.005):
            tmr.snapshot()

    thread = threading.Thread(target=watch)
    if how == "snapshots":
        thread.start()
    for _ in range(steps):
        with tmr.region(timer.TimeType.BATCH, gpu=True):
            with tmr.region(timer.TimeType.FORWARD, gpu=True), torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens).float().mean()
            with tmr.region(timer.TimeType.BACKWARD, gpu=True):
                loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    stop.set()
    if how == "snapshots":
        thread.join()
    tmr.complete_all()
    batch = tmr.snapshot().get(timer.TimeType.BATCH, "GPU")
    found = {
        "count": batch.stats.count, "pending": batch.pending, "failed": batch.failed, "captured": batch.captured,
        "events": tmr.device.events,
    }  # fmt: skip
    if layers is not None:
        times = layers.times()
        found |= {"layers": len(times.layers), "faults": times.faults, "untimed": times.untimed}
    return found


high = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # the program's peak of memory, before training
peak = torch.cuda.max_memory_allocated()
del high
result = {how: run(how) for how in ("regions", "snapshots", "layers")}
result["checkpointed"] = run("layers", checkpointed=True)
print(json.dumps(result | {"said": said, "peak_stays": torch.cuda.max_memory_allocated() == peak}))
