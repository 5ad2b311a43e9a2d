"""Names that several parts of the package share: regions of a training loop, and where a time was measured."""

from __future__ import annotations

EPOCH = "EPOCH"
BATCH = "BATCH"
FORWARD = "FORWARD"
BACKWARD = "BACKWARD"
COMM = "COMM"
IO = "IO"

CPU = "CPU"
GPU = "GPU"
