"""Time a loop that is written with Accelerate, and keep its logged values in the timer's run.

Run it with::

    python examples/accelerate_loop.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deep500_timing_torch as timer
from deep500_timing_torch.trainers.accelerate import TimerTracker, instrument


def main() -> None:
    """Train a small network on random rows, two batches a step."""
    tmr = timer.CPUGPUTimer()
    accelerator = Accelerator(gradient_accumulation_steps=2, log_with=[TimerTracker(tmr, "runs/accelerate")])
    accelerator.init_trackers("example", {"rate": 1e-3})
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randint(10, (640,))), 32)
    net, optimizer, loader = accelerator.prepare(net, torch.optim.Adam(net.parameters(), 1e-3), loader)
    with instrument(accelerator, tmr) as timed:
        for epoch in range(2):
            for rows, classes in loader:
                with accelerator.accumulate(net):
                    loss = nn.functional.cross_entropy(net(rows), classes)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
            accelerator.log({"loss": loss.item(), **timed.values()}, step=epoch)
    accelerator.end_training()
    tmr.print_all_time_stats()


if __name__ == "__main__":
    main()
