"""The data set reads each sample when it is needed, in the training process.

Fixed: two workers read ahead.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

FIXED = "--fixed" in sys.argv


class Images(Dataset):
    """Samples that take 1 ms to read."""

    def __len__(self):
        """The size of an epoch."""
        return 480

    def __getitem__(self, index):
        """One sample."""
        time.sleep(0.001)
        return torch.randn(256), index % 10


class Model(torch.nn.Linear):
    """Stands for a larger model."""

    def forward(self, x):
        """The layer's output, 12 ms later."""
        time.sleep(0.012)
        return super().forward(x)


if __name__ == "__main__":
    torch.set_num_threads(1)
    workers = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 8} if FIXED else {}
    loader = DataLoader(Images(), batch_size=16, **workers)
    model = Model(256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for images, labels in loader:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
