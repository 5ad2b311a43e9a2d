"""Collects new records from timers and queues, for the frames of a log."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import BATCH, CPU, GPU
from deep500_timing.runs._format import (
    EVENT,
    NO_STEP,
    TABLES,
    Encoder,
    Frame,
    read_frames,
    unpack,
)
from deep500_timing.runs._source import Source, Taken, Threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from deep500_timing.runs._system import CollectorTimes

    Int64Array = NDArray[np.int64]

QUEUE_ROWS = 1 << 17
_QUEUE_EVENTS = 1000
_DROPPED = 4
_REMEMBERED = 1 << 14
"""Host intervals of a region that are remembered for device intervals to come."""


class Collector:
    """Reads new records from timers and queues, and keeps them until they are written.

    Any thread may call :meth:`put` and :meth:`event`. The flushing thread calls the rest.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []
        self.gc_times: CollectorTimes | None = None
        self.threads = Threads()
        self.rows: dict[str, deque[tuple[Any, ...]]] = {"marks": deque()}
        self.written = 0
        self._collections: dict[int, int] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=_QUEUE_EVENTS)
        self._overflowed: dict[str, int] = {}
        self._batch_thread: int | None = None
        self._of_host: dict[int, tuple[int, Int64Array]] = {}
        """By handle: the number of the first remembered host interval; step and start of each, shape ``(n, 2)``."""
        self._of_regions: dict[int, tuple[str, int, str, tuple[int, ...]]] = {}
        self._counters_written: dict[tuple[str, int, str], tuple[int, ...]] = {}
        self._threads_written = 0
        # Read, but not written yet.
        self._fresh: list[Taken] = []
        self._taken: list[tuple[Taken, Int64Array, Int64Array | None]] = []
        """With steps, and for device intervals the starts of their host intervals."""
        self._open: list[tuple[int, str, int]] = []
        self._waiting: dict[str, list[tuple[Any, ...]]] = {}
        self._said: list[dict[str, Any]] = []

    def put(self, table: str, row: tuple[Any, ...]) -> None:
        """Queue a row for the next flush. Rows that do not fit are counted."""
        queue = self.rows[table]
        if len(queue) < QUEUE_ROWS:
            queue.append(row)
        else:
            self._overflowed[table] = self._overflowed.get(table, 0) + 1

    def event(self, event: dict[str, Any]) -> None:
        self._events.append(event)

    def has_anything(self) -> bool:
        return bool(self._events) or any(self.rows.values()) or any(source.has_anything() for source in self.sources)

    @property
    def ended(self) -> int:
        """The approximate number of intervals since the timers were last read."""
        return sum(source.ended for source in self.sources)

    def collect(self, cut_ns: int, steps: StepCounter, *, final: bool) -> None:
        """Read all records up to the cut; all records if ``final``.

        The clock was read for the cut before the first store is read, so all intervals up to the cut are in the stores.
        """
        self._open = [row for source in self.sources for row in source.open_regions(cut_ns)]
        # One by one, so that an error in one source loses nothing of the others.
        until_ns = None if final else cut_ns
        for source in self.sources:
            for part in source.take(until_ns):
                self._fresh.append(part)
        if self.gc_times is not None:
            self._fresh += [self._of_collector(*found) for found in self.gc_times.take(until_ns).items()]
        taken, self._fresh = self._fresh, []
        for part in taken:
            self._of_regions[part.store] = (part.region, part.thread, part.device, part.counters)
        marks = _drain(self.rows["marks"])
        for table, queue in list(self.rows.items()):
            self._waiting.setdefault(table, []).extend(marks if table == "marks" else _drain(queue))
        for table, lost in list(self._overflowed.items()):
            self._overflowed.pop(table)
            text = f"{lost} rows of {table} did not fit into the queue of {QUEUE_ROWS}"
            self._said.append({"time_ns": cut_ns, "what": "dropped", "text": text})
        self._said += _drain(self._events)
        steps.add_marks(marks)
        self._count_batches(taken, steps)
        # Host intervals first: device intervals take their steps.
        for part in sorted(taken, key=lambda part: part.device == GPU):
            if len(part.pairs):
                self._taken.extend(self._label(part, steps))

    def _of_collector(self, ident: int, pairs: Int64Array) -> Taken:
        recorded = self._collections[ident] = self._collections.get(ident, 0) + len(pairs)
        thread, first = self.threads.number_of_ident(ident), recorded - len(pairs)
        return Taken("GC", thread, CPU, pairs, (recorded, 0, 0, 0, 0), -1 - ident, -1 - ident, first, False, None)

    def done(self) -> None:
        self.written += self.waiting
        self._taken = []
        self._waiting = {}
        self._said = []

    @property
    def waiting(self) -> int:
        """Intervals that are not written yet."""
        return sum(len(part.pairs) for part, _, _ in self._taken)

    @property
    def dropped(self) -> int:
        """Intervals that timers aggregated before they were read."""
        return sum(counters[_DROPPED] for _, _, _, counters in self._of_regions.values())

    def frames(self, encoder: Encoder, *, is_first: bool, is_last: bool) -> Iterable[bytes]:
        if is_first:
            self._threads_written = 0
            self._counters_written = {}
        names = self.threads.names
        yield from encoder.tuples("threads", list(enumerate(names))[self._threads_written :])
        self._threads_written = len(names)
        yield from self._intervals(encoder)
        yield from encoder.tuples("open", sorted(self._open))
        for table, waiting in self._waiting.items():
            yield from encoder.tuples(table, waiting)
        yield from encoder.tuples("counters", self._changed_counters(everything=is_last))
        for event in self._said:
            yield encoder.document(EVENT, event)

    def _intervals(self, encoder: Encoder) -> Iterable[bytes]:
        # By start. Device intervals with a known host interval go to a separate table.
        for table in ("intervals", "device_intervals"):
            with_host = table != "intervals"
            chosen = [one for one in self._taken if (one[2] is not None) == with_host]
            if not chosen:
                continue
            lengths = [len(part.pairs) for part, _, _ in chosen]
            pairs = np.concatenate([part.pairs for part, _, _ in chosen])
            order = np.argsort(pairs[:, 0], kind="stable")
            starts = pairs[order, 0]
            numbers = {
                "region": [encoder.id_of(part.region) for part, _, _ in chosen],
                "thread": [part.thread for part, _, _ in chosen],
                "device": [encoder.id_of(part.device) for part, _, _ in chosen],
            }
            arrays = {name: np.repeat(np.array(of, dtype=np.int64), lengths)[order] for name, of in numbers.items()}
            arrays |= {"start_ns": starts, "dur_ns": pairs[order, 1] - starts}
            arrays["step"] = np.concatenate([labels for _, labels, _ in chosen])[order]
            if with_host:
                arrays["host_start_ns"] = np.concatenate([hosts for _, _, hosts in chosen if hosts is not None])[order]
            yield from encoder.rows(table, arrays)

    def _label(self, part: Taken, steps: StepCounter) -> Iterable[tuple[Taken, Int64Array, Int64Array | None]]:
        # Steps and starts of host intervals are remembered for device intervals.
        if part.device != GPU:
            labels = steps.label(part.pairs[:, 0], part.pairs[:, 1])
            if part.has_device:
                fresh = np.stack((labels, part.pairs[:, 0]), axis=1)
                first, known = self._of_host.get(part.handle, (part.first, fresh[:0]))
                if first + len(known) != part.first:  # Some in between were dropped.
                    first, known = part.first, fresh[:0]
                kept = np.concatenate((known, fresh))[-_REMEMBERED:]
                self._of_host[part.handle] = (first + len(known) + len(fresh) - len(kept), kept)
            yield part, labels, None
            return
        if part.ordinals is None:
            yield part, steps.label(part.pairs[:, 0], None), None
            return
        first, known = self._of_host.get(part.handle, (0, part.pairs[:0]))
        at = part.ordinals - first
        there = (part.ordinals >= 0) & (at >= 0) & (at < len(known))
        if there.any():
            found = known[at[there]]
            yield part._replace(pairs=part.pairs[there]), found[:, 0], found[:, 1]
        if not there.all():
            # The step is that of the host interval, so it is unknown as well.
            lost = part.pairs[~there]
            yield part._replace(pairs=lost), np.full(len(lost), NO_STEP, dtype=np.int64), None

    def _count_batches(self, taken: list[Taken], steps: StepCounter) -> None:
        ends = []
        for part in taken:
            if part.region == BATCH and part.device == CPU and len(part.pairs):
                if self._batch_thread is None:
                    self._batch_thread = part.thread
                if part.thread == self._batch_thread:
                    ends.append(part.pairs[:, 1])
        if ends:
            steps.add_batches(np.concatenate(ends))

    def _changed_counters(self, *, everything: bool) -> list[tuple[Any, ...]]:
        totals: dict[tuple[str, int, str], list[int]] = {}
        for region, thread, device, counters in self._of_regions.values():
            total = totals.setdefault((region, thread, device), [0] * len(counters))
            for place, value in enumerate(counters):
                total[place] += value
        changed = []
        for found, total in totals.items():
            # The number of recorded intervals changes with every flush. It is written when another counter changes,
            # and at the end.
            rare = tuple(total[1:])
            if everything or self._counters_written.get(found, (0,) * len(rare)) != rare:
                self._counters_written[found] = rare
                changed.append((*found, *total))
        return changed


def _drain(queue: deque[Any]) -> list[Any]:
    # Rows that are appended meanwhile stay for the next flush.
    return [queue.popleft() for _ in range(len(queue))]


_STEPS_REMEMBERED = 1 << 16
"""Number of steps that are remembered for device intervals, which arrive late."""


class StepCounter:
    """Labels intervals with steps: by the user's marks, else by counting BATCHes.

    An interval belongs to the step in which it ended. With marks, a step lasts from its mark to the next one. Without,
    step ``k`` lasts until the ``k``-th BATCH ends, so that the preparation of a batch belongs to its step.
    """

    def __init__(self, first: int = 0) -> None:
        self.batches = first
        self.pending_ns = 0
        """The end of a BATCH that has not been added yet."""
        self._ends = np.zeros(0, dtype=np.int64)
        self._mark_times = np.zeros(0, dtype=np.int64)
        self._mark_steps = np.zeros(0, dtype=np.int64)
        self._marked = False

    def add_batches(self, ends_ns: Int64Array) -> None:
        """Count ended BATCHes, shape ``(n,)``. Call it before :meth:`label` for the same time."""
        self.batches += len(ends_ns)
        fresh = np.sort(ends_ns, kind="stable")
        self._ends = np.concatenate((self._ends, fresh))[-_STEPS_REMEMBERED:]

    def add_marks(self, marks: list[tuple[int, int]]) -> None:
        """Add marks: times in ns and steps, in order."""
        if not marks:
            return
        self._marked = True
        times, steps = np.array(marks, dtype=np.int64).T
        times = np.concatenate((self._mark_times, times))
        order = np.argsort(times, kind="stable")
        self._mark_times = times[order][-_STEPS_REMEMBERED:]
        self._mark_steps = np.concatenate((self._mark_steps, steps))[order][-_STEPS_REMEMBERED:]

    def label(self, starts_ns: Int64Array, ends_ns: Int64Array | None) -> Int64Array:
        if self._marked:
            times, forgotten, earliest = self._mark_times, 0, NO_STEP
            at = np.searchsorted(times, starts_ns, side="right")
            if ends_ns is not None:
                # An interval that ends at the time of a mark ended before it, unless it began there as well.
                at = np.maximum(at, np.searchsorted(times, ends_ns, side="left"))
            labels = self._mark_steps[np.maximum(at - 1, 0)]
        else:
            times, forgotten = self._ends, self.batches - len(self._ends)
            earliest = NO_STEP if len(times) == _STEPS_REMEMBERED else forgotten
            if self.pending_ns > max(times[-1:], default=0):
                times = np.append(times, self.pending_ns)
            if ends_ns is None:
                at = np.searchsorted(times, starts_ns, side="right")
            else:
                at = np.searchsorted(times, ends_ns, side="left")
            labels = forgotten + at.astype(np.int64)
        labels[at == 0] = earliest
        return labels


def last_batch_of(paths: list[str]) -> int:
    """The number of BATCHes in the logs of a session; 0 if they cannot be read."""
    number, columns = TABLES["flushes"]
    for path in reversed(paths):
        try:
            with open(path, "rb") as file:
                frames = [frame for frame in read_frames(file.read()) if isinstance(frame, Frame)]
            for frame in reversed(frames):
                if frame.kind == number:
                    return int(unpack(columns, frame.rows, frame.payload)["batches"][-1])
        except (OSError, ValueError):
            continue
    return 0
