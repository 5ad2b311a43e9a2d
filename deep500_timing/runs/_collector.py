"""Collects new records from timers and queues, for the frames of a log. It takes no lock and never waits.

Only this module knows how the recorder stores intervals.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.arrays import Int64Array
from deep500_timing._base.names import BATCH, CPU, GPU
from deep500_timing._recording.intervals import NO_HOST, Intervals
from deep500_timing.runs._format import EVENT, NO_STEP, Encoder

if TYPE_CHECKING:
    from deep500_timing._recording.recorder import Region
    from deep500_timing.runs._system import CollectorTimes

QUEUE_ROWS = 1 << 17
_QUEUE_EVENTS = 1000
_IN_FUTURE_NS = 1_000_000_000
"""An interval that ends this long after the cut has a time of another clock. It is not held back."""


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

    def number_of_ident(self, ident: int) -> int:
        """The number of the thread with an identifier, from ``threading.get_ident``; a new one for 0, an ended one."""
        number = self._by_ident.get(ident)
        if number is None:
            number = len(self.names)
            self.names.append(next((one.name for one in threading.enumerate() if one.ident == ident), ""))
            if ident:
                self._by_ident[ident] = number
        return number


class Track:
    """The intervals of one region on one thread and device, and how far they were read."""

    def __init__(self, name: str, thread: int, device: str, region: Region | None = None) -> None:
        self.name = name
        self.thread = thread
        self.device = device
        self.region = region
        """Kept alive, so that its id stays unique. None for garbage collections."""
        self.store: Intervals | None = None
        self.seen = 0
        self.read = 0
        """Intervals of the present store that were read or dropped."""
        self.dropped = 0
        self.seen_times = 0
        self.last_end_ns = -(1 << 63)
        self._before = (0, 0, 0, 0, 0)
        """Counters of the stores before."""

    def counters(self) -> tuple[int, ...]:
        """Recorded, failed, discarded, captured and dropped intervals in all."""
        store = self.store
        lost = (0, 0, 0) if store is None else (int(store.failed), int(store.discarded), int(store.captured))
        return tuple(map(sum, zip(self._before, (self.read, *lost, self.dropped), strict=True)))

    def follow(self, store: Intervals) -> None:
        """Continue with the store that replaced another."""
        self._before = self.counters()  # type: ignore[assignment]
        self.store = store
        self.seen = self.read = self.dropped = self.seen_times = 0

    def read_until(self, cut_ns: int | None) -> Int64Array:
        """The new intervals that ended on the host by the cut, oldest first, shape ``(n, width)``."""
        assert self.store is not None
        ints, recorded, dropped = self.store.since(self.seen)
        pairs = np.frombuffer(ints, dtype=np.int64).reshape(-1, self.store.width)
        if cut_ns is not None:
            on_host = pairs[:, -1]
            late = (on_host > cut_ns) & (on_host <= cut_ns + _IN_FUTURE_NS)
            on_time = int(late.argmax()) if late.any() else len(pairs)
            recorded -= len(pairs) - on_time
            pairs = pairs[:on_time]
        self.store.took(recorded)
        self.seen = recorded
        self.read += dropped + len(pairs)
        self.dropped += dropped
        if len(pairs):
            self.last_end_ns = int(pairs[-1, 1])
        return pairs

    def processor_times(self) -> Int64Array | None:
        """The new readings of the thread's time on a processor, as ``ProcessorTimes.rows``, shape ``(n, 4)``."""
        times = None if self.store is None else self.store.processor
        if times is None:
            return None
        ints, self.seen_times, _ = times.rows.since(self.seen_times)
        times.rows.took(self.seen_times)
        return np.frombuffer(ints, dtype=np.int64).reshape(-1, 4)


class Part:
    """New intervals of one track."""

    def __init__(self, track: Track, intervals: Int64Array) -> None:
        self.track = track
        self.pairs = intervals[:, :2]
        """Starts and ends in ns of the timer's clock, shape ``(n, 2)``."""
        self.hosts = intervals[:, 2:]
        """For a device, those of the host intervals, or ``NO_HOST``; shape ``(n, 2)``."""
        self.steps: Int64Array | None = None
        """None until they are labelled."""


class Collector:
    """Reads new records from timers and queues, and keeps them until they are written.

    Any thread may call :meth:`put`, :meth:`retire` and :meth:`event`. The flushing thread calls the rest.
    """

    def __init__(self) -> None:
        self.timers: list[Any] = []
        self.gc_times: CollectorTimes | None = None
        self.rows: dict[str, deque[tuple[Any, ...]]] = {"marks": deque()}
        self.written = 0
        self._threads = Threads()
        self._tracks: dict[tuple[int, str], Track] = {}
        """By the id of a region or of a thread that collected garbage, and device."""
        self._retired: deque[tuple[Any, Region, str, Intervals]] = deque()
        self._recorded = 0
        self._events: deque[dict[str, Any]] = deque(maxlen=_QUEUE_EVENTS)
        self._overflowed: dict[str, int] = {}
        self._batch_thread: int | None = None
        # Read, but not written yet.
        self.parts: list[Part] = []
        self._times: list[Int64Array] = []
        """Rows of the table ``processor``: time, time on a processor, time waited for one, and thread."""
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

    def retire(self, timer: Any, region: Region, device: str, store: Intervals) -> None:
        """Queue a store that its region is about to replace."""
        self._retired.append((timer, region, device, store))

    def has_anything(self) -> bool:
        return bool(self._count() or self._events or self._retired) or any(self.rows.values())

    @property
    def ended(self) -> int:
        """The approximate number of host intervals since the timers were last read."""
        recorded = self._count()
        if recorded < self._recorded:  # A timer was reset.
            self._recorded = 0
        return recorded - self._recorded

    @property
    def waiting(self) -> int:
        """Intervals that are not written yet."""
        return sum(len(part.pairs) for part in self.parts)

    @property
    def dropped(self) -> int:
        """Intervals that timers aggregated before they were read."""
        return sum(track.counters()[-1] for track in self._tracks.values())

    def collect(self, cut_ns: int, steps: StepCounter, *, final: bool) -> None:
        """Read all records up to the cut; all records if ``final``.

        The clock was read for the cut before the first store is read, so an interval comes with all intervals inside
        it.
        """
        self._open = list(self._open_regions(cut_ns))
        for part in self._read(None if final else cut_ns):
            # One by one, so that an error in one timer loses nothing of the others.
            if len(part.pairs):
                self.parts.append(part)
        marks, labels = steps.number(_drain(self.rows["marks"]))
        for table, queue in list(self.rows.items()):
            self._waiting.setdefault(table, []).extend(marks if table == "marks" else _drain(queue))
        if labels:
            self._waiting.setdefault("labels", []).extend(labels)
        for table, lost in list(self._overflowed.items()):
            self._overflowed.pop(table)
            text = f"{lost} rows of {table} did not fit into the queue of {QUEUE_ROWS}"
            self._said.append({"time_ns": cut_ns, "what": "dropped", "text": text})
        self._said += _drain(self._events)
        steps.add_marks(marks)
        fresh = [part for part in self.parts if part.steps is None]
        self._count_batches(fresh, steps)
        for part in fresh:
            part.steps = _steps_of(part, steps)

    def _count(self) -> int:
        # Host intervals recorded so far, over all regions and threads.
        return sum(region._intervals.count for timer in self.timers for region in timer._regions())

    def _read(self, cut_ns: int | None) -> Iterator[Part]:
        self._recorded = self._count()
        while self._retired:
            yield from self._read_store(*self._retired.popleft(), None)
        for timer in self.timers:
            for region in timer._regions():
                yield from self._read_store(timer, region, CPU, region._intervals, cut_ns)
                if region._device_intervals is not None:
                    yield from self._read_store(timer, region, GPU, region._device_intervals, cut_ns)
        if self.gc_times is not None:
            for ident, pairs in self.gc_times.take(cut_ns).items():
                key = ident, "GC"
                if key not in self._tracks:
                    self._tracks[key] = Track("GC", self._threads.number_of_ident(ident), CPU)
                self._tracks[key].read += len(pairs)
                yield Part(self._tracks[key], pairs)

    def _read_store(
        self, timer: Any, region: Region, device: str, store: Intervals, cut_ns: int | None
    ) -> Iterator[Part]:
        track = self._tracks.get((id(region), device))
        if track is None:
            thread = self._threads.number_of(region._thread)
            track = self._tracks[id(region), device] = Track(region.name, thread, device, region)
            track.store = store
        if track.store is not store:
            # The timer was reset: the former store does not change any more.
            yield Part(track, track.read_until(None))
            self._take_times(track)
            track.follow(store)
        yield Part(track, track.read_until(cut_ns))
        self._take_times(track)

    def _take_times(self, track: Track) -> None:
        found = track.processor_times()
        if found is not None and len(found):
            found = found.copy()
            found[:, 3] = track.thread
            self._times.append(found)

    def _open_regions(self, cut_ns: int) -> Iterator[tuple[int, str, int]]:
        # Start in ns, region and thread of the open regions at the cut.
        for timer in self.timers:
            for region in timer._regions():
                if not region.is_open:
                    continue
                start_ns = int(region._start_ns)
                track = self._tracks.get((id(region), CPU))
                # A region that opens just now may still have the former start.
                if start_ns <= cut_ns and (track is None or start_ns >= track.last_end_ns):
                    yield start_ns, region.name, self._threads.number_of(region._thread)

    def _count_batches(self, parts: list[Part], steps: StepCounter) -> None:
        ends = []
        for part in parts:
            track = part.track
            if track.name == BATCH and track.device == CPU:
                if self._batch_thread is None:
                    self._batch_thread = track.thread
                if track.thread == self._batch_thread:
                    ends.append(part.pairs[:, 1])
        if ends:
            steps.add_batches(np.concatenate(ends))

    def frames(self, encoder: Encoder, *, is_last: bool) -> Iterable[bytes]:
        names = self._threads.names
        yield from encoder.tuples("threads", list(enumerate(names))[encoder.threads :])
        encoder.threads = len(names)
        yield from self._intervals(encoder)
        if self._times:
            rows = np.concatenate(self._times)
            columns = rows[np.argsort(rows[:, 0], kind="stable")].T
            of_columns = "time_ns", "ran_ns", "waited_ns", "thread"
            yield from encoder.rows("processor", dict(zip(of_columns, columns, strict=True)))
        yield from encoder.tuples("open", sorted(self._open))
        for table, waiting in self._waiting.items():
            yield from encoder.tuples(table, waiting)
        yield from encoder.tuples("counters", self._changed_counters(encoder, everything=is_last))
        for event in self._said:
            yield encoder.document(EVENT, event)

    def done(self) -> None:
        """Forget the written intervals."""
        self.written += self.waiting
        self.parts = []
        self._times = []
        self._waiting = {}
        self._said = []

    def _intervals(self, encoder: Encoder) -> Iterable[bytes]:
        # By start. The intervals of devices go to a separate table.
        for table in ("intervals", "device_intervals"):
            parts = [part for part in self.parts if (part.track.device == CPU) == (table == "intervals")]
            if not parts:
                continue
            pairs = np.concatenate([part.pairs for part in parts])
            order = np.argsort(pairs[:, 0], kind="stable")
            lengths = [len(part.pairs) for part in parts]
            numbers = {
                "region": [encoder.id_of(part.track.name) for part in parts],
                "thread": [part.track.thread for part in parts],
                "device": [encoder.id_of(part.track.device) for part in parts],
            }
            arrays = {name: np.repeat(np.array(of, dtype=np.int64), lengths)[order] for name, of in numbers.items()}
            arrays |= {"start_ns": pairs[order, 0], "dur_ns": pairs[order, 1] - pairs[order, 0]}
            arrays["step"] = np.concatenate([part.steps for part in parts if part.steps is not None])[order]
            if table == "device_intervals":
                arrays["host_start_ns"] = np.concatenate([part.hosts[:, 0] for part in parts])[order]
            yield from encoder.rows(table, arrays)

    def _changed_counters(self, encoder: Encoder, *, everything: bool) -> list[tuple[Any, ...]]:
        totals: dict[tuple[str, int, str], tuple[int, ...]] = {}
        for track in self._tracks.values():
            key, counters = (track.name, track.thread, track.device), track.counters()
            totals[key] = tuple(map(sum, zip(totals.get(key, (0,) * len(counters)), counters, strict=True)))
        changed = []
        for key, total in totals.items():
            # The number of recorded intervals changes with every flush. It is written when another counter changes,
            # and at the end.
            rare = total[1:]
            if everything or encoder.counters.get(key, (0,) * len(rare)) != rare:
                encoder.counters[key] = rare
                changed.append((*key, *total))
        return changed


def _steps_of(part: Part, steps: StepCounter) -> Int64Array:
    # A device interval has the step of its host interval.
    starts, ends = part.pairs.T
    if part.track.device == CPU:
        return steps.label(starts, ends)
    labels, known = steps.label(starts, None), part.hosts[:, 0] != NO_HOST
    labels[known] = steps.label(*part.hosts[known].T)
    return labels


def _drain(queue: deque[Any]) -> list[Any]:
    # Rows that are appended meanwhile stay for the next flush.
    return [queue.popleft() for _ in range(len(queue))]


Mark = tuple[int, int]
_STEPS_REMEMBERED = 1 << 16
"""Number of steps that are remembered for device intervals, which arrive late."""


class StepCounter:
    """Labels intervals with steps: by the user's marks, else by counting BATCHes.

    A number that comes again after another is another step, and has the next number that is free. An interval belongs
    to the step in which it ended. With marks, a step lasts from its mark to the next one. Without,
    step ``k`` lasts until the ``k``-th BATCH ends, so that the preparation of a batch belongs to its step.
    """

    def __init__(self, first: int = 0) -> None:
        self.batches = first
        self.pending_ns = 0
        """The end of a BATCH that has not been added yet."""
        self._ends = np.zeros(0, dtype=np.int64)
        self._mark_times = np.zeros(0, dtype=np.int64)
        self._mark_steps = np.zeros(0, dtype=np.int64)
        self._label: int | None = None
        """The number of the newest mark, as the program gave it."""
        self._newest = self._ahead = 0
        """The step of the newest mark, and how far it is ahead of that number."""

    def number(self, marks: list[Mark]) -> tuple[list[Mark], list[tuple[int, int, int]]]:
        """Number the steps of new marks.

        Args:
            marks: Times in ns, and the program's numbers.

        Returns:
            The marks with the numbers of their steps; and a time, a step and the program's number where these differ.
        """
        numbered, labels = [], []
        for time_ns, label in sorted(marks, key=lambda mark: mark[0]):
            if label != self._label:
                if self._label is not None and label + self._ahead <= self._newest:
                    self._ahead = self._newest + 1 - label
                self._label, self._newest = label, label + self._ahead
            numbered.append((time_ns, self._newest))
            if self._ahead:
                labels.append((time_ns, self._newest, label))
        return numbered, labels

    def add_batches(self, ends_ns: Int64Array) -> None:
        """Count ended BATCHes, shape ``(n,)``. Call it before :meth:`label` for the same time."""
        self.batches += len(ends_ns)
        self._ends = np.concatenate((self._ends, np.sort(ends_ns, kind="stable")))[-_STEPS_REMEMBERED:]

    def add_marks(self, marks: list[Mark]) -> None:
        """Add marks: times in ns and steps, of :meth:`number`."""
        if not marks:
            return
        times, steps = np.array(marks, dtype=np.int64).T
        times = np.concatenate((self._mark_times, times))
        order = np.argsort(times, kind="stable")
        self._mark_times = times[order][-_STEPS_REMEMBERED:]
        self._mark_steps = np.concatenate((self._mark_steps, steps))[order][-_STEPS_REMEMBERED:]

    def label(self, starts_ns: Int64Array, ends_ns: Int64Array | None) -> Int64Array:
        if len(self._mark_times):
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
            at = np.searchsorted(times, starts_ns, "right") if ends_ns is None else np.searchsorted(times, ends_ns)
            labels = forgotten + at.astype(np.int64)
        labels[at == 0] = earliest
        return labels
