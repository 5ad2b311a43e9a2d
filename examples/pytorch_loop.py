"""Time a PyTorch training loop by keys: the parts of a batch, on the CPU and on the GPU if there is one.

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
    """One pass over the data. Each batch is a BATCH that holds the wait for it as IO."""
    for inputs, targets in tmr.steps(loader, gpu=True):
        inputs, targets = inputs.to(device), targets.to(device)
        with tmr.region(timer.TimeType.FORWARD, gpu=True):
            loss = criterion(net(inputs), targets)
        with tmr.region(timer.TimeType.BACKWARD, gpu=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


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
        with tmr.region(timer.TimeType.EPOCH):
            train_epoch(loader, net, nn.CrossEntropyLoss(), optimizer, tmr, device)
    tmr.print_all_time_stats()


if __name__ == "__main__":
    main()
