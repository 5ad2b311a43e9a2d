"""One call of a layer, and what layers are called for."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing.memory import MemoryUsage
    from deep500_timing_torch.layers._select import Layer

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTED = "recomputed forward"
EVALUATION = "evaluation forward"
PURPOSES = (FORWARD, BACKWARD, RECOMPUTED, EVALUATION)

new_order = itertools.count(1).__next__


class Call:
    """One call of a layer that is under way, or whose backward pass may still come."""

    __slots__ = ("__weakref__", "caller", "layer", "memory", "of_root", "order", "parent", "region", "task", "thread")

    # What only one of the passes needs is set there: this is made for every call of every layer.
    memory: MemoryUsage | None
    """What was in use as the pass that is under way began, if it is read."""
    thread: int
    """The thread that began its backward pass."""
    task: int
    """The engine's task that its backward pass is part of."""

    def __init__(self, layer: Layer, parent: Call | None, of_root: bool, caller: int) -> None:
        """Begin; the caller opens the region."""
        self.layer = layer
        self.parent = parent
        self.caller = caller
        """The thread that made it."""
        self.of_root = of_root
        """Whether the model itself was called, and not a part of it."""
        self.order = new_order()
        """Calls that begin later have higher numbers."""
        self.region: Any = None
        """Its open region, of the forward pass and later of the backward pass; None while neither runs, and for a
        module that calls itself."""

    def is_within(self, other: Call) -> bool:
        """Whether this call was made, directly or not, by ``other``."""
        call = self.parent
        while call is not None and call.order >= other.order:
            if call is other:
                return True
            call = call.parent
        return False

    def is_repeated(self) -> bool:
        """Whether the same layer is under way further out: the module calls itself."""
        call = self.parent
        while call is not None:
            if call.layer is self.layer:
                return True
            call = call.parent
        return False
