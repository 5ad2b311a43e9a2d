"""The interface of a timer's device, and the null device of a timer without one."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._queue import EventPair


class Device:
    """The interface of a timer's device. Here every method does nothing.

    Attributes:
        is_null: Whether there is no device behind this.
        is_lazy: Whether :meth:`find` returns the real device, see :class:`LazyDevice`.
        for_named_timers: Whether named timers search for it.
    """

    __slots__ = ("for_named_timers", "is_lazy", "is_null")

    def __init__(self) -> None:
        self.is_null = True
        self.is_lazy = False
        self.for_named_timers = False

    @property
    def clock(self) -> DeviceClock | None:
        """The device's clock; None without a device."""
        return None

    @property
    def events(self) -> int:
        """Events created so far, used and free: bounded by the work in flight."""
        return 0

    @property
    def uncertainty_ns(self) -> int:
        """Uncertainty (±) of device times on the host's clock, in ns."""
        return 0

    def find(self) -> Device:
        """Return the device, after a search if necessary."""
        return self

    def find_for_regions(self) -> Device:
        """As :meth:`find`, with one warning that tells why there is no device."""
        return self

    def begin(self, pair: EventPair) -> None:
        """Record the start of a pair on the current stream. A fault costs its time and a warning."""

    def end(self, pair: EventPair, sink: Any, start_ns: int, end_ns: int) -> None:
        """Record the end of a pair on the current stream, and queue it. Never waits.

        Args:
            pair: The begun pair.
            sink: Receives the time when the device has passed the pair, by ``append(start_ns, end_ns)``, or a count in
                its attribute ``failed`` or ``captured``.
            start_ns: When it began on the host, in ns.
            end_ns: When it ended on the host.
        """

    def drop(self, pair: EventPair) -> None:
        """Take back the start of a pair without an end."""

    def collect(self, *, wait: bool) -> None:
        """Collect every pair that the device has passed.

        Args:
            wait: Wait for the others. Only for a user who asked for device times.
        """

    def collect_for(self, sink: Any) -> None:
        """Collect the pairs of ``sink``, waiting for them and for nothing queued after them."""

    def pending(self) -> dict[int, int]:
        """The number of pending pairs, by the ``id`` of their sink."""
        return {}


class NullDevice(Device):
    """No device: accepts everything and does nothing."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "<NullDevice>"


NULL_DEVICE = NullDevice()
