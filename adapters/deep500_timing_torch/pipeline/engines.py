"""What an engine of pipelines is built on: schedules by their names, their timing, and the account of their batches."""

from deep500_timing_torch.pipeline._hooks import require_private_names, time_schedule
from deep500_timing_torch.pipeline._pipeline_timer import AttachedPipeline, TimedPipeline, exchange_of
from deep500_timing_torch.pipeline._recorder import REGIONS, Recorder
from deep500_timing_torch.pipeline._schedules import NAMES, SINGLE, check_stages, normal_name, rank_of_stage

__all__ = [
    "NAMES",
    "REGIONS",
    "SINGLE",
    "AttachedPipeline",
    "Recorder",
    "TimedPipeline",
    "check_stages",
    "exchange_of",
    "normal_name",
    "rank_of_stage",
    "require_private_names",
    "time_schedule",
]
