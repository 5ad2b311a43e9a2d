"""Device times by pairs of events from a pool.

The end of a pair only queues its second event. ``_collecting.py`` reads finished pairs later and frees their events, so
the number of events is bounded by the work in flight, and the training thread neither waits nor allocates in the steady
state. ``_anchors.py`` places the pairs on the host's clock.

This file runs as plain Python and, with the C types of ``_pool.pxd``, compiled.
"""

from __future__ import annotations

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.devices._anchors import Anchors, record_function
from deep500_timing.devices._collecting import Collector
from deep500_timing.devices._null import Device
from deep500_timing.devices._queue import StreamQueue, captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

    import cython

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._queue import EventPair
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    import ctypes

    def keep_for_good(event: Any) -> None:
        """Take a reference that is never released, not even when the interpreter ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


class EventPool(Device):
    """The events of one device clock, shared by every timer of the process that uses it; see :func:`pool_of`."""

    __slots__ = (
        "_anchors",
        "_clock",
        "_collector",
        "_device_of",
        "_handle_of",
        "_is_capturing",
        "_last",
        "_queues",
        "_record",
        "_stream",
    )

    def __init__(self, clock: DeviceClock) -> None:
        self.is_null = False
        self.is_lazy = False
        self.for_named_timers = True
        self._clock = clock
        self._anchors = Anchors(clock)
        self._collector = Collector(clock, self._anchors)
        self._queues: dict[Hashable, StreamQueue] = {}
        self._last: StreamQueue | None = None
        # Called at the ends of regions; looked up at the first use of the device.
        self._stream: Callable[[], Hashable] | None = None
        self._is_capturing: Callable[[], bool] | None = None
        self._record: Callable[[Any, Any], object] | None = None
        self._handle_of: Callable[[Hashable], object] | None = None
        self._device_of: Callable[[Hashable], Hashable] | None = None

    @property
    def clock(self) -> DeviceClock:
        return self._clock

    def _prepare(self) -> None:
        # The first call may rebind the clock's functions.
        clock: Any = self._clock
        clock.stream()
        self._handle_of = clock.handle_of if hasattr(clock, "record_handle") else None
        self._device_of = getattr(clock, "device_of", None)
        self._anchors.prepare()
        self._collector.prepare()
        self._record = record_function(clock)
        self._is_capturing = clock.is_capturing
        self._stream = clock.stream

    def _current_queue(self) -> StreamQueue | None:
        # The current stream's queue, or None while the stream is captured.
        if self._stream is None:
            self._prepare()
        stream = self._stream()  # type: ignore[misc]
        if self._is_capturing():  # type: ignore[misc]
            return None
        queue = self._last
        if queue is not None and queue.stream == stream:
            return queue
        queue = self._queues.get(stream)
        if queue is None:
            handle = stream if self._handle_of is None else self._handle_of(stream)
            device = None if self._device_of is None else self._device_of(stream)
            queue = self._queues.setdefault(stream, StreamQueue(stream, handle, device))
        self._last = queue
        return queue

    def begin(self, pair: EventPair) -> None:
        pair.start = None
        pair.anchor = None
        pair.captured = captures.under_way != 0
        if pair.captured:
            return
        event = queue = None
        try:
            queue = self._current_queue()
            if queue is None:
                pair.captured = True
                return
            try:
                event = queue.free.pop()
            except IndexError:
                event = self._new_event(queue)
            if pair.now_ns is not None:
                anchor = queue.latest
                if anchor is None or anchor.now_ns is not pair.now_ns or not anchor.is_done or anchor.is_due:
                    anchor = self._anchors.take(queue, pair.now_ns, event)
                else:
                    anchor.users += 1
                pair.anchor = anchor
                if anchor.event is not event:
                    self._record(event, queue.handle)  # type: ignore[misc]
            else:
                self._record(event, queue.handle)  # type: ignore[misc]
        except BaseException as error:
            if queue is not None and event is not None:
                queue.give_back(event, pair.anchor)
            pair.anchor = None
            if not isinstance(error, Exception):
                raise
            self._fault("recording the start of", pair, error)
            return
        pair.queue = queue
        pair.start = event

    def end(self, pair: EventPair, sink: Any, start_ns: int, end_ns: int) -> None:
        start = pair.start
        if start is None:
            if pair.captured:
                sink.captured += 1
            else:
                sink.failed += 1
            return
        pair.start = None
        start_queue = pair.queue
        event = queue = None
        try:
            if captures.under_way == 0:
                queue = self._current_queue()
            if queue is None:
                sink.captured += 1
                start_queue.give_back(start, pair.anchor)
                return
            if queue is not start_queue and queue.device != start_queue.device:
                raise ValueError(
                    f"it ended on another device ({queue.device}) than it began on ({start_queue.device}), and events "
                    "of two devices have no time between them"
                )
            try:
                event = queue.free.pop()
            except IndexError:
                event = self._new_event(queue)
            self._record(event, queue.handle)  # type: ignore[misc]
        except BaseException as error:
            sink.failed += 1
            start_queue.give_back(start, pair.anchor)
            if queue is not None and event is not None:
                queue.free.append(event)
            if not isinstance(error, Exception):
                raise
            self._fault("recording the end of", pair, error)
            return
        queue.pending.append((start, event, sink, start_ns, end_ns, start_queue, pair, pair.anchor))
        if pair.anchor is not None:
            anchor = start_queue.latest
            if anchor is not None:
                if not anchor.is_done:
                    self._anchors.ask(anchor)
                elif end_ns >= anchor.due_ns and anchor is pair.anchor:
                    anchor.is_due = True
        if not queue.free or not start_queue.free:
            self._collector.reclaim(queue)

    def drop(self, pair: EventPair) -> None:
        start = pair.start
        pair.start = None
        if start is not None:
            pair.queue.give_back(start, pair.anchor)

    def _new_event(self, queue: StreamQueue) -> Any:
        event = self._clock.new_event(queue.stream)
        # Destroying an event can hang on a stuck device, and in a forked child it belongs to the parent's context.
        keep_for_good(event)
        queue.created += 1
        return event

    def collect(self, *, wait: bool) -> None:
        self._collector.collect(self._queues, wait=wait)

    def collect_for(self, sink: Any) -> None:
        self._collector.collect(self._queues, wait=True, sink=sink)

    def pending(self) -> dict[int, int]:
        return self._collector.pending(self._queues)

    @property
    def events(self) -> int:
        return sum(queue.created for queue in list(self._queues.values()))

    @property
    def uncertainty_ns(self) -> int:
        return max((queue.uncertainty_ns for queue in list(self._queues.values())), default=0)

    def _fault(self, doing: str, pair: EventPair, error: Exception) -> None:
        warn_once(
            f"{doing.capitalize()} region {pair.name!r} on the device {self._clock.name!r} failed; device times that "
            f"cannot be read are counted as failed, CPU times go on: {error}",
            key=f"record {self._clock.name}",
        )

    def __repr__(self) -> str:
        return f"<EventPool of {self._clock.name!r}: {self.events} events>"

    def abandon(self) -> None:
        """Forget every event without destroying it."""
        self._queues = {}
        self._last = None
        self._collector.abandon()


_pools: dict[DeviceClock, EventPool] = {}


def pool_of(clock: DeviceClock) -> EventPool:
    """Return the pool of a device clock, which lives as long as the process."""
    pool = _pools.get(clock)
    if pool is None:
        pool = _pools[clock] = EventPool(clock)
    return pool


def _abandon_after_fork() -> None:
    # Events and captures belong to the parent's context.
    captures.after_fork()
    for pool in _pools.values():
        pool.abandon()


after_fork(_abandon_after_fork)
