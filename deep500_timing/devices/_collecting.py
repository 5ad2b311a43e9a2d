"""Reads the pairs that a device has passed, by queries that never wait.

Other pairs stay pending. Only a method that the user calls for device times waits for them.

This file runs as plain Python and, with the C types of ``_collecting.pxd``, compiled.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident

from deep500_timing._base.warn import warn_once
from deep500_timing.devices._queue import captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from typing import Any

    from deep500_timing._base.protocols import DeviceClock
    from deep500_timing.devices._anchors import Anchors
    from deep500_timing.devices._queue import StreamQueue

    Queues = dict[Hashable, StreamQueue]
_SPARE_PAIRS = 16
"""Pairs that a stream gets before it queries older ones; half as many regions share one query."""
_BATCH_PAIRS = 16
"""Most pairs to read at the end of one region, so that a backlog does not stall the training thread."""
_DOUBTS = 16
"""How many queries in a row may fail before a pair counts as failed."""


def owner_of(sink: Any) -> Any:
    """Return the owner of a sink, by which its times are asked for; a sink without one owns itself."""
    return getattr(sink, "owner", sink)


def _count_to(queue: StreamQueue, sink: Any) -> int:
    # The number of pairs up to the last one for that sink; 0 without one.
    pairs = list(queue.pending)
    count = len(pairs)
    while count and owner_of(pairs[count - 1][2]) is not sink:
        count -= 1
    return count


class Collector:
    """Reads the pairs of one device's clock, one thread at a time.

    A query that fails may mean a capture that is not known here. The pair stays pending, and counts as failed only
    after many failed queries in a row.
    """

    __slots__ = ("_anchors", "_clock", "_device_now", "_lock", "_stalls", "_thread")

    def __init__(self, clock: DeviceClock, anchors: Anchors) -> None:
        self._clock = clock
        self._anchors = anchors
        self._device_now: Callable[[], Any] | None = None
        self._stalls = False
        """Whether reading a time stops the device. Then only methods that may wait read times."""
        # The training thread only tries it, and never waits for it.
        self._lock = allocate_lock()
        self._thread = 0
        """The last thread that took the lock: a signal handler may run in the middle of its collecting."""

    def prepare(self) -> None:
        """Look up the functions that the clock may rebind at its first use."""
        self._device_now = getattr(self._clock, "device_now", None)
        self._stalls = bool(getattr(self._clock, "stalls", False))

    def abandon(self) -> None:
        """Free the lock, in a forked child."""
        self._lock = allocate_lock()

    def reclaim(self, queue: StreamQueue) -> None:
        """Read a few finished pairs of a queue without a free event. Never wait."""
        # At most one query per ended region, and none while events are free. The query is for the middle of the queue:
        # a yes frees half of the pairs; a no lets the pool grow by one pair, until it holds twice the work in flight
        # and the middle is always done.
        if len(queue.pending) < _SPARE_PAIRS or self._stalls:
            return
        if not self._lock.acquire(False):
            return
        try:
            self._thread = get_ident()
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
                        if not self._doubt(queue, error):
                            return
                    queue.known_done = middle + 1
                self._collect(queue, min(queue.known_done, _BATCH_PAIRS))
        finally:
            self._lock.release()

    def _doubt(self, queue: StreamQueue, error: Exception) -> bool:
        # A query failed, perhaps in a capture that is not known here: the pairs stay pending. Returns whether queries
        # have failed too often.
        warn_once(
            f"Asking the device {self._clock.name!r} how far it is failed; its times stay pending: {error}",
            key=f"query {self._clock.name}",
        )
        queue.faults += 1
        return queue.faults >= _DOUBTS

    def _collect(self, queue: StreamQueue, count: int) -> None:
        # Read the oldest pairs, which are finished.
        device = None if self._device_now is None else self._device_now()
        for _ in range(count):
            entry = queue.pending[0]
            if entry is not queue.settled:
                self._settle(queue, entry, device)
                if entry is not queue.settled:
                    return
            del queue.pending[0]
            queue.free.append(entry[1])
            queue.settled = None
            if queue.known_done:
                queue.known_done -= 1
            start_queue = entry[5]
            start_queue.give_back(entry[0], entry[7])

    def _settle(self, queue: StreamQueue, entry: Any, device: Any) -> None:
        # Keep the time of a pair, or count it as failed; neither if the device has not passed it.
        clock: Any = self._clock
        start, end, sink, start_ns, end_ns, start_queue, pair, anchor = entry
        try:
            duration_ns = self._anchors.elapsed_ns(start, end)
            if anchor is not None and duration_ns >= 0:
                since_ns = 0 if start is anchor.event else self._anchors.elapsed_ns(anchor.event, start)
                # The device cannot have reached it before the host issued it.
                anchor.raise_low(end_ns - duration_ns - since_ns)
                if not anchor.placed:
                    self._anchors.place(start_queue, anchor)
                placed_ns = anchor.place_ns + since_ns
                lead_ns = max(placed_ns - start_ns, 0)
                pair.lead_count += 1
                pair.lead_total_ns += lead_ns
                pair.lead_max_ns = max(pair.lead_max_ns, lead_ns)
                start_ns = placed_ns
        except Exception as error:
            if device is not None:
                clock.back_to(device)  # the comparison may have changed it
            # Not finished: two threads that share a stream may queue their pairs in another order than they recorded
            # them, and a start may be on another stream.
            try:
                done = clock.is_done(start) and clock.is_done(end)
            except Exception as doubt:
                done = self._doubt(queue, doubt)
            if not done:
                queue.known_done = 0
                return
            sink.failed += 1
            queue.settled = entry
            warn_once(
                f"Reading a time on the device {clock.name!r} failed and is counted as failed: {error}",
                key=f"elapsed {clock.name}",
            )
            return
        if duration_ns < 0:
            # It ended on another stream, which was ahead of the first.
            sink.failed += 1
            queue.settled = entry
            warn_once(
                f"A region on the device {clock.name!r} ended before it began, since it ended on another "
                "stream than it began on; it is counted as failed. End it on the same stream, or let that "
                "stream wait for the first.",
                key=f"negative {clock.name}",
            )
        else:
            sink.append(start_ns, start_ns + duration_ns)
            queue.settled = entry

    def collect(self, queues: Queues, *, wait: bool, sink: Any = None) -> None:
        """Collect the pairs that the device has passed.

        Args:
            queues: The pool's queues, by stream.
            wait: Wait for the others. Only for a user who asked for device times.
            sink: Collect and wait for the pairs of this sink, and for nothing queued after them; None for all.
        """
        if self._stalls and not wait:
            return
        # A signal handler that interrupts its own thread's collecting would wait for itself.
        if not self._lock.acquire(False) and not (wait and self._thread != get_ident() and self._lock.acquire()):
            return
        try:
            self._thread = get_ident()
            for queue in list(queues.values()):
                if not self._can_query():
                    return
                count = len(queue.pending) if sink is None else _count_to(queue, sink)
                if sink is not None and count == 0:
                    continue
                if wait:
                    self._wait_for(queue, count)
                with captures.query_lock:
                    if captures.under_way:
                        return
                    done = self._count_done(queue, len(queue.pending))
                    self._collect(queue, done if sink is None else min(count, done))
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
            for start, _, _, _, _, start_queue, _, _ in pairs:
                if start_queue is not queue:
                    self._clock.wait(start)
        except Exception as error:
            warn_once(
                f"Waiting for the device {self._clock.name!r} failed; times of finished work are reported: {error}",
                key=f"wait {self._clock.name}",
            )

    def _count_done(self, queue: StreamQueue, count: int) -> int:
        # The newest first: mostly one query answers for all.
        pending, is_done = queue.pending, self._clock.is_done
        if count == 0:
            return 0
        try:
            low, high = 0, count - 1
            if is_done(pending[high][1]):
                low = count
            while low < high:
                middle = (low + high) // 2
                if is_done(pending[middle][1]):
                    low = middle + 1
                else:
                    high = middle
        except Exception:
            return self._count_from_the_front(queue, count)
        queue.faults = 0
        return low

    def _count_from_the_front(self, queue: StreamQueue, count: int) -> int:
        # A pair cannot be queried, such as one that was recorded in a capture. Count the pairs before it.
        for index in range(count):
            try:
                if not self._clock.is_done(queue.pending[index][1]):
                    return index
            except Exception as error:
                if not self._doubt(queue, error):
                    return index
        return count

    def pending(self, queues: Queues) -> dict[int, int]:
        counts: dict[int, int] = {}
        for queue in list(queues.values()):
            for entry in list(queue.pending):
                key = id(owner_of(entry[2]))
                counts[key] = counts.get(key, 0) + 1
        return counts
