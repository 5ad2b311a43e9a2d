"""The events of a training loop, and the names of the regions that come of them."""

from __future__ import annotations

from deep500_timing._base.names import TimeType

IO, COPY, FORWARD, NO_GRAD, BACKWARD, GRAD, STEP, REPLAY = range(8)
"""The events: a wait for data, a copy to a device, a call of a model with gradients and one without, a backward pass,
gradients that are returned, an optimizer's step, and a captured graph that has one and is replayed."""
NAMES = (
    TimeType.IO.name,
    "copy",
    TimeType.FORWARD.name,
    f"{TimeType.FORWARD.name} (no grad)",
    TimeType.BACKWARD.name,
    "autograd.grad",
    "optimizer",
    "graph replay",
)
"""The region of each event."""
NOTHING = -1
"""Stands where there is no event."""
HERE, INSIDE = 16, -1
"""The states of :meth:`Loop.begin`: HERE is added to an event that lies in no other; INSIDE is covered by another."""

BATCH, EPOCH = TimeType.BATCH.name, TimeType.EPOCH.name
EPOCH_START = f"{EPOCH} (start)"
VALIDATION, GENERATE, ROLLOUT = "VALIDATION", "generate", "rollout"
PREPARE, LOSS, GRADIENTS, NEXT, OTHER = "prepare batch", "loss", "gradients", "between steps", "other code"
BETWEEN = (PREPARE, LOSS, GRADIENTS, NEXT, OTHER)
"""The regions between two events: data and a model, a model and BACKWARD, BACKWARD and the optimizer's step (clipping,
unscaling), that step and what follows it (schedules, logging, an environment), and any other two."""

ROWS = (*NAMES, *BETWEEN, BATCH)
"""The regions of each step, those of the events first."""
