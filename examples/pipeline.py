"""A small transformer in two stages on two processes: every micro-batch timed, the bubble explained and drawn.

    python examples/pipeline.py

Trains on the digits of scikit-learn under 1F1B, prints where the time of the batches went, and draws the schedule as it
ran into `demo-output/pipeline.png`. It starts its two processes itself, unless torchrun has:

    torchrun --nproc-per-node 2 examples/pipeline.py
"""

import os
import socket
import sys

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from deep500_timing_deepspeed.pipe import LayerSpec, PipelineModule, initialize
from deep500_timing_torch.pipeline import draw_schedule


class Rows(nn.Module):
    """Each row of an image becomes a token that knows its place."""

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) * 0.1)

    def forward(self, images):
        """Images, 8 by 8."""
        return self.linear(images) + self.place


class Head(nn.Module):
    """The digit, from the mean of the tokens."""

    def __init__(self, width=64):
        super().__init__()
        self.linear = nn.Linear(width, 10)

    def forward(self, tokens):
        """Tokens, 8 of them."""
        return self.linear(tokens.mean(1))


def start(rank, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train()


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    data = list(zip(images, torch.tensor(digits.target), strict=True))

    block = LayerSpec(nn.TransformerEncoderLayer, 64, 4, 128, dropout=0.0, batch_first=True)
    model = PipelineModule(
        layers=[LayerSpec(Rows), block, block, block, LayerSpec(Head)],
        num_stages=2,
        loss_fn=nn.CrossEntropyLoss(),
        partition_method="type:TransformerEncoderLayer",
    )
    config = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 16,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10,
    }
    engine, _, _, _ = initialize(model=model, config=config, training_data=data)
    for _ in range(30):
        engine.train_batch()
    bubble, batches = engine.bubble(), engine.gather()
    if rank == 0:
        print(bubble)
        print(draw_schedule(batches[-1], "demo-output/pipeline.png"))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        train()
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free_port = probe.getsockname()[1]
        # A fork has PyTorch imported; elsewhere than on Linux that is not safe.
        how = "fork" if sys.platform == "linux" else "spawn"
        torch.multiprocessing.start_processes(start, (free_port,), nprocs=2, start_method=how)
