"""A loop that waits for the device in each step: `loss.item()` after kernels of some milliseconds."""

import json
import time

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
width = 8192 if device == "cuda" else 256
model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
data = torch.randn(2048 if device == "cuda" else 64, width, device=device)
taken = []
for _ in range(60):
    began = time.perf_counter()
    optimizer.zero_grad()
    loss = model(data).square().mean()
    loss.backward()
    optimizer.step()
    loss.item()
    taken.append(time.perf_counter() - began)
print(json.dumps({"steps": 60, "step_ms": sorted(taken)[30] * 1e3}))
