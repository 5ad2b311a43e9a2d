"""What another library's names for communication are built on: the operations, how they are measured, their log."""

from deep500_timing_torch.comm._functions import OPERATIONS, OPTIONS, measure_as, original_of
from deep500_timing_torch.comm._log import DONE, LOG, CommLog
from deep500_timing_torch.comm._ops import OPS, Op, bandwidths, unknown
from deep500_timing_torch.comm._settings import SETTINGS, Settings

__all__ = [
    "DONE",
    "LOG",
    "OPERATIONS",
    "OPS",
    "OPTIONS",
    "SETTINGS",
    "CommLog",
    "Op",
    "Settings",
    "bandwidths",
    "measure_as",
    "original_of",
    "unknown",
]
