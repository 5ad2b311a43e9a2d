"""The null device: what a timer without a device has in the place of a pool of events."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing._ground.protocols import DeviceClock


class NullDevice:
    """Answers whatever a timer asks of an :class:`EventPool`, and does nothing.

    Attributes:
        is_null: Whether there is no device behind this.
        is_late: Whether this only stands in for a device that :meth:`find` gives, see :class:`LateDevice`.
        for_named_timers: Whether named timers are to look for it.
        clock: The device's clock; None without a device.
        events: How many events were created; 0.
    """

    __slots__ = ()

    is_null: bool = True
    is_late: bool = False
    for_named_timers: bool = False
    clock: DeviceClock | None = None
    events: int = 0

    def find(self) -> NullDevice:
        """Itself: there is nothing to look for."""
        return self

    def find_for_regions(self) -> NullDevice:
        """Itself: there is nothing to look for."""
        return self

    def begin(self, region: Any) -> None:
        """No-op: there is nothing to record on."""

    def end(self, region: Any, keep_last: int, skip_first: int) -> None:
        """No-op: without a device nothing was started on it."""

    def drop(self, region: Any) -> None:
        """No-op: there is no event to take back."""

    def collect(self, *, wait: bool) -> None:
        """No-op: nothing is on its way."""

    def collect_for(self, intervals: Any) -> None:
        """No-op: nothing is on its way."""

    def pending(self) -> dict[int, int]:
        """Nothing is on its way."""
        return {}

    def __repr__(self) -> str:
        """Say what it is."""
        return f"<{type(self).__name__}>"


NULL_DEVICE = NullDevice()
"""The one that every timer without a device shares."""
