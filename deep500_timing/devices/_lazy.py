"""A device that is looked for when it is first used, so that making a timer starts nothing and imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deep500_timing._base.warn import warn_once
from deep500_timing.devices._null import NULL_DEVICE, Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._queue import EventPair


class LazyDevice(Device):
    """Stands in for a device until the first region on it begins; only that starts the search.

    Until then it reads as no device (``is_null`` is True, ``clock`` is None, nothing is pending), and asking for any
    of it searches nothing. A timer replaces it by what :meth:`find` gives as soon as it needs the device; whoever goes
    on using it is handed on to that.
    """

    __slots__ = ("_found", "reason", "search")

    def __init__(self, search: Callable[[], DeviceClock | str], *, for_named_timers: bool = True) -> None:
        """Use :func:`lazy_device`."""
        super().__init__()
        self.is_lazy = True
        self.for_named_timers = for_named_timers
        self.search = search
        self.reason = ""
        """Why there is no device, after a search that found none."""
        self._found: Device | None = None

    @property
    def clock(self) -> DeviceClock | None:
        """The clock that was found, None before the search."""
        return None if self._found is None else self._found.clock

    @property
    def events(self) -> int:
        """How many events were created."""
        return 0 if self._found is None else self._found.events

    @property
    def uncertainty_ns(self) -> int:
        """As the device's that was found."""
        return 0 if self._found is None else self._found.uncertainty_ns

    def find(self) -> Device:
        """Search, unless that was done before, and return the device: a pool, or the null device.

        Raises:
            Exception: What the search raises, such as ``DeviceUnavailableError`` for a device that was named and is
                not there. The next call searches again.
        """
        if self._found is None:
            found = self.search()
            if isinstance(found, str):
                self.reason = found
                self._found = NULL_DEVICE
            else:
                self._found = device_of(found)
                self.is_null = False
        return self._found

    def find_for_regions(self) -> Device:
        """As :meth:`find`, with one warning that gives the reason if there is no device."""
        found = self.find()
        if found.is_null:
            warn_once(f"Timing a region with gpu=True: {self.reason}", key=f"no device {self.reason}")
        return found

    def begin(self, pair: EventPair) -> None:
        """Search if need be, and begin on the device that was found."""
        self.find_for_regions().begin(pair)

    def end(self, pair: EventPair, sink: Any, start_ns: int, end_ns: int) -> None:
        """End on the device that was found."""
        if self._found is not None:
            self._found.end(pair, sink, start_ns, end_ns)

    def drop(self, pair: EventPair) -> None:
        """Take back the start of a pair."""
        if self._found is not None:
            self._found.drop(pair)

    def collect(self, *, wait: bool) -> None:
        """Collect what is done."""
        if self._found is not None:
            self._found.collect(wait=wait)

    def collect_for(self, sink: Any) -> None:
        """Collect the pairs that are for ``sink``."""
        if self._found is not None:
            self._found.collect_for(sink)

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way."""
        return {} if self._found is None else self._found.pending()

    def __repr__(self) -> str:
        """Show what was found, if anybody looked."""
        return f"<LazyDevice: {self._found or 'not looked for yet'}>"

    def __eq__(self, other: object) -> bool:
        """Equal ones make the same search."""
        return isinstance(other, LazyDevice) and self.search == other.search

    def __hash__(self) -> int:
        """As equality has it."""
        return hash(self.search)

    def __reduce__(self) -> Any:
        """A copy looks for its device anew, in the process that it is in."""
        return _rebuild, (self.search, self.for_named_timers)


def _rebuild(search: Callable[[], DeviceClock | str], for_named_timers: bool) -> LazyDevice:
    return LazyDevice(search, for_named_timers=for_named_timers)


def lazy_device(search: Callable[[], DeviceClock | str], *, for_named_timers: bool = True) -> LazyDevice:
    """What to pass as ``device_clock`` of a timer whose device is to be looked for at the first ``gpu=True``.

    ::

        Timer(device_clock=lazy_device(lambda: clocks.get("worker")()))

    Args:
        search: Returns the clock, or the reason why there is none as one or two sentences; the first ``gpu=True`` says
            it in one warning, and CPU times go on. It is called once, on the thread that uses the device first. What
            it raises reaches that call: for a device that the user named.
        for_named_timers: Whether named timers, which have no ``gpu=True``, look for the device at their first start.
            False where a time on the device costs more than two events.
    """
    return LazyDevice(search, for_named_timers=for_named_timers)


def device_of(device_clock: DeviceClock | LazyDevice | None) -> Device:
    """What times the regions of a timer that was given this as its ``device_clock``."""
    if device_clock is None:
        return NULL_DEVICE
    if isinstance(device_clock, LazyDevice):
        return device_clock
    from deep500_timing.devices._pool import pool_of

    return pool_of(device_clock)
