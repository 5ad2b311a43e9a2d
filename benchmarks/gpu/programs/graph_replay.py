"""A training step captured once as a CUDA graph and replayed."""

import json
import time

import torch
from torch import nn

model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(16))).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
static = torch.randn(64, 512, device="cuda")


def step() -> None:
    optimizer.zero_grad(set_to_none=True)
    model(static).square().mean().backward()
    optimizer.step()


side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    for _ in range(3):
        step()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
optimizer.zero_grad(set_to_none=True)
with torch.cuda.graph(graph):
    step()
taken = []
for _ in range(200):
    began = time.perf_counter()
    static.copy_(torch.randn(64, 512))
    graph.replay()
    torch.cuda.synchronize()
    taken.append(time.perf_counter() - began)
print(json.dumps({"steps": 200, "step_ms": sorted(taken)[100] * 1e3}))
