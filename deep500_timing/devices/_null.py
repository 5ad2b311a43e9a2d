"""What a timer asks of its device, and the null device, which a timer without one has in the place of a pool."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._queue import EventPair


class Device:
    """What a timer asks of its device. Here everything does nothing, as without a device.

    Attributes:
        is_null: Whether there is no device behind this.
        is_lazy: Whether this only stands in for a device that :meth:`find` gives, see :class:`LazyDevice`.
        for_named_timers: Whether named timers are to look for it.
    """

    __slots__ = ("for_named_timers", "is_lazy", "is_null")

    def __init__(self) -> None:
        """No device."""
        self.is_null = True
        self.is_lazy = False
        self.for_named_timers = False

    @property
    def clock(self) -> DeviceClock | None:
        """The device's clock; None without a device."""
        return None

    @property
    def events(self) -> int:
        """Events created so far, those in use and those that are free: bounded by the work in flight."""
        return 0

    @property
    def uncertainty_ns(self) -> int:
        """How far off the place of a device's time on the host's clock may be, either way, in ns."""
        return 0

    def find(self) -> Device:
        """The device, looked for if need be."""
        return self

    def find_for_regions(self) -> Device:
        """As :meth:`find`, with one warning that gives the reason if there is none."""
        return self

    def begin(self, pair: EventPair) -> None:
        """Record the start of a pair on the current stream; a fault costs its time and a warning."""

    def end(self, pair: EventPair, sink: Any, start_ns: int, end_ns: int) -> None:
        """Record the end of a pair on the current stream, and queue it. Never waits.

        Args:
            pair: What was begun.
            sink: Where its time goes when the device has passed it: ``append(start_ns, end_ns)`` is called, or 1 is
                added to its attribute ``failed`` or ``captured``.
            start_ns: When it began on the host, in ns.
            end_ns: When it ended there; the device cannot have been there before.
        """

    def drop(self, pair: EventPair) -> None:
        """Take back the start of a pair that will have no end."""

    def collect(self, *, wait: bool) -> None:
        """Collect every pair that the device has passed.

        Args:
            wait: Wait for those that it has not. Only for a user who asked for it by name.
        """

    def collect_for(self, sink: Any) -> None:
        """Collect the pairs that are for ``sink``, waiting for them and for nothing queued after them."""

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way, by the ``id`` of the sink that they are for."""
        return {}


class NullDevice(Device):
    """No device: accepts everything and does nothing."""

    __slots__ = ()

    def __repr__(self) -> str:
        """Say what it is."""
        return "<NullDevice>"


NULL_DEVICE = NullDevice()
"""The one that every timer without a device shares."""
