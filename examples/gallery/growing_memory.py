"""A list keeps the losses as tensors, and each holds its graph in memory.

Fixed: the list keeps numbers.
"""

import sys
import time

import torch

FIXED = "--fixed" in sys.argv

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(900):
    output = model(torch.randn(128, 256))
    loss = output.square().mean() + output.abs().mean()
    loss.backward(retain_graph=not FIXED)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item() if FIXED else loss)
    time.sleep(0.03)  # stands for a larger model
