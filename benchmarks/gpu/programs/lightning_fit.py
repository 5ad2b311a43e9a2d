"""Lightning's Trainer with a training and a validation loader."""

import json
import logging

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch, index):
        self.log("loss", self.training_step(batch, index))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


data = TensorDataset(torch.randn(2560, 256), torch.randint(0, 10, (2560,)))
trainer = lightning.Trainer(
    max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
)
trainer.fit(Net(), DataLoader(data, 64), DataLoader(data, 256))
print(json.dumps({"steps": trainer.global_step, "step_ms": None}))
