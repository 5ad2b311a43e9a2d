"""A compiled model is compiled again for each new length of the sequence.

Fixed: sequences are padded to one length.
"""

import sys

import torch

FIXED = "--fixed" in sys.argv

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
compiled = torch.compile(model, backend="aot_eager", dynamic=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(120):
    length = 64 if FIXED else 64 - step // 10 % 7
    compiled(torch.randn(8, length, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
