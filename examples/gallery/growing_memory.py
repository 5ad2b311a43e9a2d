"""A list keeps the losses as tensors, and each holds its graph in memory.

Fixed: the list keeps numbers.
"""

import sys
import time

import torch

FIXED = "--fixed" in sys.argv


class Model(torch.nn.Linear):
    """Stands for a larger model."""

    def forward(self, x):
        """The layer's output, 30 ms later."""
        time.sleep(0.03)
        return super().forward(x)


torch.set_num_threads(1)
model = Model(256, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
losses = []
for _ in range(900):
    output = model(torch.randn(128, 256))
    loss = output.square().mean() + output.abs().mean()
    loss.backward(retain_graph=not FIXED)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item() if FIXED else loss)
