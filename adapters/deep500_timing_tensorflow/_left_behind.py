"""What times the passes of fits whose list of callbacks is gone, after an exception or Ctrl-C without a hook.

To leave it takes locks and puts functions of the framework back. The collector finds out anywhere that a list is gone,
so that waits for the next use of a callback.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deep500_timing_tensorflow._phases_contract import Phases

to_be_left: deque[tuple[Phases, Any]] = deque()
"""The passes of such a fit, and who has joined them."""


def leave_what_is_gone() -> None:
    """Let go of what fits that are gone have watched; inside a hook, where nothing of ours is under way."""
    while to_be_left:
        phases, timing = to_be_left.popleft()
        phases.leave(timing)
