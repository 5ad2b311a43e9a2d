"""The interface of a timer's device, the null device, and what a pool of events keeps of each stream.

This file runs as plain Python and, with the C types of ``_device.pxd``, compiled.
"""

from __future__ import annotations

from _thread import RLock
from collections import deque
from weakref import ref

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock

DRIFT = 50e-6
"""How far two quartz clocks may part at most, as a share of the time that passes: some 20 ppm each, and a margin."""


class EventPair:
    """Two events around a stretch of device time; used again for the next stretch.

    Args:
        name: The region's name, for warnings.
        now_ns: The host clock on which to place the times; None places each at its given start on the host.
    """

    __slots__ = ("anchor", "captured", "name", "now_ns", "queue", "start")

    def __init__(self, name: str, now_ns: Callable[[], int] | None = None) -> None:
        self.name = name
        self.now_ns = now_ns
        self.start: Any = None
        """The start event, while the pair is open."""
        self.queue: Any = None
        self.anchor: Any = None
        self.captured = False


class Device:
    """The interface of a timer's device. Here every method does nothing.

    Attributes:
        is_null: Whether there is no device behind this.
        is_lazy: Whether :meth:`find` returns the real device, see :class:`LazyDevice`.
    """

    __slots__ = ("is_lazy", "is_null")

    def __init__(self) -> None:
        self.is_null = True
        self.is_lazy = False

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
            sink: Receives the time when the device has passed the pair, by ``append(start_ns, end_ns, host_start_ns,
                host_end_ns)``, or a count in its attribute ``failed`` or ``captured``.
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


class EventAnchor:
    """An event with two bounds for its time on the host; the pairs behind it are placed by it.

    The device reaches the event after the record and before the first query that says so. Each query that says no,
    each end of a pair that was issued later than it ran, and the previous anchor (less the clocks' drift) narrow the
    bounds. The middle is the anchor's time, and half of the width is the uncertainty.
    """

    def __init__(self, event: Any, now_ns: Callable[[], int], low_ns: int, due_ns: int) -> None:
        """Start when the event is recorded: the device does not reach it before ``low_ns``."""
        self.event = event
        self.due_ns = due_ns
        """When the next anchor is due, on the host's clock."""
        self.previous: EventAnchor | None = None
        """The previous anchor, until this one is placed."""
        self.placed = False
        self.place_ns = 0
        self.retired = False
        """Whether a later anchor is placed: the event is free when its last user has been read."""
        self.now_ns = now_ns
        self.low_ns = low_ns
        self.high_ns = 0
        self.is_done = False
        self.users = 0
        """Pairs that it will place."""

    def done_before(self, high_ns: int) -> None:
        """Note that the device reached the event at this host time or earlier."""
        if not self.is_done or high_ns < self.high_ns:
            self.high_ns = high_ns
        self.is_done = True

    def narrow(self, earlier: EventAnchor, elapsed_ns: int) -> None:
        """Narrow the bounds by those of an anchor ``elapsed_ns`` earlier."""
        drift_ns = int(elapsed_ns * DRIFT)
        low_ns = max(self.low_ns, earlier.low_ns + elapsed_ns - drift_ns)
        high_ns = min(self.high_ns, earlier.high_ns + elapsed_ns + drift_ns)
        if low_ns <= high_ns:
            self.low_ns, self.high_ns = low_ns, high_ns

    def raise_low(self, low_ns: int) -> None:
        """Note that the device reached the event at this host time or later."""
        if low_ns > self.low_ns and (not self.is_done or low_ns <= self.high_ns):
            self.low_ns = low_ns

    def place(self) -> None:
        """Fix the event's time on the host's clock, for all pairs behind it."""
        self.place_ns = (self.low_ns + self.high_ns) // 2
        self.placed = True

    def uncertainty_ns(self) -> int:
        """Half of the width between the bounds."""
        return max(self.high_ns - self.low_ns, 0) // 2


class StreamQueue:
    """The events of one stream."""

    def __init__(self, stream: Hashable, handle: object, device: Hashable) -> None:
        """Start without events.

        Args:
            stream: The stream, as the clock returns it.
            handle: The stream's handle for the clock's record.
            device: The stream's device; events of two devices have no time between them.
        """
        self.stream = stream
        self.handle = handle
        self.device = device
        self.free: list[Any] = []
        self.pending: deque[tuple[Any, Any, Any, int, int, StreamQueue, EventAnchor | None]] = deque()
        self.known_done = 0
        """How many of the oldest pairs are known to be finished."""
        self.created = 0
        self.faults = 0
        """How many queries in a row have failed."""
        self.anchors: dict[Callable[[], int], EventAnchor] = {}
        """The latest anchor for each host clock."""
        self.latest: EventAnchor | None = None
        """The anchor that was used last."""
        self.uncertainty_ns = 0
        """The uncertainty of the time that was read last."""

    def give_back(self, start: Any, anchor: EventAnchor | None) -> None:
        """Free a start event; the anchor's is freed when no pair needs the anchor."""
        if anchor is None:
            self.free.append(start)
            return
        if start is not anchor.event:
            self.free.append(start)
        anchor.users -= 1
        if anchor.retired and anchor.users == 0:
            anchor.retired = False
            self.free.append(anchor.event)


class Captures:
    """The captures into graphs that are known to be active, on any thread.

    An adapter calls :meth:`begin` before each and :meth:`end` after it. Meanwhile no pool queries the device, waits for
    it or records: on CUDA a query from any thread ends the capture.
    """

    def __init__(self) -> None:
        self.under_way = 0
        """The number of active captures."""
        self.query_lock = RLock()
        """Held during a query, so that no capture begins between the check of ``under_way`` and the query."""
        self._graphs: dict[int, Any] = {}

    def begin(self, graph: object) -> None:
        """Note that a capture into this graph is about to begin."""
        with self.query_lock:
            # A graph that is dropped during its capture never ends it.
            key = id(graph)
            try:
                self._graphs[key] = ref(graph, lambda _: self._forget(key))
            except TypeError:
                self._graphs[key] = None
            self.under_way = len(self._graphs)

    def end(self, graph: object) -> None:
        self._forget(id(graph))

    def _forget(self, key: int) -> None:
        self._graphs.pop(key, None)
        self.under_way = len(self._graphs)

    def after_fork(self) -> None:
        self.query_lock = RLock()
        self._graphs = {}
        self.under_way = 0


captures = Captures()
"""The captures of the process."""
