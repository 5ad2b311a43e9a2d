"""Time a PyTorch training loop by keys: what a batch consists of, on the CPU and on the GPU if there is one.

Run it with::

    python examples/pytorch_loop.py --epochs 3
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deep500_timing_torch as timer


def train_epoch(
    loader: DataLoader,
    net: nn.Module,
    criterion: nn.Module,
    optimizer: torch.optim.Optimizer,
    tmr: timer.CPUGPUTimer,
    device: torch.device,
) -> None:
    """One pass over the data. A batch's time includes the wait for its data."""
    tmr.start(timer.TimeType.BATCH, gpu=True)
    tmr.start(timer.TimeType.IO)
    for index, (inputs, targets) in enumerate(loader):
        tmr.end(timer.TimeType.IO)
        inputs, targets = inputs.to(device), targets.to(device)

        tmr.start(timer.TimeType.FORWARD, gpu=True)
        loss = criterion(net(inputs), targets)
        tmr.end(timer.TimeType.FORWARD, gpu=True)

        tmr.start(timer.TimeType.BACKWARD, gpu=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tmr.end(timer.TimeType.BACKWARD, gpu=True)

        tmr.end(timer.TimeType.BATCH, gpu=True)
        if index + 1 < len(loader):
            tmr.start(timer.TimeType.BATCH, gpu=True)
            tmr.start(timer.TimeType.IO)


def main() -> None:
    """Train a small network on scikit-learn's digits and print where the time went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), batch_size=64, shuffle=True)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10)
    ).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    tmr = timer.CPUGPUTimer()
    for _ in range(arguments.epochs):
        tmr.start(timer.TimeType.EPOCH)
        train_epoch(loader, net, nn.CrossEntropyLoss(), optimizer, tmr, device)
        tmr.end(timer.TimeType.EPOCH)
    tmr.print_all_time_stats()


if __name__ == "__main__":
    main()
