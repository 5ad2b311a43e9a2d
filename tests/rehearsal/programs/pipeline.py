"""A pipeline of two ranks on torch.cuda, with collectives by patched functions and the peak of memory."""

from __future__ import annotations

import json
import os
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from deep500_timing_torch import comm
from deep500_timing_torch.pipeline import instrument_schedule

said: list[str] = []
warnings.showwarning = lambda message, kind, *rest, **more: said.append(f"{kind.__name__}: {message}")
rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
comm.instrument(kernel=False)
with torch.device("cuda"):
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    batch = torch.zeros(32, 256)
stage = PipelineStage(module, rank, 2, torch.device("cuda:0"), input_args=(batch[:4],), output_args=(batch[:4],))
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=nn.MSELoss())
times = instrument_schedule(schedule)
high = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")  # the program's peak, before training
peak = torch.cuda.max_memory_allocated()
del high
for _ in range(3):
    if rank == 0:
        schedule.step(batch)
    else:
        schedule.step(target=batch, losses=[])
torch.cuda.synchronize()
computed = [
    [action.kind.value for action in times.recorder.actions_of(one) if action.end_ns > action.start_ns]
    for one in times.batches
]
result = {
    "forward": [kinds.count("F") for kinds in computed],
    "backward": [kinds.count("B") for kinds in computed],
    "faults": times.faults,
    "peak_stays": torch.cuda.max_memory_allocated() == peak,
    "peaks": [one.peak_bytes == peak for one in times.batches],
    "ops": {op.op: [op.pending, op.failed, op.captured] for op in comm.summary(wait=True).ops},
    "said": said,
}
print(json.dumps(result))
dist.destroy_process_group()
