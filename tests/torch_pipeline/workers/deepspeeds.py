"""DeepSpeed's own pipeline engine with ``wall_clock_breakdown``, timed."""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
# Its tuner would import MLflow, and with that pandas and polars: three seconds that have no part in this.
sys.modules["mlflow"] = None
warnings.filterwarnings("ignore")

import deepspeed  # noqa: E402 - it reads the accelerator when it is imported
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import PipelineModule  # noqa: E402
from torch import nn  # noqa: E402

from deep500_timing_deepspeed.pipe import instrument_deepspeed  # noqa: E402

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "steps_per_print": 2,
    "wall_clock_breakdown": True,
}


def main():
    """Three batches, which fail where nothing times them."""
    folder = Path(sys.argv[1])
    # Else it compiles an operator for inference, which takes minutes and has no part in this.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    torch.manual_seed(3)
    layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    engine, _, _, _ = deepspeed.initialize(model=model, config=CONFIG, model_parameters=list(model.parameters()))
    before = dict(engine.__dict__)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator)) for _ in range(4)]
    times = instrument_deepspeed(engine)
    losses = [float(engine.train_batch(iter(data))) for _ in range(3)]
    bubble = times.bubble(deadline_s=300)
    named = {name: times.named(name).mean() for name in ("fwd_microstep", "bwd_microstep", "step")}
    times.detach()
    left = sorted(name for name in engine.__dict__ if name in ("_INSTRUCTION_MAP", "train_batch"))
    found = {
        "losses": losses,
        "kinds": sorted({action.kind.value for batch in times.batches for action in batch.actions}),
        "forwards": len(times.timer.get_time(f"stage {engine.stage_id} forward")),
        "batches": len(times.timer.get_time("BATCH")),
        "bubble": bubble.bubble,
        "ideal": float(bubble.ideal),
        "named": named,
        "left": left,
        "timers": engine.timers is before["timers"],
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # DeepSpeed's handlers at exit are not under test.


main()
