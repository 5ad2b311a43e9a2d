"""One call of a layer, and what layers are called for."""

from __future__ import annotations

import itertools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing.memory import MemoryUsage
    from deep500_timing_torch.layers._select import Layer

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTED = "recomputed forward"
EVALUATION = "evaluation forward"
PURPOSES = (FORWARD, BACKWARD, RECOMPUTED, EVALUATION)

_new_order = itertools.count(1).__next__


class Call:
    """One call of a layer that is under way, or whose backward pass may still come."""

    __slots__ = ("error", "inputs", "layer", "memory", "order", "parent", "region", "start_ns", "task", "thread")

    def __init__(self, layer: Layer, parent: Call | None) -> None:
        """Begin; the caller opens the region."""
        self.layer = layer
        self.parent = parent
        self.order = _new_order()
        """Calls that begin later have higher numbers."""
        self.error = sys.exception()
        """What was being handled when it began: a model may be called in an ``except`` block."""
        self.region: Any = None
        """Its open region, of the forward pass and later of the backward pass; None while neither runs, and for a
        module that calls itself."""
        self.start_ns = 0
        """When it began, if it is a recomputation, whose regions the timer itself leaves out."""
        self.inputs: list[Any] | None = None
        """The autograd nodes that made its inputs."""
        self.memory: MemoryUsage | None = None
        """What was in use as the pass that is under way began, if it is read."""
        self.thread = 0
        """The thread that began its backward pass."""
        self.task = -1
        """The engine's task that its backward pass is part of."""

    def is_within(self, other: Call) -> bool:
        """Whether this call was made, directly or not, by ``other``."""
        call = self.parent
        while call is not None and call.order >= other.order:
            if call is other:
                return True
            call = call.parent
        return False
