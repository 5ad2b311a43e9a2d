"""Pipeline parallel training on ``torch.distributed.pipelining``, each micro-batch timed and the bubble measured."""

from deep500_timing_torch.pipeline._account import account, together
from deep500_timing_torch.pipeline._actions import COMPUTE, Action, Kind, Order, Slot
from deep500_timing_torch.pipeline._bubble import Bubble, RankBubble, StageLoad
from deep500_timing_torch.pipeline._config import PipelineConfig
from deep500_timing_torch.pipeline._data import RepeatingLoader
from deep500_timing_torch.pipeline._deepspeed import DeepSpeedPipelineTimer, instrument_deepspeed
from deep500_timing_torch.pipeline._engine import PipelineEngine
from deep500_timing_torch.pipeline._errors import DataEndedError, PipelineError
from deep500_timing_torch.pipeline._ideal import ideal_bubble
from deep500_timing_torch.pipeline._initialize import initialize
from deep500_timing_torch.pipeline._module import PipelineModule
from deep500_timing_torch.pipeline._names import DEEPSPEED_NAMES
from deep500_timing_torch.pipeline._of_run import RunBatches, read_batches
from deep500_timing_torch.pipeline._orders import order_of
from deep500_timing_torch.pipeline._picture import draw_schedule
from deep500_timing_torch.pipeline._pipeline_timer import PipelineTimer, instrument_schedule
from deep500_timing_torch.pipeline._recorder import Batch
from deep500_timing_torch.pipeline._section import PipelineSection
from deep500_timing_torch.pipeline._simulate import order_that_ran, simulate
from deep500_timing_torch.pipeline._specs import LayerSpec, TiedLayerSpec

__all__ = [
    "COMPUTE",
    "DEEPSPEED_NAMES",
    "Action",
    "Batch",
    "Bubble",
    "DataEndedError",
    "DeepSpeedPipelineTimer",
    "Kind",
    "LayerSpec",
    "Order",
    "PipelineConfig",
    "PipelineEngine",
    "PipelineError",
    "PipelineModule",
    "PipelineSection",
    "PipelineTimer",
    "RankBubble",
    "RepeatingLoader",
    "RunBatches",
    "Slot",
    "StageLoad",
    "TiedLayerSpec",
    "account",
    "draw_schedule",
    "ideal_bubble",
    "initialize",
    "instrument_deepspeed",
    "instrument_schedule",
    "order_of",
    "order_that_ran",
    "read_batches",
    "simulate",
    "together",
]
