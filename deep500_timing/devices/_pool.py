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


class _CapturedMark:
    """Stands for the start event of a region that began while its stream was being captured."""


CAPTURED = _CapturedMark()


class _Lane:
    """The events of one stream: those that are free, and the pairs that the device has yet to pass, in order."""

    __slots__ = ("created", "free", "known_done", "pending", "stream")

    def __init__(self, stream: Hashable) -> None:
        self.stream = stream
        self.free: list[Any] = []
        self.pending: deque[tuple[Any, Any, Intervals, int, _Lane]] = deque()
        self.known_done = 0
        self.created = 0


class DeviceLedger:
    """The event pools of one device clock, shared by every timer of the process that uses it."""

    def __init__(self, clock: DeviceClock) -> None:
        """Start with no events; use :func:`ledger_of`."""
        self.clock = clock
        self._lanes: dict[Hashable, _Lane] = {}
        # Only ever tried on the training thread, never waited for.
        self._collecting = allocate_lock()
        self._collector = 0
        """The thread that has, or had, the lock: a signal handler may run in the middle of its collecting."""

    # --- on the training thread ---------------------------------------------------------------------------------

    def begin(self, region: Region) -> None:
        """Record the start event of a region; a fault leaves the region without a device time."""
        clock = self.clock
        region.mark = None
        event = lane = None
        try:
            stream = clock.stream()
            if clock.is_capturing():
                region.mark = CAPTURED
                return
            lane = self._lanes.get(stream) or self._lanes.setdefault(stream, _Lane(stream))
            try:
                event = lane.free.pop()
            except IndexError:
                event = self._new_event(lane)
            clock.record(event, stream)
        except Exception as error:
            if lane is not None and event is not None:
                lane.free.append(event)
            self._fault("recording the start of", region, error)
            return
        region.mark = event
        region.mark_lane = lane

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
        start_lane = region.mark_lane
        event = lane = None
        if mark is CAPTURED:
            intervals.captured += 1
            return
        try:
            stream = clock.stream()
            if clock.is_capturing():
                intervals.captured += 1
                start_lane.free.append(mark)
                return
            if start_lane.stream == stream:
                lane = start_lane
            else:
                lane = self._lanes.get(stream) or self._lanes.setdefault(stream, _Lane(stream))
            try:
                event = lane.free.pop()
            except IndexError:
                event = self._new_event(lane)
            clock.record(event, stream)
        except Exception as error:
            intervals.failed += 1
            start_lane.free.append(mark)
            if lane is not None and event is not None:
                lane.free.append(event)
            self._fault("recording the end of", region, error)
            return
        lane.pending.append((mark, event, intervals, region.start_ns, start_lane))
        if not lane.free or not start_lane.free:
            self._reclaim(lane)

    def drop(self, region: Region) -> None:
        """Take back the start event of a region that will have no end."""
        mark = region.mark
        region.mark = None
        if mark is not None and mark is not CAPTURED:
            region.mark_lane.free.append(mark)

    def _new_event(self, lane: _Lane) -> Any:
        event = self.clock.new_event(lane.stream)
        lane.created += 1
        return event

    def _reclaim(self, lane: _Lane) -> None:
        # At most one query for each region that ends, and none while events are left. It asks for the pair in the
        # middle of the queue: a yes frees half of them, so that the next query is half a pool of regions away; a no
        # lets the pool grow by one pair, until it holds twice the work in flight and the middle is always done.
        count = len(lane.pending)
        if count < _SPARE_PAIRS or not self._collecting.acquire(False):
            return
        self._collector = get_ident()
        try:
            if not lane.known_done:
                middle = count // 2
                if not self.clock.is_done(lane.pending[middle][1]):
                    return
                lane.known_done = middle + 1
            self._collect(lane, min(lane.known_done, _BATCH_PAIRS))
        except Exception as error:
            # The pairs stay where they are, for whoever asks for their times.
            warn_once(
                f"Asking the device {self.clock.name!r} how far it is failed; its times stay pending: {error}",
                about=f"query {self.clock.name}",
            )
        finally:
            self._collecting.release()

    # --- collecting -----------------------------------------------------------------------------------------------

    def _collect(self, lane: _Lane, count: int) -> None:
        # Read the oldest pairs, which are done.
        clock = self.clock
        for _ in range(count):
            start, end, intervals, start_ns, start_lane = lane.pending[0]
            try:
                duration_ns = clock.elapsed_ns(start, end)
            except Exception as error:
                # Two threads that share a stream may queue their pairs in another order than they recorded them, and a
                # start on another stream may be behind: then the pair is not lost, only early.
                if not self._is_done(start) or not self._is_done(end):
                    lane.known_done = 0
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
            lane.pending.popleft()
            if lane.known_done:
                lane.known_done -= 1
            start_lane.free.append(start)
            lane.free.append(end)

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
            for lane in list(self._lanes.values()):
                if wait:
                    self._wait_for(lane)
                self._collect(lane, self._count_done(lane))
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
            for lane in list(self._lanes.values()):
                pairs = list(lane.pending)
                count = len(pairs)
                while count and pairs[count - 1][2] is not intervals:
                    count -= 1
                if count:
                    self._wait_for(lane, count)
                    self._collect(lane, min(count, self._count_done(lane)))
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

    def _wait_for(self, lane: _Lane, count: int | None = None) -> None:
        # Wait for the first ``count`` pairs, or for all.
        try:
            pairs = list(lane.pending)[:count]
            if pairs:
                self.clock.wait(pairs[len(pairs) - 1][1])
            # What comes later in a stream is done later, but a start may be on another stream.
            for start, _, _, _, start_lane in pairs:
                if start_lane is not lane:
                    self.clock.wait(start)
        except Exception as error:
            warn_once(
                f"Waiting for the device {self.clock.name!r} failed; times that it has reached are reported: {error}",
                about=f"wait {self.clock.name}",
            )

    def _count_done(self, lane: _Lane) -> int:
        # The newest first: in most cases one query answers for all.
        count = len(lane.pending)
        if count == 0 or self._is_done(lane.pending[count - 1][1]):
            return count
        low, high = 0, count - 1
        while low < high:
            middle = (low + high) // 2
            if self._is_done(lane.pending[middle][1]):
                low = middle + 1
            else:
                high = middle
        return low

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way, by the ``id`` of the intervals that they are for."""
        counts: dict[int, int] = {}
        for lane in list(self._lanes.values()):
            for pair in list(lane.pending):
                key = id(pair[2])
                counts[key] = counts.get(key, 0) + 1
        return counts

    @property
    def events(self) -> int:
        """Events created so far: the size of the pools."""
        return sum(lane.created for lane in self._lanes.values())

    def _fault(self, doing: str, region: Region, error: Exception) -> None:
        warn_once(
            f"{doing.capitalize()} region {region.name!r} on the device {self.clock.name!r} failed; device times that "
            f"cannot be had are counted as failed, CPU times go on: {error}",
            about=f"record {self.clock.name}",
        )

    def abandon(self) -> None:
        """Forget every event without destroying it."""
        _leaked.append(self._lanes)
        self._lanes = {}
        self._collecting = allocate_lock()


_ledgers: dict[DeviceClock, DeviceLedger] = {}
_leaked: list[dict[Hashable, _Lane]] = []


def ledger_of(clock: DeviceClock) -> DeviceLedger:
    """The event pools of a device clock; it lives as long as the process, since destroying events can hang."""
    ledger = _ledgers.get(clock)
    if ledger is None:
        ledger = _ledgers[clock] = DeviceLedger(clock)
    return ledger


def _abandon_after_fork() -> None:
    # The events belong to the parent's context; destroying one here would be an error, or worse.
    for ledger in _ledgers.values():
        ledger.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_after_fork)
