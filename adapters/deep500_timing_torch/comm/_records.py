"""What is kept of one operation at one message size, and of one group: in bounded memory.

This file runs as plain Python and, with the C types of ``_records.pxd``, compiled. Whatever counts an operation whose
call has returned is whole at each moment, so that any thread may; the rest is for the thread that empties the queue.
"""

from __future__ import annotations

import weakref
from collections import deque

from deep500_timing._recording.intervals import Intervals  # whose C type the .pxd reads there

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from deep500_timing_torch.comm._ops import Op

KEEP_LAST = 256
"""Intervals kept one by one for each record; the rest lives on in exact aggregates and a histogram."""
MAX_SIZES = 256
"""Different message sizes of an operation that get a record of their own, in one group; more share a record for each
power of two, so that a run whose sizes all differ does not fill the memory."""
WINDOW = 1024
"""Latest operations of a group that can be compared with those of other ranks."""
SYNC, ISSUE, DONE, EXPOSED, PAIR, FAILED, UNTIMED, WHOLE = range(8)
"""Kinds of messages: a blocking operation; the call of an asynchronous one; its completion; a wait for it; its time
and what of it was exposed, in ns; an exception; an operation that took place elsewhere or whose time cannot be had;
all of an asynchronous one that was counted as under way. ``FAILED`` and ``UNTIMED`` say in place of a start whether the
operation had been counted as under way: 1 or 0. ``WHOLE`` has in place of the number of the group that number, the end
of the call, and start and end of the wait, both 0 if nobody waited."""


class Record:
    """The times of one operation at one message size in one group."""

    __slots__ = (
        "advance",
        "blocked",
        "bytes_total",
        "calls",
        "common_name",
        "exposed",
        "failed",
        "finished",
        "group",
        "issue",
        "label",
        "latency",
        "nbytes",
        "no_future",
        "on_device",
        "op",
        "paired_exposed_ns",
        "paired_latency_ns",
        "size_is_mean",
        "started",
        "untimed",
        "upper_bound",
    )

    def __init__(self, op: Op, label: str, nbytes: int | None, group: Group, *, size_is_mean: bool = False) -> None:
        """Start empty."""
        self.op = op
        self.common_name = op.same_as or op.name
        """Under which ranks compare it."""
        self.label = label
        self.nbytes = nbytes
        self.group = group
        self.size_is_mean = size_is_mean
        self.calls = 0
        self.bytes_total = 0
        self.no_future = False
        self.on_device = False
        self.upper_bound = False
        self.advance = -1
        """How far one call of it advances the number of the group's operations, as far as is known."""
        self.blocked = 0.0
        """How many ended while somebody was waiting for them; minus infinity if ever one did not."""
        self._clear()

    def _clear(self) -> None:
        self.latency = Intervals(KEEP_LAST, 0)
        self.issue: Intervals | None = None
        self.exposed: Intervals | None = None
        self.paired_latency_ns = 0
        self.paired_exposed_ns = 0
        self.started = 0
        self.finished = 0
        self.failed = 0
        self.untimed = 0

    @property
    def message_bytes(self) -> float | None:
        """Bytes of one message; the mean of those that share the record."""
        if self.size_is_mean:
            # Compiled, one of integers would be rounded down.
            return float(self.bytes_total) / self.calls if self.calls else None
        return self.nbytes

    @property
    def used(self) -> bool:
        """Whether anything was counted."""
        return bool(self.latency.count or self.started or self.failed or self.untimed)

    def take(self, kind: int, start_ns: int, end_ns: int, more: Any, run: Any) -> None:
        """Count one message; only for the thread that empties the queue.

        Args:
            kind: The kind of message, which says what the next three are.
            start_ns: When it began.
            end_ns: When it ended.
            more: The number that the group gave it, or what else the kind has.
            run: The run's log, None if there is none.
        """
        if kind in (SYNC, DONE):
            self._take_time(start_ns, end_ns, more, run)
            self.finished += kind == DONE
        elif kind == WHOLE:
            seq, issued_ns, wait_start_ns, wait_end_ns = more
            if self.issue is None:
                self.issue = Intervals(KEEP_LAST, 0)
            if wait_end_ns:
                if self.exposed is None:
                    self.exposed = Intervals(KEEP_LAST, 0)
                self.take_whole(start_ns, end_ns, seq, issued_ns, wait_start_ns, wait_end_ns, run)
            else:
                self._take_time(start_ns, end_ns, seq, run)
                self.finished += 1
                self.issue.append(start_ns, issued_ns)
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
        elif kind == FAILED:
            self.failed += 1
            self.finished += start_ns
        else:
            self.untimed += 1
            self.finished += start_ns

    def take_whole(
        self,
        start_ns: int,
        end_ns: int,
        seq: int | None,
        issued_ns: int,
        wait_start_ns: int,
        wait_end_ns: int,
        run: Any = None,
    ) -> None:
        """Count an asynchronous operation that was waited for, from any thread.

        What is counted here is whole at each moment: an addition to an attribute lets no other thread in. There must
        have been such an operation before, which the thread that empties the queue has counted.
        """
        self._take_time(start_ns, end_ns, seq, run)
        self.finished += 1
        self.issue.append(start_ns, issued_ns)  # type: ignore[union-attr]
        self.exposed.append(wait_start_ns, wait_end_ns)  # type: ignore[union-attr]
        self.paired_latency_ns += end_ns - start_ns
        self.paired_exposed_ns += wait_end_ns - wait_start_ns

    def _take_time(self, start_ns: int, end_ns: int, seq: int | None, run: Any) -> None:
        self.latency.append(start_ns, end_ns)
        if run is not None:
            size = -1 if self.nbytes is None else self.nbytes
            run.collective(self.common_name, start_ns, end_ns, group=self.group.name, sequence=seq, nbytes=size)
        if seq is not None:
            self.group.ring.append((seq, self.common_name, self.nbytes or 0, end_ns - start_ns))


class Group:
    """A process group, remembered by name: its records outlive it."""

    __slots__ = (
        "_unseen_before",
        "_watched_from",
        "advances",
        "backend_counts",
        "device_end",
        "global_ranks",
        "name",
        "own_seq",
        "rank",
        "records",
        "reference",
        "ring",
        "seen",
        "size",
        "sizes",
    )

    def __init__(self, process_group: Any, name: str, size: int, rank: int, global_ranks: list[int]) -> None:
        """Remember a process group without keeping it alive."""
        self.reference = weakref.ref(process_group) if process_group is not None else lambda: None
        self.own_seq = 0
        """How many collectives were seen, the number of the last one of a backend that does not count."""
        self.device_end: tuple[Any, int] = (None, 0)
        """When the last of its operations that was read was over on the device, and on which host clock."""
        self.backend_counts = True
        """Whether the backend numbers its operations, as far as is known."""
        self.name = name
        self.size = size
        self.rank = rank
        self.global_ranks = global_ranks
        self.records: dict[tuple[str, int | None], Record] = {}
        self.sizes: dict[str, int] = {}
        self.ring: deque[tuple[int, str, int, int]] = deque(maxlen=WINDOW)
        self.advances: dict[str, int] = {}
        """For an operation, how far one call of it advances the number of the group's operations."""
        self.seen = 0
        """How many of the group's operations were seen since the watch began, those included that a timed one is made
        of."""
        self._watched_from: int | None = None
        self._unseen_before = 0

    def is_of(self, process_group: Any) -> bool:
        """Whether this is what is remembered of that group, rather than of one that had its address before."""
        return self.reference() is process_group

    def sequence(self, process_group: Any) -> int:
        """How many collectives the group has issued: the same number on every rank that is as far."""
        if self.backend_counts:
            try:
                number: int = process_group._get_sequence_number_for_group()
                return number
            except Exception:  # Not every backend does.
                self.backend_counts = False
        self.own_seq += 1
        return self.own_seq

    def number(self) -> int | None:
        """How many operations the group has issued in all, None if its backend does not count or it is gone."""
        process_group = self.reference()
        if process_group is None or not self.backend_counts:
            return None
        try:
            number: int = process_group._get_sequence_number_for_group()
            return number
        except Exception:
            self.backend_counts = False
            return None

    def watch(self, start: int | None) -> None:
        """Count from now on what it issues unseen; from a number that is given, or the present one."""
        self._watched_from = self.number() if start is None else start
        self.seen = 0

    def unwatch(self) -> None:
        """Stop counting; what was counted stays."""
        self._unseen_before = self.unseen
        self._watched_from = None

    def forget(self) -> None:
        """Forget every operation."""
        self.records.clear()
        self.sizes.clear()
        self.ring.clear()
        self._unseen_before = 0
        if self._watched_from is not None:
            self.watch(None)

    @property
    def unseen(self) -> int:
        """How many operations it issued while it was watched, other than those that were seen."""
        if self._watched_from is None:
            return self._unseen_before
        number = self.number()
        if number is None:
            return self._unseen_before
        return self._unseen_before + max(number - self._watched_from - self.seen, 0)

    def find(self, op: Op, label: str, nbytes: int | None) -> Record:
        """The record of an operation at a message size."""
        record = self.records.get((label, nbytes))
        return self._new_record(op, label, nbytes) if record is None else record

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
        # A negative size cannot be one of a message: the power of two that these have as their highest bit.
        bucket = -nbytes.bit_length()
        shared = self.records.get((label, bucket))
        if shared is None:
            lower = 1 << max(nbytes.bit_length() - 1, 0)
            shared = self.records.setdefault((label, bucket), Record(op, label, lower, self, size_is_mean=True))
        return shared
