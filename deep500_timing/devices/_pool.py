"""Times on a device: pairs of events from a pool, collected without ever waiting.

A region's end only queues its second event. Pairs that the device has passed are collected later, all at once, by a
query that answers at once; then their events serve again. So the events in use are bounded by the work in flight,
whatever the length of the run, and the training thread neither waits nor allocates in the steady state.

This file runs as plain Python and, with the C types of ``_pool.pxd``, compiled: what a region with ``gpu=True`` costs
beyond the calls of the device is then 0.2 µs a pair instead of 0.7.
"""

from __future__ import annotations

import os
from _thread import allocate_lock, get_ident
from collections import deque

from deep500_timing._ground.warn import warn_once
from deep500_timing._recording.intervals import Intervals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Hashable
    from typing import Any

    from deep500_timing._ground.protocols import DeviceClock
    from deep500_timing._recording.recorder import Region

_SPARE_PAIRS = 16
"""Pairs that a stream gets before it asks whether older ones are done; half as many regions share one query."""
_BATCH_PAIRS = 32
"""Pairs that are read at most at the end of one region, so that a backlog does not stall the training thread."""


class _CapturedStart:
    """Stands for the start event of a region that began while its stream was being captured."""


CAPTURED = _CapturedStart()


class StreamQueue:
    """The events of one stream: those that are free, and the pairs that the device has yet to pass, in order."""

    __slots__ = ("created", "free", "known_done", "pending", "stream")

    def __init__(self, stream: Hashable) -> None:
        self.stream = stream
        self.free: list[Any] = []
        self.pending: deque[tuple[Any, Any, Intervals, int, StreamQueue]] = deque()
        self.known_done = 0
        self.created = 0


class EventPool:
    """The events of one device clock, shared by every timer of the process that uses it.

    Attributes:
        clock: The device's clock.
        is_null: False; see :class:`NullDevice`.
        is_late: False; see :class:`LateDevice`.
    """

    is_null = False
    is_late = False
    for_named_timers = True

    def __init__(self, clock: DeviceClock) -> None:
        """Start with no events; use :func:`pool_of`."""
        self.clock = clock
        self._queues: dict[Hashable, StreamQueue] = {}
        # Only ever tried on the training thread, never waited for.
        self._collecting = allocate_lock()
        self._collector = 0
        """The thread that has, or had, the lock: a signal handler may run in the middle of its collecting."""

    def find(self) -> EventPool:
        """Itself: it was found."""
        return self

    def find_for_regions(self) -> EventPool:
        """Itself: it was found."""
        return self

    # --- on the training thread ---------------------------------------------------------------------------------

    def begin(self, region: Region) -> None:
        """Record the start event of a region; a fault leaves the region without a device time."""
        clock = self.clock
        region.mark = None
        event = queue = None
        try:
            stream = clock.stream()
            if clock.is_capturing():
                region.mark = CAPTURED
                return
            queue = self._queues.get(stream) or self._queues.setdefault(stream, StreamQueue(stream))
            try:
                event = queue.free.pop()
            except IndexError:
                event = self._new_event(queue)
            clock.record(event, stream)
        except Exception as error:
            if queue is not None and event is not None:
                queue.free.append(event)
            self._fault("recording the start of", region, error)
            return
        region.mark = event
        region.mark_lane = queue

    def end(self, region: Region, keep_last: int, skip_first: int) -> None:
        """Record the end event of a region and queue the pair."""
        clock = self.clock
        mark = region.mark
        region.mark = None
        intervals = region.gpu_intervals
        if intervals is None:
            intervals = region.gpu_intervals = Intervals(keep_last, skip_first)
        if mark is None:
            intervals.failed += 1
            return
        start_queue = region.mark_lane
        event = queue = None
        if mark is CAPTURED:
            intervals.captured += 1
            return
        try:
            stream = clock.stream()
            if clock.is_capturing():
                intervals.captured += 1
                start_queue.free.append(mark)
                return
            if start_queue.stream == stream:
                queue = start_queue
            else:
                queue = self._queues.get(stream) or self._queues.setdefault(stream, StreamQueue(stream))
            try:
                event = queue.free.pop()
            except IndexError:
                event = self._new_event(queue)
            clock.record(event, stream)
        except Exception as error:
            intervals.failed += 1
            start_queue.free.append(mark)
            if queue is not None and event is not None:
                queue.free.append(event)
            self._fault("recording the end of", region, error)
            return
        queue.pending.append((mark, event, intervals, region.start_ns, start_queue))
        if not queue.free or not start_queue.free:
            self._reclaim(queue)

    def drop(self, region: Region) -> None:
        """Take back the start event of a region that will have no end."""
        mark = region.mark
        region.mark = None
        if mark is not None and mark is not CAPTURED:
            region.mark_lane.free.append(mark)

    def _new_event(self, queue: StreamQueue) -> Any:
        event = self.clock.new_event(queue.stream)
        queue.created += 1
        return event

    def _reclaim(self, queue: StreamQueue) -> None:
        # At most one query for each region that ends, and none while events are left. It asks for the pair in the
        # middle of the queue: a yes frees half of them, so that the next query is half a pool of regions away; a no
        # lets the pool grow by one pair, until it holds twice the work in flight and the middle is always done.
        count = len(queue.pending)
        if count < _SPARE_PAIRS or not self._collecting.acquire(False):
            return
        self._collector = get_ident()
        try:
            if not queue.known_done:
                middle = count // 2
                if not self.clock.is_done(queue.pending[middle][1]):
                    return
                queue.known_done = middle + 1
            self._collect(queue, min(queue.known_done, _BATCH_PAIRS))
        except Exception as error:
            # The pairs stay where they are, for whoever asks for their times.
            warn_once(
                f"Asking the device {self.clock.name!r} how far it is failed; its times stay pending: {error}",
                about=f"query {self.clock.name}",
            )
        finally:
            self._collecting.release()

    # --- collecting -----------------------------------------------------------------------------------------------

    def _collect(self, queue: StreamQueue, count: int) -> None:
        # Read the oldest pairs, which are done.
        clock = self.clock
        for _ in range(count):
            start, end, intervals, start_ns, start_queue = queue.pending[0]
            try:
                duration_ns = clock.elapsed_ns(start, end)
            except Exception as error:
                # Two threads that share a stream may queue their pairs in another order than they recorded them, and a
                # start on another stream may be behind: then the pair is not lost, only early.
                if not self._is_done(start) or not self._is_done(end):
                    queue.known_done = 0
                    return
                intervals.failed += 1
                warn_once(
                    f"Reading a time on the device {clock.name!r} failed and is counted as failed: {error}",
                    about=f"elapsed {clock.name}",
                )
            else:
                if duration_ns < 0:
                    # It ended on a stream that was there before the one on which it began: no time at all.
                    intervals.failed += 1
                    warn_once(
                        f"A region on the device {clock.name!r} ended before it began, since it ended on another "
                        "stream than it began on; it is counted as failed. End it on the same stream, or let that "
                        "stream wait for the first.",
                        about=f"negative {clock.name}",
                    )
                else:
                    intervals.append(start_ns, start_ns + duration_ns)
            queue.pending.popleft()
            if queue.known_done:
                queue.known_done -= 1
            start_queue.free.append(start)
            queue.free.append(end)

    def _is_done(self, event: Any) -> bool:
        try:
            return bool(self.clock.is_done(event))
        except Exception:
            return True  # It will never answer better: let it be counted as failed.

    def collect(self, *, wait: bool) -> None:
        """Collect every pair that is done.

        Args:
            wait: Wait for those that are not. Only for a user who asked for it by name.
        """
        if not self._may_collect(wait=wait):
            return
        try:
            if not self._can_query():
                return
            for queue in list(self._queues.values()):
                if wait:
                    self._wait_for(queue)
                self._collect(queue, self._count_done(queue))
        finally:
            self._collecting.release()

    def collect_for(self, intervals: Intervals) -> None:
        """Collect the pairs that are for ``intervals``, waiting for them and for nothing queued after them.

        Only for a user who asked for their times.
        """
        if not self._may_collect(wait=True):
            return
        try:
            if not self._can_query():
                return
            for queue in list(self._queues.values()):
                pairs = list(queue.pending)
                count = len(pairs)
                while count and pairs[count - 1][2] is not intervals:
                    count -= 1
                if count:
                    self._wait_for(queue, count)
                    self._collect(queue, min(count, self._count_done(queue)))
        finally:
            self._collecting.release()

    def _may_collect(self, *, wait: bool) -> bool:
        # Whoever does not want to wait for the device does not wait for others who collect, either. A signal handler
        # that interrupts the collecting of its own thread would wait for itself.
        if not self._collecting.acquire(False):
            if not wait or self._collector == get_ident():
                return False
            self._collecting.acquire()
        self._collector = get_ident()
        return True

    def _can_query(self) -> bool:
        try:
            return not self.clock.is_capturing()  # A query would break the capture.
        except Exception:
            return False

    def _wait_for(self, queue: StreamQueue, count: int | None = None) -> None:
        # Wait for the first ``count`` pairs, or for all.
        try:
            pairs = list(queue.pending)[:count]
            if pairs:
                self.clock.wait(pairs[len(pairs) - 1][1])
            # What comes later in a stream is done later, but a start may be on another stream.
            for start, _, _, _, start_queue in pairs:
                if start_queue is not queue:
                    self.clock.wait(start)
        except Exception as error:
            warn_once(
                f"Waiting for the device {self.clock.name!r} failed; times that it has reached are reported: {error}",
                about=f"wait {self.clock.name}",
            )

    def _count_done(self, queue: StreamQueue) -> int:
        # The newest first: in most cases one query answers for all.
        count = len(queue.pending)
        if count == 0 or self._is_done(queue.pending[count - 1][1]):
            return count
        low, high = 0, count - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_done(queue.pending[middle][1]):
                low = middle + 1
            else:
                high = middle
        return low

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way, by the ``id`` of the intervals that they are for."""
        counts: dict[int, int] = {}
        for queue in list(self._queues.values()):
            for pair in list(queue.pending):
                key = id(pair[2])
                counts[key] = counts.get(key, 0) + 1
        return counts

    @property
    def events(self) -> int:
        """Events created so far, those in use and those that are free: bounded by the work in flight."""
        return sum(queue.created for queue in self._queues.values())

    def _fault(self, doing: str, region: Region, error: Exception) -> None:
        warn_once(
            f"{doing.capitalize()} region {region.name!r} on the device {self.clock.name!r} failed; device times that "
            f"cannot be had are counted as failed, CPU times go on: {error}",
            about=f"record {self.clock.name}",
        )

    def __repr__(self) -> str:
        """Show the device and how many events it took."""
        return f"<EventPool of {self.clock.name!r}: {self.events} events>"

    def abandon(self) -> None:
        """Forget every event without destroying it."""
        _leaked.append(self._queues)
        self._queues = {}
        self._collecting = allocate_lock()


_pools: dict[DeviceClock, EventPool] = {}
_leaked: list[dict[Hashable, StreamQueue]] = []


def pool_of(clock: DeviceClock) -> EventPool:
    """The pool of a device clock; it lives as long as the process, since destroying events can hang."""
    pool = _pools.get(clock)
    if pool is None:
        pool = _pools[clock] = EventPool(clock)
    return pool


# Names of before, for modules that have not followed yet.
DeviceLedger = EventPool
ledger_of = pool_of


def _abandon_after_fork() -> None:
    # The events belong to the parent's context; destroying one here would be an error, or worse.
    for pool in _pools.values():
        pool.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)
