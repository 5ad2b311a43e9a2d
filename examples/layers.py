"""Where the time of a model goes, layer by layer: a small vision transformer on the digits.

    python examples/layers.py

Prints the table of one epoch's layers, and writes a profile by blocks (trace, pictures, tables) into
`demo-output/layers`.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from deep500_timing_torch.layers import LayerTimer, ProfilerWrapper

torch.manual_seed(0)
digits = load_digits()
# Each image is 16 patches of 2 x 2 pixels.
images = torch.tensor(digits.images, dtype=torch.float32).div(16)
patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
labels = torch.tensor(digits.target)


class Block(nn.Module):
    """Attention, then a small network."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        """Attend and mix, around each a residual connection."""
        y = self.norm(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(y), self.k(y), self.v(y)))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ViT(nn.Module):
    """Patches, blocks, a head."""

    def __init__(self, width=64, depth=6):
        super().__init__()
        self.embed = nn.Linear(4, width)
        self.place = nn.Parameter(torch.zeros(16, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """The logits of each image."""
        x = self.embed(x) + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(batch):
    loss = nn.functional.cross_entropy(model(patches[batch]), labels[batch])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


batches = torch.randperm(len(labels)).split(128)
step(batches[0])  # the first step allocates, and is slower

layers = LayerTimer(model)
layers.count_flops(step, batches[0])
with layers:
    for batch in batches:
        loss = step(batch)
print(layers.table())
print(f"loss {loss:.3f}")

with ProfilerWrapper(model=model, log_dir="demo-output/layers") as profiler:
    profiler.record_function("step", step, batches[0])
print("\n".join(str(path) for path in profiler.files))
