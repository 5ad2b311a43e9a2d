"""Device times by pairs of events from a pool.

The end of a pair only queues its second event. Later queries, which never wait, find the pairs that the device has
passed; their events are free again. So the number of events is bounded by the work in flight, and the training thread
neither waits nor allocates in the steady state. Only a method that the user calls for device times waits.

Every two seconds the start of a pair serves as an anchor: queries give two bounds for the host time at which the device
reached it. The pairs behind it are placed on the host's clock by it.

This file runs as plain Python and, with the C types of ``_pool.pxd``, compiled.
"""

from __future__ import annotations

from _thread import RLock
from bisect import bisect_left
from contextlib import suppress

from deep500_timing._base.fork import after_fork
from deep500_timing._base.warn import warn_once
from deep500_timing.devices._device import Device, EventAnchor, StreamQueue, captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Any

    import cython

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._device import EventPair
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    import ctypes

    def keep_for_good(event: Any) -> None:
        """Take a reference that is never released, not even when the interpreter ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


_ANCHOR_NS = 2_000_000_000
"""Time between two anchors. Events give a float32 of milliseconds, which is exact to 0.25 µs at 4 s."""
_ANCHOR_QUERIES = 8
"""Queries right after an anchor is recorded: an idle stream reaches it within microseconds."""
_SPARE_PAIRS = 16
"""Pairs that a stream gets before it queries older ones; half as many regions share one query."""
_BATCH_PAIRS = 16
"""Most pairs to read at the end of one region, so that a backlog does not stall the training thread."""
_DOUBTS = 16
"""How many queries in a row may fail before a pair counts as failed."""


class EventPool(Device):
    """The events of one device clock, shared by every timer of the process that uses it; see :func:`pool_of`.

    One thread at a time reads finished pairs. A query that fails may mean a capture that is not known here. The pair
    stays pending, and counts as failed only after many failed queries in a row.
    """

    def __init__(self, clock: DeviceClock) -> None:
        self.is_null = False
        self.is_lazy = False
        self._clock = clock
        self._queues: dict[Hashable, StreamQueue] = {}
        self._last: StreamQueue | None = None
        self._stream: Any = None  # Looked up at the first use of the device: the clock may rebind them then.
        self._stalls = False
        """Whether reading a time stops the device. Then only methods that may wait read times."""
        # The training thread only tries it, and never waits for it. A signal handler may run while its thread holds it.
        self._lock: Any = RLock()

    @property
    def clock(self) -> DeviceClock:
        return self._clock

    def _prepare(self) -> None:
        clock: Any = self._clock
        clock.stream()
        self._handle_of = clock.handle_of if hasattr(clock, "record_handle") else None
        self._device_of = getattr(clock, "device_of", None)
        self._elapsed_ms = getattr(clock, "elapsed_ms", None)
        self._device_now = getattr(clock, "device_now", None)
        self._stalls = bool(getattr(clock, "stalls", False))
        self._record: Any = getattr(clock, "record_handle", None) or clock.record
        self._is_capturing: Any = clock.is_capturing
        self._stream = clock.stream

    def _current_queue(self) -> StreamQueue | None:
        # The current stream's queue, or None while the stream is captured.
        if not self._stream:
            self._prepare()
        stream = self._stream()
        if self._is_capturing():
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
                self._anchor(pair, queue, event)
            if pair.anchor is None or pair.anchor.event is not event:
                self._record(event, queue.handle)
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
            self._record(event, queue.handle)
        except BaseException as error:
            sink.failed += 1
            start_queue.give_back(start, pair.anchor)
            if queue is not None and event is not None:
                queue.free.append(event)
            if not isinstance(error, Exception):
                raise
            self._fault("recording the end of", pair, error)
            return
        queue.pending.append((start, event, sink, start_ns, end_ns, start_queue, pair.anchor))
        anchor = start_queue.latest
        if anchor is not None and not anchor.is_done:
            self._ask(anchor)
        if not queue.free or not start_queue.free:
            self._reclaim(queue)

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

    # --- anchors ------------------------------------------------------------------------------------------------------

    def _anchor(self, pair: EventPair, queue: StreamQueue, event: Any) -> None:
        """Give a pair its anchor: the latest of its host clock, or a new one, whose event is the start of the pair."""
        now_ns: Any = pair.now_ns
        low_ns = now_ns()
        anchor = queue.latest
        if anchor is None or anchor.now_ns is not now_ns:
            anchor = queue.anchors.get(now_ns)
        if anchor is not None and not (anchor.is_done and low_ns >= anchor.due_ns):
            anchor.users += 1
            pair.anchor = queue.latest = anchor
            if not anchor.is_done:
                self._ask(anchor)
            return
        anchor = EventAnchor(event, now_ns, low_ns, low_ns + _ANCHOR_NS)
        self._record(event, queue.handle)
        # From here to the queries nothing is called: another thread of this stream may have made one during the record,
        # and each anchor frees the event of the one before.
        unused = None
        if now_ns in queue.anchors:
            before = queue.anchors[now_ns]
            anchor.previous = before
            if before.users == 0 and not before.placed:  # No pair is left that would place it.
                anchor.previous, unused = before.previous, before.event
        anchor.users = 1
        pair.anchor = queue.anchors[now_ns] = queue.latest = anchor
        if unused is not None:
            queue.free.append(unused)
        for _ in range(_ANCHOR_QUERIES):
            if self._ask(anchor):
                break

    def _ask(self, anchor: EventAnchor) -> bool:
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

    def _place(self, queue: StreamQueue, anchor: EventAnchor) -> None:
        """Fix the place of an anchor on the host's clock; the device has passed a pair behind it."""
        if not anchor.is_done:
            anchor.done_before(anchor.now_ns())
        previous = anchor.previous
        anchor.previous = None
        if previous is not None:
            if not previous.placed:
                self._place(queue, previous)
            try:
                anchor.narrow(previous, self._elapsed_ns(previous.event, anchor.event))
            finally:
                if previous.users == 0:
                    queue.free.append(previous.event)
                else:
                    previous.retired = True
        anchor.place()
        queue.uncertainty_ns = anchor.uncertainty_ns()

    def _elapsed_ns(self, start: Any, end: Any) -> int:
        """The time between two finished events; negative if the device passed them in reverse."""
        # Called twice per pair: a C function costs half of a method around it.
        if self._elapsed_ms is None:
            return int(self._clock.elapsed_ns(start, end))
        elapsed_ms = self._elapsed_ms(start, end)
        return int(elapsed_ms * 1e6 + 0.5)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _reclaim(self, queue: StreamQueue) -> None:
        """Read a few finished pairs of a queue without a free event. Never wait."""
        # At most one query per ended region, and none while events are free. The query is for the middle of the queue:
        # a yes frees half of the pairs; a no lets the pool grow by one pair, until it holds twice the work in flight
        # and the middle is always done. After a query that fails, the reading finds how far the device is.
        if len(queue.pending) < _SPARE_PAIRS or self._stalls:
            return
        if self._lock._is_owned() or not self._lock.acquire(False):
            return
        try:
            with captures.query_lock:
                count = len(queue.pending)
                if captures.under_way or count == 0:  # A signal handler may have collected meanwhile.
                    return
                if not queue.known_done:
                    middle = count // 2
                    try:
                        if not self._clock.is_done(queue.pending[middle][1]):
                            queue.faults = 0
                            return
                        queue.faults = 0
                    except Exception as error:
                        self._warn_of_query(error)
                    queue.known_done = middle + 1
                self._read_oldest(queue, min(queue.known_done, _BATCH_PAIRS))
        finally:
            self._lock.release()

    def _warn_of_query(self, error: Exception) -> None:
        # Perhaps in a capture that is not known here.
        warn_once(
            f"Asking the device {self._clock.name!r} how far it is failed; its times stay pending: {error}",
            key=f"query {self._clock.name}",
        )

    def _read_oldest(self, queue: StreamQueue, count: int) -> None:
        # Up to the first that the device has not passed.
        for _ in range(count):
            entry = queue.pending[0]
            if not self._settle(queue, entry):
                return
            del queue.pending[0]
            queue.free.append(entry[1])
            if queue.known_done:
                queue.known_done -= 1
            start_queue = entry[5]
            start_queue.give_back(entry[0], entry[6])

    def _settle(self, queue: StreamQueue, entry: Any) -> bool:
        # Keep the time of a pair, or count it as failed. False if the device has not passed it.
        clock: Any = self._clock
        start, end, sink, start_ns, end_ns, start_queue, anchor = entry
        placed_ns, device = start_ns, None
        try:
            if self._device_now is not None:
                device = self._device_now()
            duration_ns = self._elapsed_ns(start, end)
            if anchor is not None and duration_ns >= 0:
                since_ns = 0 if start is anchor.event else self._elapsed_ns(anchor.event, start)
                # The device cannot have reached it before the host issued it.
                anchor.raise_low(end_ns - duration_ns - since_ns)
                if not anchor.placed:
                    self._place(start_queue, anchor)
                placed_ns = anchor.place_ns + since_ns
        except Exception as error:
            if device is not None:
                with suppress(Exception):
                    clock.back_to(device)  # The comparison may have changed it.
            # Not finished: two threads that share a stream may queue their pairs in another order than they recorded
            # them, and a start may be on another stream.
            try:
                done = clock.is_done(start) and clock.is_done(end)
            except Exception as fault:
                self._warn_of_query(fault)
                queue.faults += 1
                done = queue.faults >= _DOUBTS
            if not done:
                queue.known_done = 0
                return False
            sink.failed += 1
            warn_once(
                f"Reading a time on the device {clock.name!r} failed and is counted as failed: {error}",
                key=f"elapsed {clock.name}",
            )
            return True
        if duration_ns < 0:
            # It ended on another stream, which was ahead of the first.
            sink.failed += 1
            warn_once(
                f"A region on the device {clock.name!r} ended before it began, since it ended on another "
                "stream than it began on; it is counted as failed. End it on the same stream, or let that "
                "stream wait for the first.",
                key=f"negative {clock.name}",
            )
        else:
            sink.append(placed_ns, placed_ns + duration_ns, start_ns, end_ns)
        return True

    def collect(self, *, wait: bool) -> None:
        self._collect(wait, None)

    def collect_for(self, sink: Any) -> None:
        self._collect(True, sink)

    def _collect(self, wait: bool, sink: Any) -> None:
        # Of a sink, its pairs alone, and nothing queued after them.
        if self._stalls and not wait:
            return
        # A signal handler must not read pairs that its own thread is reading.
        if self._lock._is_owned() or not self._lock.acquire(wait):
            return
        try:
            for queue in list(self._queues.values()):
                if not self._can_query():
                    return
                count = len(queue.pending)
                if sink is not None:  # the pairs up to the last one for it
                    of_sink = (n for n, pair in enumerate(list(queue.pending), 1) if _owner_of(pair[2]) is sink)
                    count = max(of_sink, default=0)
                if sink is not None and count == 0:
                    continue
                if wait:
                    self._wait_for(queue, count)
                with captures.query_lock:
                    if captures.under_way:
                        return
                    done = self._count_done(queue)
                    self._read_oldest(queue, done if sink is None else min(count, done))
        finally:
            self._lock.release()

    def _can_query(self) -> bool:
        if captures.under_way:
            return False
        try:
            return not self._clock.is_capturing()  # A query would break the capture.
        except Exception:
            return False

    def _wait_for(self, queue: StreamQueue, count: int) -> None:
        # Wait for the first ``count`` pairs.
        try:
            pairs = list(queue.pending)[:count]
            if pairs:
                self._clock.wait(pairs[len(pairs) - 1][1])
            # Streams are in order, but a start may be on another stream.
            for start, _, _, _, _, start_queue, _ in pairs:
                if start_queue is not queue:
                    self._clock.wait(start)
        except Exception as error:
            warn_once(
                f"Waiting for the device {self._clock.name!r} failed; times of finished work are reported: {error}",
                key=f"wait {self._clock.name}",
            )

    def _count_done(self, queue: StreamQueue) -> int:
        # The newest first: mostly one query answers for all.
        pending, is_done = queue.pending, self._clock.is_done
        done = count = len(pending)
        if not count:
            return 0
        try:
            if not is_done(pending[count - 1][1]):
                done = bisect_left(range(count - 1), True, key=lambda place: not is_done(pending[place][1]))
        except Exception as error:
            self._warn_of_query(error)
            return count  # The reading finds how far the device is.
        queue.faults = 0
        return done

    def pending(self) -> dict[int, int]:
        counts: dict[int, int] = {}
        for queue in list(self._queues.values()):
            for entry in list(queue.pending):
                key = id(_owner_of(entry[2]))
                counts[key] = counts.get(key, 0) + 1
        return counts

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
        """Forget every event without destroying it, in a forked child."""
        self._queues = {}
        self._last = None
        self._lock = RLock()


def _owner_of(sink: Any) -> Any:
    # Its times are asked for by its owner; a sink without one owns itself.
    return getattr(sink, "owner", sink)


_pools: dict[DeviceClock, EventPool] = {}


def pool_of(clock: DeviceClock) -> EventPool:
    """Return the pool of a device clock, which lives as long as the process."""
    return _pools.get(clock) or _pools.setdefault(clock, EventPool(clock))


@after_fork
def _abandon_after_fork() -> None:
    # Events and captures belong to the parent's context.
    captures.after_fork()
    for pool in _pools.values():
        pool.abandon()
