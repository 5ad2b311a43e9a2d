"""A device that is looked for when it is first used, so that making a timer starts nothing and imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._ground.warn import warn_once
from deep500_timing.devices._null import NULL_DEVICE, NullDevice

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._ground.protocols import DeviceClock
    from deep500_timing.devices._pool import EventPool


class LateDevice:
    """Stands in for a device until the first region on it begins; only that starts the search.

    Until then it reads as no device (``is_null`` is True, ``clock`` is None, nothing is pending), and asking for any
    of it searches nothing. It has the methods of an :class:`EventPool` and hands on to the one that was found.
    """

    __slots__ = ("_found", "_searched", "for_named_timers", "reason", "search")

    def __init__(self, search: Callable[[], DeviceClock | str], *, for_named_timers: bool = True) -> None:
        """Use :func:`find_late`."""
        self.search = search
        self.for_named_timers = for_named_timers
        self.reason = ""
        """Why there is no device, after a search that found none."""
        self._found: EventPool | NullDevice = NULL_DEVICE
        self._searched = False

    is_late: bool = True
    """A timer replaces it by what :meth:`find` gives as soon as it needs the device."""

    @property
    def is_null(self) -> bool:
        """Whether no device was found so far."""
        return self._found.is_null

    @property
    def clock(self) -> DeviceClock | None:
        """The clock that was found, None before the search."""
        return self._found.clock

    @property
    def events(self) -> int:
        """How many events were created."""
        return self._found.events

    def find(self) -> EventPool | NullDevice:
        """Search, unless that was done before, and return the device: a pool, or the null device.

        Raises:
            Exception: What the search raises, such as ``DeviceUnavailableError`` for a device that was named and is
                not there. The next call searches again.
        """
        if not self._searched:
            found = self.search()
            if isinstance(found, str):
                self.reason = found
            else:
                from deep500_timing.devices._pool import pool_of

                self._found = pool_of(found)
            self._searched = True
        return self._found

    def find_for_regions(self) -> EventPool | NullDevice:
        """As :meth:`find`, with one warning that gives the reason if there is no device."""
        found = self.find()
        if found.is_null:
            warn_once(f"Timing a region with gpu=True: {self.reason}", about=f"no device {self.reason}")
        return found

    def begin(self, region: Any) -> None:
        """Search if need be, and begin on the device that was found."""
        self.find_for_regions().begin(region)

    def end(self, region: Any, keep_last: int, skip_first: int) -> None:
        """End on the device that was found."""
        self._found.end(region, keep_last, skip_first)

    def drop(self, region: Any) -> None:
        """Take back a start event."""
        self._found.drop(region)

    def collect(self, *, wait: bool) -> None:
        """Collect what is done."""
        self._found.collect(wait=wait)

    def collect_for(self, intervals: Any) -> None:
        """Collect the pairs that are for ``intervals``."""
        self._found.collect_for(intervals)

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way."""
        return self._found.pending()

    def __repr__(self) -> str:
        """Show what was found, if anybody looked."""
        return f"<LateDevice: {self._found if self._searched else 'not looked for yet'}>"

    def __eq__(self, other: object) -> bool:
        """Equal ones make the same search."""
        return isinstance(other, LateDevice) and self.search == other.search

    def __hash__(self) -> int:
        """As equality has it."""
        return hash(self.search)

    def __reduce__(self) -> Any:
        """A copy looks for its device anew, in the process that it is in."""
        return _rebuild, (self.search, self.for_named_timers)


def _rebuild(search: Callable[[], DeviceClock | str], for_named_timers: bool) -> LateDevice:
    return LateDevice(search, for_named_timers=for_named_timers)


def find_late(search: Callable[[], DeviceClock | str], *, for_named_timers: bool = True) -> LateDevice:
    """What to pass as ``device_clock`` of a timer whose device is to be looked for at the first ``gpu=True``.

    ::

        Timer(device_clock=find_late(lambda: clocks.get("worker")()))

    Args:
        search: Returns the clock, or the reason why there is none as one or two sentences; the first ``gpu=True`` says
            it in one warning, and CPU times go on. It is called once, on the thread that uses the device first. What
            it raises reaches that call: for a device that the user named.
        for_named_timers: Whether named timers, which have no ``gpu=True``, look for the device at their first start.
            False where a time on the device costs more than two events.
    """
    return LateDevice(search, for_named_timers=for_named_timers)


def device_of(device_clock: DeviceClock | LateDevice | None) -> EventPool | LateDevice | NullDevice:
    """What times the regions of a timer that was given this as its ``device_clock``."""
    if device_clock is None:
        return NULL_DEVICE
    if isinstance(device_clock, LateDevice):
        return device_clock
    from deep500_timing.devices._pool import pool_of

    return pool_of(device_clock)
