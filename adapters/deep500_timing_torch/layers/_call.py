"""One call of a layer, and the purposes of calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing.memory import MemoryUsage
    from deep500_timing_torch.layers._select import Layer

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTED = "recomputed forward"
EVALUATION = "evaluation forward"
PURPOSES = (FORWARD, BACKWARD, RECOMPUTED, EVALUATION)


class Call:
    """One call of a layer that is under way, or whose backward pass may still come."""

    __slots__ = (
        "begin",
        "caller",
        "children",
        "end",
        "inputs",
        "layer",
        "memory",
        "of_root",
        "outputs",
        "parent",
        "region",
        "task",
        "thread",
    )

    # Set only in the pass that needs it, as a call of every layer makes one of these.
    memory: MemoryUsage | None
    """The memory in use as the pass that is under way began, if it is read."""
    begin: int
    end: int
    """The number of the first node made after it."""
    inputs: dict[Any, None]
    """The autograd nodes of its inputs, until its caller has returned."""
    outputs: list[int]
    """The numbers of the nodes of its outputs."""
    thread: int
    """The thread that began its backward pass."""
    task: int
    """The engine's task that its backward pass is part of."""

    def __init__(self, layer: Layer, parent: Call | None, of_root: bool, caller: int) -> None:
        self.layer = layer
        self.parent = parent
        """The call that made it, while that is under way."""
        self.caller = caller
        """The thread that made it, which numbers its nodes."""
        self.of_root = of_root
        """Whether the model itself was called, and not a part of it."""
        self.children: list[Call] | None = None
        """The timed calls directly within it that have a backward pass, until it has returned."""
        self.region: Any = None
        """Its open region, of the forward pass and later of the backward pass; None while neither runs, and for a
        module that calls itself."""

    def is_repeated(self) -> bool:
        """Whether the same layer is under way further out: the module calls itself."""
        call = self.parent
        while call is not None:
            if call.layer is self.layer:
                return True
            call = call.parent
        return False
