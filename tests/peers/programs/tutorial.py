"""DeepSpeed's tutorial on pipelines (an AlexNet, made data) on 2 ranks; argument: the package that is imported.

Only the imports differ: ``deepspeed`` or ``deep500_timing_deepspeed``.
"""

import argparse
import importlib
import json
import os
import sys
import warnings

import torch
from torch import nn

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
which = sys.argv.pop(1)
if which == "deepspeed":
    sys.modules["mlflow"] = None
deepspeed = importlib.import_module(which)
PipelineModule = importlib.import_module(f"{which}.pipe").PipelineModule
if which == "deepspeed":
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # else it compiles an operator for minutes

CONFIG = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 2,
    # The tutorial's Adam makes DeepSpeed compile an operator on a CPU.
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
}


class Made(torch.utils.data.Dataset):
    """Images that are the same in both runs."""

    def __len__(self):
        """Of a few batches."""
        return 64

    def __getitem__(self, number):
        """An image and its class."""
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, 32, 32, generator=generator), number % 10


class AlexNet(nn.Module):
    """As torchvision has it, a tenth as wide, for 32 x 32 pixels."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2, 2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(inplace=True),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.0),
            nn.Linear(576, 400),
            nn.ReLU(inplace=True),
            nn.Dropout(0.0),
            nn.Linear(400, 400),
            nn.ReLU(inplace=True),
            nn.Linear(400, 10),
        )


def join_layers(vision_model):
    """As the tutorial does it."""
    return [*vision_model.features, vision_model.avgpool, lambda x: torch.flatten(x, 1), *vision_model.classifier]


def get_args(config):
    """As the tutorial does it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    return parser.parse_args(["--deepspeed_config", config])


config = f"{sys.argv[1]}/config-{os.environ['RANK']}.json"
with open(config, "w") as file:  # noqa: PTH123 - the script is DeepSpeed's
    json.dump(CONFIG, file)
args = get_args(config)
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(1138)
net = PipelineModule(
    layers=join_layers(AlexNet()),
    loss_fn=nn.CrossEntropyLoss(),
    num_stages=2,
    partition_method="parameters",
    activation_checkpoint_interval=0,
)
engine, _, _, _ = deepspeed.initialize(
    args=args, model=net, model_parameters=[p for p in net.parameters() if p.requires_grad], training_data=Made()
)
losses = [float(engine.train_batch()) for _ in range(6)]
print("LOSSES", json.dumps(losses), flush=True)
torch.distributed.barrier()
os._exit(0)
