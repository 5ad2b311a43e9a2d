"""Pipelines of ``torch.distributed.pipelining``: each micro-batch timed and the bubble measured.

DeepSpeed's engine and its names are in :mod:`deep500_timing_deepspeed.pipe`.
"""

from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind, Order, PipelineError, Slot
from deep500_timing_torch.pipeline._bubble import Bubble, RankBubble, StageLoad, account, together
from deep500_timing_torch.pipeline._picture import PipelineSection, RunBatches, draw_schedule, read_batches
from deep500_timing_torch.pipeline._pipeline_timer import PipelineTimer, instrument_schedule
from deep500_timing_torch.pipeline._recorder import Batch
from deep500_timing_torch.pipeline._schedules import ideal_bubble, order_of, order_that_ran, simulate

__all__ = [
    "COMPUTE",
    "Action",
    "Batch",
    "Bubble",
    "Kind",
    "Order",
    "PipelineError",
    "PipelineSection",
    "PipelineTimer",
    "RankBubble",
    "RunBatches",
    "Slot",
    "StageLoad",
    "account",
    "draw_schedule",
    "ideal_bubble",
    "instrument_schedule",
    "order_of",
    "order_that_ran",
    "read_batches",
    "simulate",
    "together",
]
