"""Reads new intervals from a timer, without a lock or a wait.

Only this module knows how the recorder stores them.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from deep500_timing._base.names import CPU, GPU

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

    from deep500_timing._recording.intervals import Intervals
    from deep500_timing._recording.recorder import Recorder, Region

_IN_FLIGHT = 1
"""Most intervals that may end between two reads."""
_IN_FUTURE_NS = 1_000_000_000
"""An interval that ends this long after the cut has a time of another clock. It is not held back."""


class Taken(NamedTuple):
    """The new intervals of one store."""

    region: str
    thread: int
    device: str
    pairs: NDArray[np.int64]
    """Shape ``(n, 2)``, contiguous: start and end in ns of the timer's clock."""
    counters: tuple[int, ...]
    """Recorded, failed, discarded, captured and dropped intervals in all."""
    store: int
    """Identifies region, thread and device of a timer."""
    handle: int
    """Identifies region and thread of a timer."""
    first: int
    """The number of the first interval in its store, from 0."""
    has_device: bool
    ordinals: Int64Array | None
    """For a device, shape ``(n,)``: the number of each host interval, -1 if unknown. None if all are unknown, and for
    the host."""


class _Cursor:
    """The position up to which a store was read."""

    __slots__ = ("before", "dropped", "gaps", "last_end_ns", "on_host", "seen", "store", "taken", "without")

    def __init__(self, store: Intervals) -> None:
        # For a device: the numbers of host intervals and of those without a device time at the last read, and the
        # ranges that contain the latter.
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
        """Continue with the store that replaced another."""
        self.before = self.counters()  # type: ignore[assignment]
        self.begin(store)


class Threads:
    """Numbers of threads: 0 is the main thread, the others follow in order of appearance."""

    def __init__(self) -> None:
        self.names: list[str] = [threading.main_thread().name]
        self._by_lane: dict[int, tuple[Any, int]] = {}
        self._by_ident: dict[int, int] = {threading.main_thread().ident or 0: 0}

    def number_of(self, lane: Any) -> int:
        """The number of a lane's thread. A lane that serves several threads in turn keeps its number.

        All threads share a named timer, whose identity is odd (``SHARED``). It counts for the main thread.
        """
        known = self._by_lane.get(id(lane))
        if known is not None:
            return known[1]
        if lane.ident % 2:
            return 0
        number = self.number_of_ident(lane.ident)
        self._by_lane[id(lane)] = (lane, number)  # Kept alive, so that its id stays unique.
        return number

    def number_of_ident(self, ident: int | None) -> int:
        """The number of the thread with an identifier, from ``threading.get_ident``."""
        number = None if ident is None else self._by_ident.get(ident)
        if number is None:
            number = len(self.names)
            self.names.append(next((one.name for one in threading.enumerate() if one.ident == ident), ""))
            if ident:
                self._by_ident[ident] = number
        return number


class Source:
    """One timer and the read positions of its stores."""

    def __init__(self, timer: Recorder, threads: Threads) -> None:
        self.timer: Any = timer
        self._threads = threads
        self._cursors: dict[tuple[int, str], tuple[Region, _Cursor]] = {}
        self._retired: deque[tuple[Region, str, Intervals]] = deque()
        self._recorded = 0

    def retire(self, region: Region, device: str, store: Intervals) -> None:
        """Queue a store that its region is about to replace. Called on the training thread."""
        self._retired.append((region, device, store))

    def collect_device(self, *, wait: bool) -> None:
        """Collect finished device times, or wait for all."""
        self.timer._device.collect(wait=wait)

    def has_anything(self) -> bool:
        return bool(self._retired) or any(region._intervals.count for region in self.timer._regions())

    @property
    def ended(self) -> int:
        """The approximate number of new host intervals."""
        recorded: int = self.timer._recorded()
        if recorded < self._recorded:  # The timer was reset.
            self._recorded = 0
        return recorded - self._recorded

    def take(self, cut_ns: int | None) -> Iterator[Taken]:
        """The new intervals that ended by the cut; all new intervals if it is None.

        The clock is read for the cut before the first store, so an interval comes with all intervals inside it.
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
            # The region is kept alive, so that its id stays unique.
            known = self._cursors[id(region), device] = (region, _Cursor(store))
        cursor = known[1]
        if cursor.store is not store:
            # The timer was reset: the former store does not change any more.
            yield self._read(region, device, cursor, None)
            cursor.renew(store)
        yield self._read(region, device, cursor, cut_ns)

    def open_regions(self, cut_ns: int) -> Iterator[tuple[int, str, int]]:
        """Start in ns, region and thread of the open regions at the cut. Call it before :meth:`take`."""
        for region in self.timer._regions():
            if not region.is_open:
                continue
            start_ns = int(region._start_ns)
            known = self._cursors.get((id(region), CPU))
            # A region that opens just now may still have the former start.
            if start_ns <= cut_ns and (known is None or start_ns >= known[1].last_end_ns):
                yield start_ns, region.name, self._threads.number_of(region._thread)

    def _read(self, region: Region, device: str, cursor: _Cursor, cut_ns: int | None) -> Taken:
        first = cursor.counters()[0]
        pairs, dropped = read_since(cursor, cut_ns)
        cursor.taken += dropped + len(pairs)
        cursor.dropped += dropped
        if len(pairs):
            cursor.last_end_ns = int(pairs[-1, 1])
        thread = self._threads.number_of(region._thread)
        ordinals = None if device == CPU else self._ordinals_of(region, cursor, len(pairs))
        return Taken(
            region.name,
            thread,
            device,
            pairs,
            cursor.counters(),
            id(cursor),
            id(region),
            first + dropped,
            not self.timer._device.is_null,
            ordinals,
        )

    def _ordinals_of(self, region: Region, cursor: _Cursor, count: int) -> Int64Array | None:
        # Device times arrive late and in order. The order identifies the host interval, except near intervals that have
        # no device time.
        store = region._device_intervals
        if store is None or cursor.store is not store or any(cursor.before):
            return None
        pending = self.timer._device.pending().get(id(store), 0)
        without = int(store.failed) + int(store.captured)
        on_host = int(region._intervals.count)
        if abs(on_host - (int(store.count) + pending + without)) > _IN_FLIGHT:
            return None
        if without > cursor.without:
            # They are among the host intervals since the last read.
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
    """The new intervals of a store that ended by the cut, oldest first."""
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
