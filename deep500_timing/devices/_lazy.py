"""A device that is searched for at its first use, so that creating a timer starts and imports nothing."""

from __future__ import annotations

from functools import partial

from deep500_timing._base.warn import warn_once
from deep500_timing.devices._device import NULL_DEVICE, Device
from deep500_timing.devices._pool import pool_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock


class LazyDevice(Device):
    """Stands for a device until the first region on it starts the search; as ``device_clock`` of a timer.

    ::

        Timer(device_clock=lazy_device(lambda: clocks.get("worker")()))

    ``is_null`` is True, ``clock`` is None and nothing is pending. A timer replaces it by the result of :meth:`find`
    when it needs the device.

    Args:
        search: Returns the clock, or one or two sentences that tell why there is none; the first ``gpu=True`` warns
            with them, and CPU times go on. It is called once, on the thread that uses the device first. That call
            raises its exceptions, for a device that the user named.
        for_named_timers: Whether named timers, which have no ``gpu=True``, search for the device at their first start.
            False where a device time costs more than two events.
    """

    __slots__ = ("_found", "for_named_timers", "reason", "search")

    def __init__(self, search: Callable[[], DeviceClock | str], *, for_named_timers: bool = True) -> None:
        super().__init__()
        self.is_lazy = True
        self.for_named_timers = for_named_timers
        self.search = search
        self.reason = ""
        """Why there is no device, after a search that found none."""
        self._found: Device | None = None

    def find(self) -> Device:
        """Search once, and return the device: a pool, or the null device.

        Raises:
            Exception: Raised by the search, such as ``DeviceUnavailableError`` for a named device. The next call
                searches again.
        """
        if self._found is None:
            found = self.search()
            device = NULL_DEVICE if isinstance(found, str) else device_of(found)
            if self._found is None:  # Another thread may have found one meanwhile.
                self.reason = found if isinstance(found, str) else ""
                self._found = device
        return self._found

    def find_for_regions(self) -> Device:
        """As :meth:`find`, with one warning that tells why there is no device."""
        found = self.find()
        if found.is_null:
            warn_once(f"Timing a region with gpu=True: {self.reason}", key=f"no device {self.reason}")
        return found

    def __repr__(self) -> str:
        return f"<LazyDevice: {self._found or 'not searched for yet'}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyDevice) and self.search == other.search

    def __hash__(self) -> int:
        return hash(self.search)

    def __reduce__(self) -> Any:
        """A copy searches again, in its own process."""
        return partial(LazyDevice, for_named_timers=self.for_named_timers), (self.search,)


lazy_device = LazyDevice
"""How it is written where a timer is made."""


def device_of(device_clock: DeviceClock | LazyDevice | None) -> Device:
    """Return the device of a timer with this ``device_clock``."""
    if device_clock is None:
        return NULL_DEVICE
    return device_clock if isinstance(device_clock, LazyDevice) else pool_of(device_clock)
