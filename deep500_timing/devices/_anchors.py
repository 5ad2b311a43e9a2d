"""The time between a device's events, and their place on the host's clock.

Every two seconds the start of a pair serves as an anchor: queries give two bounds for the host time at which the device
reached it. The pairs behind it are placed by it.

This file runs as plain Python and, with the C types of ``_anchors.pxd``, compiled.
"""

from __future__ import annotations

from deep500_timing.devices._queue import EventAnchor, captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._queue import StreamQueue

_ANCHOR_NS = 2_000_000_000
"""Time between two anchors. Events give a float32 of milliseconds, which is exact to 0.25 µs at 4 s."""
_ANCHOR_QUERIES = 8
"""Queries right after an anchor is recorded: an idle stream reaches it within microseconds."""


def record_function(clock: Any) -> Callable[[Any, Any], object]:
    """Return a clock's function that records an event into the handle of a stream."""
    found: Callable[[Any, Any], object] = getattr(clock, "record_handle", None) or clock.record
    return found


class Anchors:
    """Sets the anchors of one device's clock, and reads the time between its events."""

    __slots__ = ("_clock", "_elapsed_ms", "_record")

    def __init__(self, clock: DeviceClock) -> None:
        self._clock = clock
        self._elapsed_ms: Callable[[Any, Any], float] | None = None
        self._record: Callable[[Any, Any], object] = clock.record

    def prepare(self) -> None:
        """Look up the functions that the clock may have rebound at its first use."""
        self._elapsed_ms = getattr(self._clock, "elapsed_ms", None)
        self._record = record_function(self._clock)

    def take(self, queue: StreamQueue, now_ns: Any, event: Any) -> EventAnchor:
        """Return the anchor for a pair on this queue, with one more user: the current one, or a new one.

        A new one is recorded, and its event is the start of the pair.
        """
        anchor = queue.anchors.get(now_ns)
        if anchor is not None and not anchor.is_due:
            anchor.users += 1
            queue.latest = anchor
            if not anchor.is_done:
                self.ask(anchor)
            return anchor
        low_ns = now_ns()
        anchor = EventAnchor(event, now_ns, low_ns, low_ns + _ANCHOR_NS, anchor)
        self._record(event, queue.handle)
        anchor.users = 1
        queue.anchors[now_ns] = queue.latest = anchor
        for _ in range(_ANCHOR_QUERIES):
            if self.ask(anchor):
                break
        return anchor

    def ask(self, anchor: EventAnchor) -> bool:
        """Whether the device has reached the anchor. Either answer narrows its bounds."""
        with captures.query_lock:
            if captures.under_way:
                return False
            try:
                low_ns = anchor.now_ns()
                done = bool(self._clock.is_done(anchor.event))
                if done:
                    anchor.done_before(anchor.now_ns())
                else:
                    anchor.raise_low(low_ns)
            except Exception:
                return False  # Reading the pair reports the fault.
            return done

    def place(self, queue: StreamQueue, anchor: EventAnchor) -> None:
        """Fix the place of an anchor on the host's clock; the device has passed a pair behind it."""
        if not anchor.is_done:
            anchor.done_before(anchor.now_ns())
        previous = anchor.previous
        anchor.previous = None
        if previous is not None:
            if not previous.placed:
                self.place(queue, previous)
            try:
                anchor.narrow(previous, self.elapsed_ns(previous.event, anchor.event))
            finally:
                if previous.users == 0:
                    queue.free.append(previous.event)
                else:
                    previous.retired = True
        anchor.place()
        queue.uncertainty_ns = anchor.uncertainty_ns()

    def elapsed_ns(self, start: Any, end: Any) -> int:
        """The time between two finished events; negative if the device passed them in reverse."""
        # Called twice per pair: a C function costs half of a method around it.
        if self._elapsed_ms is None:
            return int(self._clock.elapsed_ns(start, end))
        elapsed_ms = self._elapsed_ms(start, end)
        return int(elapsed_ms * 1e6 + 0.5)
