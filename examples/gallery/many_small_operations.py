"""The model is a Python loop over small operations. This is the CPU's form of a launch-bound step.

Fixed: the same sum in one operation.
"""

import sys

import torch

FIXED = "--fixed" in sys.argv


class Heads(torch.nn.Module):
    """A weighted sum of 400 features."""

    def __init__(self):
        """Make the weights."""
        super().__init__()
        self.weights = torch.nn.Parameter(torch.randn(400, 64))

    def forward(self, x):
        """The sum, one feature at a time or in one operation."""
        if FIXED:
            return torch.einsum("bhf,hf->b", x, self.weights)
        return sum((x[:, head] * self.weights[head]).sum(1) for head in range(400))


torch.set_num_threads(1)
model = Heads()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(8, 400, 64)
for _ in range(80):
    model(data).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
