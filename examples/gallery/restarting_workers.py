"""Workers of the data loader start again in each epoch, and each opens a large index first.

Fixed: ``persistent_workers=True`` keeps them.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

FIXED = "--fixed" in sys.argv


def open_index(_):
    """A worker's set-up."""
    time.sleep(0.5)


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(320, 256), torch.randint(10, (320,)))
    loader = DataLoader(data, batch_size=16, num_workers=1, worker_init_fn=open_index, persistent_workers=FIXED)
    model = torch.nn.Linear(256, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        for images, labels in loader:
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
