"""A line waits in each step: the metrics go to a slow disk. On a GPU, ``loss.item()`` waits in the same way.

Fixed: the line runs at every 20th step.
"""

import sys
import time

import torch

FIXED = "--fixed" in sys.argv


def log_metrics(step, loss):
    """Write one line to a disk that takes 8 ms."""
    time.sleep(0.008)
    return f"{step} {loss.item()}"


torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(150):
    loss = model(torch.randn(64, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or not FIXED:
        log_metrics(step, loss)
