"""Trains a DeepSpeed pipeline on the CPU with ``wall_clock_breakdown``; prints what its timers did.

Argument: ``theirs`` for the engine as it is, ``ours`` for our timers in it.
"""

# ruff: noqa: E402 (DeepSpeed looks for MLflow)

from __future__ import annotations

import json
import sys

# Its tuner would import MLflow, and with that pandas and polars: three seconds that have no part in this.
sys.modules["mlflow"] = None

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.engine import PipelineEngine

from deep500_timing_deepspeed.wallclock import time_engine

# Else it compiles an operator for inference, which takes two minutes and has no part in this.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
network = PipelineModule(
    [torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)],
    num_stages=dist.get_world_size(),
    loss_fn=torch.nn.CrossEntropyLoss(),
)
data = [(torch.randn(8), i % 4) for i in range(64)]
engine, *_ = deepspeed.initialize(
    model=network,
    model_parameters=list(network.parameters()),
    training_data=data,
    config={
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "wall_clock_breakdown": True,
        "steps_per_print": 1,
    },
)
if sys.argv[1] == "ours":
    time_engine(engine)

running_in_reduction = []


def allreduce_gradients(self, *args, **kwargs):
    """Note whether the reduction is being timed, and reduce."""
    running_in_reduction.append(self.timers("bwd_allreduce").started_)
    return type(self).__mro__[1].allreduce_gradients(self, *args, **kwargs)


PipelineEngine.allreduce_gradients = allreduce_gradients
for _ in range(2):
    engine.train_batch()
if dist.get_rank() == 0:
    print("RESULT", json.dumps({"running_in_reduction": running_in_reduction, "steps": engine.global_steps}))
