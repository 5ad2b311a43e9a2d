"""The regions that a callback times, and those of them that are open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing import TimeType

if TYPE_CHECKING:
    from deep500_timing import Timer

FIT = "FIT"
"""One call of ``fit``."""
VALIDATION = "VALIDATION"
"""The evaluation inside a fit; it lies inside EPOCH."""
TEST = "TEST"
"""One call of ``evaluate``."""
PREDICT = "PREDICT"
"""One call of ``predict``."""
EXECUTION = "EXECUTION"
"""With ``gpu=True`` and ``steps_per_execution`` above 1: one call of the train function, which is several batches."""

Key = TimeType | str


def first(key: Key) -> str:
    """The name under which executions are kept that traced or compiled: ``"BATCH (first)"``."""
    return f"{key.name if isinstance(key, TimeType) else key} (first)"


class OpenRegions:
    """What is open on a timer because of one callback, so that nothing stays open when a fit is broken off."""

    def __init__(self, timer: Timer) -> None:
        """Nothing is open."""
        self.timer = timer
        self._open: dict[Key, tuple[bool, int]] = {}

    def start(self, key: Key, *, gpu: bool = False) -> None:
        """Open a region."""
        self.timer.start(key, gpu)
        self._open[key] = gpu, self.timer.now_ns()

    def end(self, key: Key) -> int | None:
        """Close a region if it is open.

        Returns:
            How long it took on the host, in nanoseconds; None if it was not open.
        """
        if key not in self._open:
            return None
        gpu, began_ns = self._open.pop(key)
        took_ns = self.timer.now_ns() - began_ns
        self.timer.end(key, gpu)
        return took_ns

    def drop(self, key: Key) -> None:
        """Forget a region, if it is open, that turned out not to be there, such as a batch after the last."""
        if self._open.pop(key, None) is not None:
            self.timer.discard_quietly(key)

    def fail(self, key: Key) -> None:
        """Close a region, if it is open, and count it as failed."""
        if self._open.pop(key, None) is not None:
            self.timer.fail(key)

    def fail_all(self) -> None:
        """Close whatever is open, innermost first, and count it as failed."""
        for key in reversed(list(self._open)):
            self.fail(key)

    def __contains__(self, key: Key) -> bool:
        """Whether the region is open."""
        return key in self._open
