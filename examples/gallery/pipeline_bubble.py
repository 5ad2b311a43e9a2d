"""A pipeline of two ranks cuts its batch into two micro-batches, so each rank waits for much of the time.

Fixed: eight micro-batches.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from deep500_timing_torch import CPUGPUTimer, TimeType
from deep500_timing_torch.pipeline import instrument_schedule

MICRO_BATCHES = 8 if "--fixed" in sys.argv else 2

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
stage = PipelineStage(layers, rank, 2, torch.device("cpu"))
schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.01)
timer = CPUGPUTimer()
times = instrument_schedule(schedule, timer)
for _ in range(8):
    with timer.region(TimeType.BATCH):
        if rank == 0:
            schedule.step(torch.randn(4096, 256))
        else:
            schedule.step(target=torch.randn(4096, 256))
        optimizer.step()
        optimizer.zero_grad()
bubble = times.bubble()
if rank == 0:
    print(bubble)
dist.destroy_process_group()
