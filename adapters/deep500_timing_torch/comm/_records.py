"""The times of one operation at one message size, and of one process group, in bounded memory."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

from deep500_timing._recording.intervals import Intervals

if TYPE_CHECKING:
    from deep500_timing_torch.comm._ops import Op

KEEP_LAST = 256
"""Intervals kept one by one for each record. Aggregates and a histogram of the rest stay exact."""
MAX_SIZES = 256
"""Message sizes of an operation that get their own record in one group. Further sizes share a record for each power of
two, so that a run whose sizes all differ does not fill the memory."""
WINDOW = 1024
"""Latest operations of a group that can be compared with those of other ranks."""
SYNC, ISSUE, DONE, EXPOSED, PAIR, FAILED, UNTIMED, CAPTURED = range(8)
"""Kinds of messages: a blocking operation; the call of an asynchronous one; its completion; a wait for it; its time and
the exposed part of that, in ns; an exception; a time that is not known; an operation captured into a graph. ``FAILED``
and ``UNTIMED`` carry in place of a start 1 if ``ISSUE`` was sent before, else 0."""


class Record:
    """The times of one operation at one message size in one group."""

    def __init__(self, op: Op, label: str, nbytes: int | None, group: Group, *, size_is_mean: bool = False) -> None:
        self.op = op
        self.label = label
        self.nbytes = nbytes
        self.group = group
        self.size_is_mean = size_is_mean
        self.calls = 0
        self.bytes_total = 0
        self.no_future = False
        """Whether the backend has no future for this operation."""
        self.on_device = False
        self.upper_bound = False
        self.latency = Intervals(KEEP_LAST, 0)
        self.issue: Intervals | None = None
        self.exposed: Intervals | None = None
        self.paired_latency_ns = 0
        self.paired_exposed_ns = 0
        self.started = 0
        self.finished = 0
        self.failed = 0
        self.untimed = 0
        self.captured = 0

    @property
    def message_bytes(self) -> float | None:
        if self.size_is_mean:
            return self.bytes_total / self.calls if self.calls else None
        return self.nbytes

    @property
    def used(self) -> bool:
        return bool(self.latency.count or self.started or self.failed or self.untimed or self.captured)

    def take(self, kind: int, start_ns: int, end_ns: int, sequence: int | None, run: Any) -> None:
        """Count one message; only for the thread that empties the queue."""
        if kind in (SYNC, DONE):
            self._take_time(start_ns, end_ns, sequence, run)
            self.finished += kind == DONE
        elif kind == ISSUE:
            self.started += 1
            self.issue = self.issue or Intervals(KEEP_LAST, 0)
            self.issue.append(start_ns, end_ns)
        elif kind == EXPOSED:
            self.exposed = self.exposed or Intervals(KEEP_LAST, 0)
            self.exposed.append(start_ns, end_ns)
        elif kind == PAIR:
            self.paired_latency_ns += start_ns
            self.paired_exposed_ns += end_ns
        elif kind == CAPTURED:
            self.captured += 1
        elif kind == FAILED:
            self.failed += 1
            self.finished += start_ns
        else:
            self.untimed += 1
            self.finished += start_ns

    def _take_time(self, start_ns: int, end_ns: int, sequence: int | None, run: Any) -> None:
        self.latency.append(start_ns, end_ns)
        name = self.op.name
        if run is not None:
            size = -1 if self.nbytes is None else self.nbytes
            run.collective(name, start_ns, end_ns, group=self.group.name, sequence=sequence, nbytes=size)
        if sequence is not None:
            self.group.ring.append((sequence, name, self.nbytes or 0, end_ns - start_ns))


class Group:
    """A process group, remembered by name: its records outlive it."""

    def __init__(self, process_group: Any, name: str, size: int, rank: int, global_ranks: list[int]) -> None:
        self.reference = weakref.ref(process_group) if process_group is not None else lambda: None
        self._own_sequence = 0
        self._backend_counts = True
        self.device_end: tuple[Any, int] = (None, 0)
        """The host clock, and when on it the last operation that was read ended on the device."""
        self.name = name
        self.size = size
        self.rank = rank
        self.global_ranks = global_ranks
        self.records: dict[tuple[str, int | None], Record] = {}
        self.sizes: dict[str, int] = {}
        self.ring: deque[tuple[int, str, int, int]] = deque(maxlen=WINDOW)
        self.seen = 0
        """How far the operations that were seen have advanced the group's sequence number since the watch began."""
        self._watched_from: int | None = None
        self._unseen_before = 0

    def is_of(self, process_group: Any) -> bool:
        """Whether this is the record of that group, and not of an earlier one at the same address."""
        return self.reference() is process_group

    def number(self) -> int | None:
        """The group's sequence number, None if its backend does not count or the group is gone."""
        process_group = self.reference()
        if process_group is None or not self._backend_counts:
            return None
        try:
            number: int = process_group._get_sequence_number_for_group()
            return number
        except Exception:  # Not every backend counts.
            self._backend_counts = False
            return None

    def count(self, before: int | None) -> int:
        """Count an operation that was issued when the group stood at ``before``."""
        number = self.number()
        if number is None:
            self._own_sequence += 1
            return self._own_sequence
        if before is not None:
            self.seen += number - before
        return number

    def watch(self, start: int | None) -> None:
        """Count unseen operations from now on, from this sequence number or the present one."""
        self._watched_from = self.number() if start is None else start
        self.seen = 0

    def unwatch(self) -> None:
        """Stop counting. The count so far stays."""
        self._unseen_before = self.unseen
        self._watched_from = None

    def forget(self) -> None:
        self.records.clear()
        self.sizes.clear()
        self.ring.clear()
        self._unseen_before = 0
        if self._watched_from is not None:
            self.watch(None)

    @property
    def unseen(self) -> int:
        """How many operations the group issued while it was watched that were not seen."""
        if self._watched_from is None:
            return self._unseen_before
        number = self.number()
        if number is None:
            return self._unseen_before
        return self._unseen_before + max(number - self._watched_from - self.seen, 0)

    def record(self, op: Op, label: str, nbytes: int | None) -> Record:
        """The record of an operation at a message size, of which one more is about to run."""
        record = self.records.get((label, nbytes))
        if record is None:
            record = self._new_record(op, label, nbytes)
        record.calls += 1
        if record.size_is_mean and nbytes is not None:
            record.bytes_total += nbytes
        return record

    def _new_record(self, op: Op, label: str, nbytes: int | None) -> Record:
        seen = self.sizes.get(label, 0)
        if nbytes is None or seen < MAX_SIZES:
            self.sizes[label] = seen + 1
            return self.records.setdefault((label, nbytes), Record(op, label, nbytes, self))
        # A shared record's key is negative, which no message size is: minus the position of the highest bit.
        bucket = -nbytes.bit_length()
        shared = self.records.get((label, bucket))
        if shared is None:
            lower = 1 << max(nbytes.bit_length() - 1, 0)
            shared = self.records.setdefault((label, bucket), Record(op, label, lower, self, size_is_mean=True))
        return shared
