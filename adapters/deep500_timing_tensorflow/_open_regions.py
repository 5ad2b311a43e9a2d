"""The regions that a callback times, and those of them that are open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing import RegionOpenError, TimeType

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
CALLBACKS = "CALLBACKS"
"""The hooks of all callbacks, from the first to the last of a list, inside an epoch."""
FIT_CALLBACKS = "CALLBACKS (fit)"
"""Their hooks at the begin and the end of a fit."""
EPOCH_START = "EPOCH (start)"
"""What Keras does from the begin of an epoch to its first batch."""
EPOCH_END = "EPOCH (end)"
"""What Keras does after the last batch of an epoch but for the validation: its metrics, and what comes before and after
the validation, each by itself."""

Key = TimeType | str


def first(key: Key) -> str:
    """The name under which executions are kept that traced or compiled: ``"BATCH (first)"``."""
    return f"{key.name if isinstance(key, TimeType) else key} (first)"


class OpenRegions:
    """What is open on a timer because of one fit, so that nothing stays open when it is broken off.

    A region that is open already, because of a fit around this one, is measured here and recorded when it ends.
    """

    def __init__(self, timer: Timer) -> None:
        """Nothing is open."""
        self.timer = timer
        self.open: dict[Key, tuple[int, bool, bool]] = {}
        """When each open region began, whether it is timed on the GPU, and whether it is open on the timer."""
        self._now_ns = timer.now_ns

    def start(self, key: Key, gpu: bool = False) -> int:
        """Open a region.

        Returns:
            When it began, on the timer's clock.
        """
        own = True
        try:
            self.timer.start(key, gpu)
        except RegionOpenError:
            own = False
        began_ns = self._now_ns()
        self.open[key] = began_ns, gpu, own
        return began_ns

    def end(self, key: Key, kept_as: Key | None = None) -> int | None:
        """Close a region if it is open.

        Args:
            key: The region.
            kept_as: The region that it turned out to be, if that is another; its host time is kept then.

        Returns:
            How long it took on the host, in nanoseconds; None if it was not open.
        """
        opened = self.open.pop(key, None)
        if opened is None:
            return None
        now_ns = self._now_ns()
        began_ns, gpu, own = opened
        if kept_as is None or kept_as == key:
            if own:
                self.timer.end(key, gpu)
            else:
                self.timer.record(key, began_ns, now_ns)
        else:
            if own:
                self.timer.cancel(key)
            self.timer.record(kept_as, began_ns, now_ns)
        return now_ns - began_ns

    def drop(self, key: Key) -> None:
        """Cancel an open region that did not happen, such as a batch after the last; it is not counted."""
        if self.open.pop(key, (0, False, False))[2]:
            self.timer.cancel(key)

    def fail(self, key: Key) -> None:
        """Close a region, if it is open, and count it as failed."""
        if self.open.pop(key, (0, False, False))[2]:
            self.timer.fail(key)

    def fail_all(self) -> None:
        """Close whatever is open, innermost first, and count it as failed."""
        for key in reversed(list(self.open)):
            self.fail(key)

    def __contains__(self, key: Key) -> bool:
        """Whether the region is open."""
        return key in self.open
