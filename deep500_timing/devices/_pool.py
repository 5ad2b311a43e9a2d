"""Device times: pairs of events from a pool, collected without ever waiting.

The end of a pair only queues its second event. Pairs that the device has passed are collected later, all at once, by a
query that answers at once; then their events serve again. So the events in use are bounded by the work in flight,
whatever the length of the run, and the training thread neither waits nor allocates in the steady state.

Now and then the start of a pair serves as an anchor (see ``_queue.py``) by which the pairs behind it are placed on the
host's clock.

This file runs as plain Python and, with the C types of ``_pool.pxd``, compiled.
"""

from __future__ import annotations

from _thread import allocate_lock, get_ident

from deep500_timing._ground.fork import after_fork
from deep500_timing._ground.warn import warn_once
from deep500_timing.devices._null import Device
from deep500_timing.devices._queue import Anchor, StreamQueue, captures

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from typing import Any

    import cython

    from deep500_timing._ground.protocols import DeviceClock
    from deep500_timing.devices._queue import EventPair
else:
    from deep500_timing._ground import cython_stub as cython

if not cython.compiled:
    import ctypes

    from deep500_timing._recording.intervals import Intervals

    def keep_for_good(event: Any) -> None:
        """Hold a reference that nobody gives back, not even the interpreter as it ends."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(event))


_SPARE_PAIRS = 16
"""Pairs that a stream gets before it asks whether older ones are done; half as many regions share one query."""
_BATCH_PAIRS = 16
"""Pairs that are read at most at the end of one region, so that a backlog does not stall the training thread."""
_DOUBTS = 16
"""How many times in a row the device may fail to say whether it has passed a pair before the pair counts as failed."""
_ANCHOR_NS = 2_000_000_000
"""Time between two anchors. Events give a float32 of milliseconds, which is exact to 0.25 µs at 4 s."""
_ANCHOR_QUERIES = 8
"""Queries right after an anchor was recorded: on an idle stream the device is there within microseconds."""


def owner_of(sink: Any) -> Any:
    """By what the times of a sink are asked for: by its owner if it names one, as of several that share one."""
    return getattr(sink, "owner", sink)


class EventPool(Device):
    """The events of one device clock, shared by every timer of the process that uses it; see :func:`pool_of`."""

    __slots__ = (
        "_clock",
        "_collecting",
        "_collector",
        "_device_now",
        "_device_of",
        "_elapsed_ms",
        "_handle_of",
        "_is_capturing",
        "_last",
        "_queues",
        "_record",
        "_stalls",
        "_stream",
    )

    def __init__(self, clock: DeviceClock) -> None:
        """Start with no events; use :func:`pool_of`."""
        self.is_null = False
        self.is_late = False
        self.for_named_timers = True
        self._clock = clock
        self._queues: dict[Hashable, StreamQueue] = {}
        self._last: StreamQueue | None = None
        # What is called at each end of a region; looked up when the device is first used.
        self._stream: Callable[[], Hashable] | None = None
        self._is_capturing: Callable[[], bool] | None = None
        self._record: Callable[[Any, Any], object] | None = None
        self._handle_of: Callable[[Hashable], object] | None = None
        self._device_of: Callable[[Hashable], Hashable] | None = None
        self._device_now: Callable[[], Any] | None = None
        self._elapsed_ms: Callable[[Any, Any], float] | None = None
        self._stalls = False
        """Whether reading a time stops the device: then only who asks for times by name has them read."""
        # Only ever tried on the training thread, never waited for.
        self._collecting = allocate_lock()
        self._collector = 0
        """The thread that has, or had, the lock: a signal handler may run in the middle of its collecting."""

    @property
    def clock(self) -> DeviceClock:
        """The device's clock."""
        return self._clock

    # --- on the training thread ---------------------------------------------------------------------------------

    def _prepare(self) -> None:
        # The first call of the clock may bind its functions anew.
        clock: Any = self._clock
        clock.stream()
        self._handle_of = getattr(clock, "handle_of", None)
        self._device_of = getattr(clock, "device_of", None)
        self._device_now = getattr(clock, "device_now", None)
        self._elapsed_ms = getattr(clock, "elapsed_ms", None)
        self._stalls = bool(getattr(clock, "stalls", False))
        self._record = clock.record
        self._is_capturing = clock.is_capturing
        self._stream = clock.stream

    def _current_queue(self) -> StreamQueue | None:
        # The queue of the current stream, None while it is captured.
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
        """Record the start of a pair on the current stream; a fault costs its time and a warning."""
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
                    anchor = self._anchor(queue, pair.now_ns, event)
                else:
                    anchor.users += 1
                pair.anchor = anchor
                if anchor.event is not event:
                    self._record(event, queue.handle)  # type: ignore[misc]
            else:
                self._record(event, queue.handle)  # type: ignore[misc]
        except BaseException as error:
            if queue is not None and event is not None:
                self._give_back(queue, event, pair.anchor)
            pair.anchor = None
            if not isinstance(error, Exception):
                raise
            self._fault("recording the start of", pair, error)
            return
        pair.queue = queue
        pair.start = event

    def end(self, pair: EventPair, sink: Any, start_ns: int, end_ns: int) -> None:
        """Record the end of a pair on the current stream, and queue it. Never waits."""
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
                self._give_back(start_queue, start, pair.anchor)
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
            self._give_back(start_queue, start, pair.anchor)
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
                    self._ask_anchor(anchor)
                elif end_ns >= anchor.due_ns and anchor is pair.anchor:
                    anchor.is_due = True
        if not queue.free or not start_queue.free:
            self._reclaim(queue)

    def drop(self, pair: EventPair) -> None:
        """Take back the start of a pair that will have no end."""
        start = pair.start
        pair.start = None
        if start is not None:
            self._give_back(pair.queue, start, pair.anchor)

    def _new_event(self, queue: StreamQueue) -> Any:
        event = self._clock.new_event(queue.handle)
        # Destroying an event can hang on a stuck device, and in a forked child it belongs to the parent's context.
        keep_for_good(event)
        queue.created += 1
        return event

    def _give_back(self, queue: StreamQueue, start: Any, anchor: Anchor | None) -> None:
        # A start event serves again, unless it is the anchor's; that serves again when nobody needs the anchor.
        if anchor is None:
            queue.free.append(start)
            return
        if start is not anchor.event:
            queue.free.append(start)
        anchor.users -= 1
        if anchor.retired and anchor.users == 0:
            anchor.retired = False
            queue.free.append(anchor.event)

    # --- anchors ----------------------------------------------------------------------------------------------------

    def _anchor(self, queue: StreamQueue, now_ns: Any, event: Any) -> Anchor:
        # The anchor for a pair on this queue, with one user more: the one that is there, or a new one, whose event is
        # the start of the pair.
        anchor = queue.anchors.get(now_ns)
        if anchor is not None and not anchor.is_due:
            anchor.users += 1
            queue.latest = anchor
            if not anchor.is_done:
                self._ask_anchor(anchor)
            return anchor
        low_ns = now_ns()
        anchor = Anchor(event, now_ns, low_ns, low_ns + _ANCHOR_NS, anchor)
        self._record(event, queue.handle)  # type: ignore[misc]
        anchor.users = 1
        queue.anchors[now_ns] = queue.latest = anchor
        for _ in range(_ANCHOR_QUERIES):
            if self._ask_anchor(anchor):
                break
        return anchor

    def _ask_anchor(self, anchor: Anchor) -> bool:
        # Whether the device has reached it; either answer narrows the time at which it did.
        with captures.asking:
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
                return False  # Who reads the pair will say what is wrong.
            return done

    def _place(self, queue: StreamQueue, anchor: Anchor) -> None:
        # The device has passed a pair behind this anchor: settle where it stands on the host's clock.
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

    # --- collecting -------------------------------------------------------------------------------------------------

    def _reclaim(self, queue: StreamQueue) -> None:
        # At most one query for each region that ends, and none while events are left. It asks for the pair in the
        # middle of the queue: a yes frees half of them, so that the next query is half a pool of regions away; a no
        # lets the pool grow by one pair, until it holds twice the work in flight and the middle is always done.
        if len(queue.pending) < _SPARE_PAIRS or self._stalls:
            return
        got = False
        try:
            for got in map(self._collecting.acquire, (False,)):  # noqa: B007 (see _attempts)
                pass
            if not got:
                return
            self._collector = get_ident()
            with captures.asking:
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
            if got:
                self._collecting.release()

    def _doubt(self, queue: StreamQueue, error: Exception) -> bool:
        # The device could not say whether it has passed a pair. That may be a capture that nobody told us of: the pairs
        # stay pending. Returns whether it has failed so often that it will never answer better.
        warn_once(
            f"Asking the device {self._clock.name!r} how far it is failed; its times stay pending: {error}",
            about=f"query {self._clock.name}",
        )
        queue.faults += 1
        return queue.faults >= _DOUBTS

    def _collect(self, queue: StreamQueue, count: int) -> None:
        # Read the oldest pairs, which are done.
        device = None if self._device_now is None else self._device_now()
        for _ in range(count):
            entry = queue.pending[0]
            if entry is not queue.settled:
                self._settle(queue, entry, device)
                if entry is not queue.settled:
                    return
            free = queue.free
            del queue.pending[0]
            if cython.compiled:
                free.append(entry[1])
            else:  # Statements without a call: an interrupt would lose the event.
                free += (entry[1],)
            queue.settled = None
            if queue.known_done:
                queue.known_done -= 1
            self._give_back(entry[5], entry[0], entry[7])

    def _settle(self, queue: StreamQueue, entry: Any, device: Any) -> None:
        # Keep the time of a pair, or count it as failed. Where the device turns out not to have passed it: neither.
        clock: Any = self._clock
        start, end, sink, start_ns, end_ns, start_queue, pair, anchor = entry
        try:
            duration_ns = self._elapsed_ns(start, end)
            if anchor is not None and duration_ns >= 0:
                since_ns = 0 if start is anchor.event else self._elapsed_ns(anchor.event, start)
                # Issued at that moment of the host, it cannot have been reached before.
                anchor.raise_low(end_ns - duration_ns - since_ns)
                if not anchor.placed:
                    self._place(start_queue, anchor)
                placed_ns = anchor.place_ns + since_ns
                lead_ns = max(placed_ns - start_ns, 0)
                pair.lead_count += 1
                pair.lead_total_ns += lead_ns
                pair.lead_max_ns = max(pair.lead_max_ns, lead_ns)
                start_ns = placed_ns
        except Exception as error:
            if device is not None:
                clock.back_to(device)  # the comparison may have left another one current
            # Two threads that share a stream may queue their pairs in another order than they recorded them, and a
            # start on another stream may be behind: then the pair is not lost, only early.
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
                about=f"elapsed {clock.name}",
            )
            return
        if duration_ns < 0:
            # It ended on a stream that was there before the one on which it began: no time at all.
            sink.failed += 1
            queue.settled = entry
            warn_once(
                f"A region on the device {clock.name!r} ended before it began, since it ended on another "
                "stream than it began on; it is counted as failed. End it on the same stream, or let that "
                "stream wait for the first.",
                about=f"negative {clock.name}",
            )
        elif not cython.compiled and isinstance(sink, Intervals):
            # Intervals.append, without a call between keeping the time and knowing so.
            buffer = sink.buffer
            end_ns = start_ns + duration_ns
            buffer += (start_ns, end_ns)
            queue.settled = entry
            if len(buffer) > sink.limit:
                sink.flush_block()
        else:
            sink.append(start_ns, start_ns + duration_ns)
            queue.settled = entry

    def _elapsed_ns(self, start: Any, end: Any) -> int:
        # Asked twice for each pair: a function of C, where the clock has one, costs half of a method around it.
        if self._elapsed_ms is None:
            return int(self._clock.elapsed_ns(start, end))
        elapsed_ms = self._elapsed_ms(start, end)
        return int(elapsed_ms * 1e6 + 0.5)

    def collect(self, *, wait: bool) -> None:
        """Collect every pair that the device has passed.

        Args:
            wait: Wait for those that it has not. Only for a user who asked for it by name.
        """
        if self._stalls and not wait:
            return
        got = False
        try:
            for got in map(self._collecting.acquire, self._attempts(wait=wait)):
                if got:
                    break
            if not got:
                return
            self._collector = get_ident()
            for queue in list(self._queues.values()):
                if not self._can_query():
                    return
                if wait:
                    self._wait_for(queue, len(queue.pending))
                with captures.asking:
                    if captures.under_way:
                        return
                    self._collect(queue, self._count_done(queue, len(queue.pending)))
        finally:
            if got:
                self._collecting.release()

    def collect_for(self, sink: Any) -> None:
        """Collect the pairs that are for ``sink``, waiting for them and for nothing queued after them.

        Only for a user who asked for their times.
        """
        got = False
        try:
            for got in map(self._collecting.acquire, self._attempts(wait=True)):
                if got:
                    break
            if not got:
                return
            self._collector = get_ident()
            for queue in list(self._queues.values()):
                if not self._can_query():
                    return
                pairs = list(queue.pending)
                count = len(pairs)
                while count and owner_of(pairs[count - 1][2]) is not sink:
                    count -= 1
                if not count:
                    continue
                self._wait_for(queue, count)
                with captures.asking:
                    if captures.under_way:
                        return
                    self._collect(queue, min(count, self._count_done(queue, len(queue.pending))))
        finally:
            if got:
                self._collecting.release()

    def _attempts(self, *, wait: bool) -> Iterator[bool]:
        # With what to try the lock, one after another. Who does not want to wait for the device does not wait for
        # others who collect, either. A signal handler that interrupts the collecting of its own thread would wait for
        # itself.
        #
        # Go through them with `map`: plain, the interpreter looks for an interrupt after a call, so that one may come
        # between the lock's `acquire` and the name that says it is ours; a loop over a `map` has no such place.
        yield False
        if wait and self._collector != get_ident():
            yield True

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
            # What comes later in a stream is done later, but a start may be on another stream.
            for start, _, _, _, _, start_queue, _, _ in pairs:
                if start_queue is not queue:
                    self._clock.wait(start)
        except Exception as error:
            warn_once(
                f"Waiting for the device {self._clock.name!r} failed; times that it has reached are reported: {error}",
                about=f"wait {self._clock.name}",
            )

    def _count_done(self, queue: StreamQueue, count: int) -> int:
        # The newest first: in most cases one query answers for all.
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
        # Some pair cannot be asked for, such as one that was recorded in a capture: those before it can.
        for index in range(count):
            try:
                if not self._clock.is_done(queue.pending[index][1]):
                    return index
            except Exception as error:
                if not self._doubt(queue, error):
                    return index
        return count

    def pending(self) -> dict[int, int]:
        """How many pairs are on their way, by the ``id`` of the sink that they are for."""
        counts: dict[int, int] = {}
        for queue in list(self._queues.values()):
            for entry in list(queue.pending):
                key = id(owner_of(entry[2]))
                counts[key] = counts.get(key, 0) + 1
        return counts

    @property
    def events(self) -> int:
        """Events created so far, those in use and those that are free: bounded by the work in flight."""
        return sum(queue.created for queue in list(self._queues.values()))

    @property
    def uncertainty_ns(self) -> int:
        """How far off the place of a device's time on the host's clock may be, either way, in ns."""
        return max((queue.uncertainty_ns for queue in list(self._queues.values())), default=0)

    def _fault(self, doing: str, pair: EventPair, error: Exception) -> None:
        warn_once(
            f"{doing.capitalize()} region {pair.name!r} on the device {self._clock.name!r} failed; device times that "
            f"cannot be had are counted as failed, CPU times go on: {error}",
            about=f"record {self._clock.name}",
        )

    def __repr__(self) -> str:
        """Show the device and how many events it took."""
        return f"<EventPool of {self._clock.name!r}: {self.events} events>"

    def abandon(self) -> None:
        """Forget every event without destroying it."""
        self._queues = {}
        self._last = None
        self._collecting = allocate_lock()


_pools: dict[DeviceClock, EventPool] = {}


def pool_of(clock: DeviceClock) -> EventPool:
    """The pool of a device clock; it lives as long as the process."""
    pool = _pools.get(clock)
    if pool is None:
        pool = _pools[clock] = EventPool(clock)
    return pool


def _abandon_after_fork() -> None:
    # The events belong to the parent's context, as do the captures.
    captures.after_fork()
    for pool in _pools.values():
        pool.abandon()


after_fork(_abandon_after_fork)
