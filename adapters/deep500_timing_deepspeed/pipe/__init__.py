"""DeepSpeed's pipeline engine in its names, on ``torch.distributed.pipelining``; and DeepSpeed's own engine, timed."""

from deep500_timing_deepspeed.pipe._config import PipelineConfig
from deep500_timing_deepspeed.pipe._data import DataEndedError, RepeatingLoader
from deep500_timing_deepspeed.pipe._engine import DEEPSPEED_NAMES, PipelineEngine
from deep500_timing_deepspeed.pipe._initialize import add_config_arguments, initialize
from deep500_timing_deepspeed.pipe._instrument import DeepSpeedPipelineTimer, instrument_deepspeed
from deep500_timing_deepspeed.pipe._module import LayerSpec, PipelineModule, TiedLayerSpec
from deep500_timing_torch.pipeline import PipelineError

__all__ = [
    "DEEPSPEED_NAMES",
    "DataEndedError",
    "DeepSpeedPipelineTimer",
    "LayerSpec",
    "PipelineConfig",
    "PipelineEngine",
    "PipelineError",
    "PipelineModule",
    "RepeatingLoader",
    "TiedLayerSpec",
    "add_config_arguments",
    "initialize",
    "instrument_deepspeed",
]
