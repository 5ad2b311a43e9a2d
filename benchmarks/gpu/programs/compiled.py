"""A model compiled by Triton, trained by a plain loop."""

import json
import time

import torch
from torch import nn

device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.LayerNorm(1024)) for _ in range(8))).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
model.compile()
data = torch.randn(256, 1024, device=device)
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
