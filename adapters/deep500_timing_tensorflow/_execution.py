"""The names of the regions, and one execution of a train function."""

from __future__ import annotations

from deep500_timing import TimeType

EPOCH, BATCH, IO = TimeType.EPOCH, TimeType.BATCH, TimeType.IO
FIT = "FIT"
VALIDATION = "VALIDATION"
"""The evaluation inside a fit; it lies inside EPOCH."""
TEST = "TEST"
PREDICT = "PREDICT"
CALLBACKS = "CALLBACKS"
"""The hooks of all callbacks, from the first to the last of a list, inside an epoch."""
FIT_CALLBACKS = "CALLBACKS (fit)"
"""Their hooks at the two ends of a fit."""
EPOCH_START = "EPOCH (start)"
"""From the begin of an epoch to its first batch."""
EPOCH_END = "EPOCH (end)"
"""Keras's own work after the last batch of an epoch: its metrics, and what surrounds the validation."""
IO_MEAN = "IO (mean)"
"""Waits that were read as one sum: one interval a batch, each the mean of its group."""

Key = TimeType | str


def first(key: Key) -> str:
    """The name of executions that traced or compiled: ``"BATCH (first)"``."""
    return f"{key.name if isinstance(key, TimeType) else key} (first)"


BATCH_FIRST = first(BATCH)


class Execution:
    """One call of a train function: all that is known of the batches that it trained on."""

    began_ns: int
    """On the timer's clock."""
    took_ns: int
    began_unix_ns: int
    """On the system's clock, as the stamps are; known with phases."""
    ended_unix_ns: int
    kept_as: Key
    steady: bool
    """Whether it neither traced nor compiled."""
    steps: int

    def __init__(self, number: int = 0) -> None:
        self.number, self.steps = number, 1
