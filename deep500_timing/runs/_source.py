"""What a log takes from a timer: the intervals that have ended since it last asked, without a lock or a wait.

This is the one place that knows how the recorder keeps them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region

CPU = "CPU"
GPU = "GPU"
_IN_FLIGHT = 1
"""Regions that may have ended between two readings."""
_IN_FUTURE_NS = 1_000_000_000
"""What ends later than this after the cut was not measured by the timer's clock: no use in waiting for it."""


class Taken(NamedTuple):
    """What one store of one region gave since the last time."""

    region: str
    thread: int
    device: str
    pairs: NDArray[np.int64]
    """Shape ``(n, 2)``, contiguous: start and end in ns of the timer's clock, as they were recorded."""
    counters: tuple[int, ...]
    """Recorded, failed, discarded, captured, dropped: since the region was new."""
    store: int
    """The same number for the same region, thread and device of the same timer."""
    handle: int
    """The same number for the same region and thread of the same timer, on every device."""
    first: int
    """Which of the store's intervals the first one is, from 0."""
    has_device: bool
    """Whether the timer has a device, whose times belong to the steps of these."""
    ordinals: Int64Array | None
    """Of a device, shape ``(n,)``: which of the region's host intervals, from 0, each is of; -1 where nobody can tell.
    None where none can, and of the host."""


class Open(NamedTuple):
    """A region that is open at the cut."""

    region: str
    thread: int
    start_ns: int


class _Cursor:
    """How far one store was read."""

    __slots__ = ("before", "dropped", "gaps", "last_end_ns", "on_host", "seen", "store", "taken", "without")

    def __init__(self, store: Intervals) -> None:
        # Of a device's store: how many host intervals there were, and how many of them had no time on the device, when
        # it was last read; and between which two of the host's those lie.
        self.on_host = 0
        self.without = 0
        self.gaps: list[tuple[int, int, int]] = []
        self.before = (0, 0, 0, 0, 0)
        self.last_end_ns = -(1 << 63)
        self.begin(store)

    def begin(self, store: Intervals) -> None:
        self.store = store
        self.seen = 0
        self.taken = 0
        self.dropped = 0

    def counters(self) -> tuple[int, ...]:
        store = self.store
        mine = (self.taken, int(store.failed), int(store.discarded), int(store.captured), self.dropped)
        return tuple(map(sum, zip(self.before, mine, strict=True)))

    def renew(self, store: Intervals) -> None:
        """Go on with the store that took the place of another."""
        self.before = self.counters()  # type: ignore[assignment]
        self.begin(store)


class Threads:
    """Numbers for threads: 0 is the main thread, the others in the order in which they were seen."""

    def __init__(self) -> None:
        """Know the main thread."""
        self.names: list[str] = [threading.main_thread().name]
        self._by_lane: dict[int, tuple[Any, int]] = {}
        self._by_ident: dict[int, int] = {threading.main_thread().ident or 0: 0}

    def number_of(self, lane: Any) -> int:
        """The number of the thread that a lane serves. One that serves several in turn keeps its number."""
        known = self._by_lane.get(id(lane))
        if known is not None:
            return known[1]
        number = self.number_of_ident(lane.ident)
        self._by_lane[id(lane)] = (lane, number)  # Held, so that its id stays its own.
        return number

    def number_of_ident(self, ident: int | None) -> int:
        """The number of the thread with an identifier, from ``threading.get_ident``."""
        number = None if ident is None else self._by_ident.get(ident)
        if number is None:
            number = len(self.names)
            self.names.append(_name_of_thread(ident))
            if ident:
                self._by_ident[ident] = number
        return number


class Source:
    """One timer, and how far each of its stores was read."""

    def __init__(self, timer: Recorder, threads: Threads) -> None:
        """Begin at the beginning: what was recorded before is taken as well."""
        self.timer = timer
        self._threads = threads
        self._cursors: dict[tuple[int, str], tuple[Region, _Cursor]] = {}
        self._retired: deque[tuple[Region, str, Intervals]] = deque()
        self._recorded = 0

    def retire(self, region: Region, device: str, store: Intervals) -> None:
        """Take the rest of a store that its region is about to give up (on the training thread: an append)."""
        self._retired.append((region, device, store))

    def collect_device(self, *, wait: bool) -> None:
        """Take in the times that a device has ready, or those that are still to come as well."""
        device: Any = getattr(self.timer, "_device", None)
        if device is not None:
            device.collect(wait=wait)

    def has_anything(self) -> bool:
        """Whether the timer has recorded anything at all."""
        return bool(self._retired) or any(region._intervals.count for region in self.timer._regions())

    @property
    def ended(self) -> int:
        """About how many intervals of the host have ended since they were last taken."""
        recorded: int = self.timer._recorded()
        if recorded < self._recorded:  # The timer was reset.
            self._recorded = 0
        return recorded - self._recorded

    def take(self, cut_ns: int | None) -> Iterator[Taken]:
        """What has ended up to the cut (all, if there is none) and was not taken before.

        A region that ended by the cut is taken together with all that ended inside it, on its thread: the cut is a
        reading of the clock from before the first store is read.
        """
        self._recorded = self.timer._recorded()
        while self._retired:
            region, device, store = self._retired.popleft()
            yield from self._take(region, device, store, None)
        for region in self.timer._regions():
            yield from self._take(region, CPU, region._intervals, cut_ns)
            if region._device_intervals is not None:
                yield from self._take(region, GPU, region._device_intervals, None)

    def _take(self, region: Region, device: str, store: Intervals, cut_ns: int | None) -> Iterator[Taken]:
        known = self._cursors.get((id(region), device))
        if known is None:
            # The region is held, so that its id stays its own.
            known = self._cursors[id(region), device] = (region, _Cursor(store))
        cursor = known[1]
        if cursor.store is not store:
            # The timer was reset; nobody writes to the former store any more.
            yield self._read(region, device, cursor, None)
            cursor.renew(store)
        yield self._read(region, device, cursor, cut_ns)

    def open_regions(self, cut_ns: int) -> Iterator[Open]:
        """The regions that are open at the cut. To be asked before :meth:`take`."""
        for region in self.timer._regions():
            if not region.is_open:
                continue
            start_ns = int(region._start_ns)
            known = self._cursors.get((id(region), CPU))
            # A region that opens at this moment may still say when it began the time before.
            if start_ns <= cut_ns and (known is None or start_ns >= known[1].last_end_ns):
                yield Open(region.name, self._threads.number_of(region._thread), start_ns)

    def _read(self, region: Region, device: str, cursor: _Cursor, cut_ns: int | None) -> Taken:
        first = cursor.counters()[0]
        pairs, dropped = read_since(cursor, cut_ns)
        cursor.taken += dropped + len(pairs)
        cursor.dropped += dropped
        if len(pairs):
            cursor.last_end_ns = int(pairs[-1, 1])
        thread = self._threads.number_of(region._thread)
        ordinals = None if device == CPU else self._ordinals_of(region, cursor, len(pairs))
        behind: Any = getattr(self.timer, "_device", None)
        return Taken(
            region.name,
            thread,
            device,
            pairs,
            cursor.counters(),
            id(cursor),
            id(region),
            first + dropped,
            behind is not None and not behind.is_null,
            ordinals,
        )

    def _ordinals_of(self, region: Region, cursor: _Cursor, count: int) -> Int64Array | None:
        # A device's time comes when it comes; which of the region's host intervals it is of, only the order tells. The
        # order tells nothing where some were not timed on the device at all.
        store = region._device_intervals
        if store is None or cursor.store is not store or any(cursor.before):
            return None
        device: Any = getattr(self.timer, "_device", None)
        pending = device.pending().get(id(store), 0) if device is not None else 0
        without = int(store.failed) + int(store.captured)
        on_host = int(region._intervals.count)
        if abs(on_host - (int(store.count) + pending + without)) > _IN_FLIGHT:
            return None
        if without > cursor.without:
            # They are among the host intervals since the last time, but which ones is not known.
            cursor.gaps.append((cursor.on_host - _IN_FLIGHT, on_host + _IN_FLIGHT, without - cursor.without))
        cursor.without, cursor.on_host = without, on_host
        ordinals = np.arange(cursor.taken - count, cursor.taken)
        unknown = np.zeros(count, dtype=np.bool_)
        for low, high, missing in cursor.gaps:
            unknown |= (ordinals >= low) & (ordinals < high - missing)
            ordinals[ordinals >= high - missing] += missing
        ordinals[unknown] = -1
        return ordinals


def read_since(cursor: _Cursor, cut_ns: int | None) -> tuple[Int64Array, int]:
    """The intervals of a store that had ended by the cut and were not taken yet, oldest first.

    Returns:
        Shape ``(n, 2)``: start and end in ns; and how many were aggregated away before they could be taken.
    """
    store = cursor.store
    ints, recorded, dropped = store.since(cursor.seen)
    pairs = np.frombuffer(ints, dtype=np.int64).reshape(-1, 2)
    if cut_ns is not None:
        late = (pairs[:, 1] > cut_ns) & (pairs[:, 1] <= cut_ns + _IN_FUTURE_NS)
        on_time = int(late.argmax()) if late.any() else len(pairs)
        recorded -= len(pairs) - on_time
        pairs = pairs[:on_time]
    store.took(recorded)
    cursor.seen = recorded
    return pairs, dropped


def _name_of_thread(ident: int | None) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return thread.name
    return ""
