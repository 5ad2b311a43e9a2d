"""Time Lightning's ``Trainer.fit``: the regions of its steps, of validation and of checkpoints.

Run it with::

    python examples/lightning_fit.py
"""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deep500_timing_torch.trainers.lightning import TimerCallback


class Classifier(LightningModule):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """The same, in evaluation."""
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters())


def main() -> None:
    """Train on random rows."""
    loader = DataLoader(TensorDataset(torch.randn(640, 64), torch.randint(10, (640,))), 32)
    callback = TimerCallback()
    trainer = Trainer(max_epochs=2, callbacks=[callback], logger=False, enable_progress_bar=False)
    trainer.fit(Classifier(), loader, loader)
    callback.timer.print_all_time_stats()


if __name__ == "__main__":
    main()
