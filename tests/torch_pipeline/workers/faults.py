"""An engine of which one rank dies, is stopped or fails in the middle of a batch."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from deep500_timing_deepspeed.pipe import PipelineError, PipelineModule, initialize

warnings.filterwarnings("ignore")
DEADLINE_S = 300.0 if sys.argv[2] == "raised" else 30.0
"""Much more than healthy ranks need for a message. Without one, gloo would wait for half an hour."""


class Fatal(nn.Linear):
    """A layer that goes wrong in its third batch."""

    calls = 0

    def forward(self, value):
        """Its value, at first."""
        Fatal.calls += 1
        # One call finds out the shapes, four are the first batch and four the second.
        if Fatal.calls == 11:
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[2] == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            raise RuntimeError("feature store: could not connect to row 7")
        return super().forward(value)


def main():
    """Three batches, of which the last one fails."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [nn.Linear(4, 4) for _ in range(dist.get_world_size() - 1)]
    layers.insert(1, Fatal(4, 4))
    module = PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine = initialize(model=module, config=config, timeout_s=DEADLINE_S)[0]
    data = [(torch.ones(2, 4), torch.zeros(2, 4))] * 4
    found = {"batches": 0}
    try:
        for _ in range(3):
            engine.train_batch(iter(data))
            found["batches"] += 1
    except PipelineError as error:
        found["error"] = str(error)
        try:
            engine.train_batch(iter(data))
        except PipelineError as again:
            found["again"] = str(again)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    # The job's store is on rank 0: it stays until the others have asked it.
    survivors = [0, 1, 2] if sys.argv[2] == "raised" else [0, 2]
    until = time.monotonic() + 300
    while time.monotonic() < until and not all((folder / f"{one}.json").exists() for one in survivors):
        time.sleep(0.05)
    # A job that has lost a rank is not taken down in order.
    os._exit(0)


main()
