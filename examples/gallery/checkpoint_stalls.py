"""Training waits while a checkpoint is written to slow storage.

Fixed: the state is copied, and a thread writes the copy.
"""

import copy
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch

FIXED = "--fixed" in sys.argv
FOLDER = Path(tempfile.mkdtemp())


class SlowFile:
    """A file on storage that takes 0.3 s for a checkpoint."""

    def __init__(self, path):
        """Open the file."""
        self.file = path.open("wb")

    def write(self, data):
        """Write a part."""
        return self.file.write(data)

    def flush(self):
        """Wait for the storage."""
        self.file.flush()
        time.sleep(0.3)


def save(state, step):
    """Write a checkpoint."""
    torch.save(state, SlowFile(FOLDER / f"{step}.pt"))


class Model(torch.nn.Linear):
    """Stands for a larger model."""

    def forward(self, x):
        """The layer's output, 5 ms later."""
        time.sleep(0.005)
        return super().forward(x)


torch.set_num_threads(1)
model = Model(256, 512)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(200):
    model(torch.randn(64, 256)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 24 and FIXED:
        threading.Thread(target=save, args=(copy.deepcopy(model.state_dict()), step)).start()
    elif step % 25 == 24:
        save(model.state_dict(), step)
