"""The times of operations by message size and group, and the queue in front of them.

A finished operation costs the thread that finishes it one append to a queue: the training thread, autograd's, or the
backend's own, which runs the callbacks of asynchronous operations. Whichever thread gets the lock without waiting
empties the queue into the records, in batches.

This module runs as plain Python and, with the C types of ``_log.pxd``, compiled.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from _thread import allocate_lock
from collections import Counter, deque
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

from deep500_timing._recording.intervals import Intervals
from deep500_timing.adapters import warn_once
from deep500_timing.runs import current
from deep500_timing_torch.comm._ops import bandwidths
from deep500_timing_torch.comm._settings import SETTINGS, fault

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing_torch.comm._ops import Op

BATCH = 32
"""Messages that wait at most. More of them would leave the processor's caches before they are read."""
CALLBACK_S = 0.5
"""Seconds that ``summary(wait=True)`` gives the callbacks of finished operations, which run on the backend's thread."""
KEEP_LAST = 256
"""Intervals kept one by one for each record. Aggregates and a histogram of the rest stay exact."""
MAX_SIZES = 256
"""Message sizes of an operation that get their own record in one group. Further sizes share a record for each power of
two, so that a run whose sizes all differ does not fill the memory."""
WINDOW = 1024
"""Latest operations of a group that can be compared with those of other ranks."""
DONE, ISSUE, EXPOSED, FAILED, UNTIMED, CAPTURED = range(6)
"""Kinds of messages: the time of an operation; the call of an asynchronous one; a wait for it; an exception; a time
that is not known; an operation captured into a graph."""
_KINDS = 6


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
        self.on_device = False
        self.upper_bound = False
        self.latency = Intervals(KEEP_LAST, 0)
        self.counts = [0] * _KINDS
        """Messages by kind."""
        self.sums_ns = [0] * _KINDS
        """The times of the messages by kind."""
        self.paired_ns = 0
        """The times of the operations whose exposed time is known as well."""
        self.hidden_ns = 0
        """The part of those times that no caller waited for."""

    @property
    def message_bytes(self) -> float | None:
        return self.bytes_total / self.calls if self.size_is_mean else self.nbytes

    def take(self, kind: int, start_ns: int, end_ns: int, sequence: int | None, op: Any, run: Any) -> None:
        """Count one message; only for the thread that empties the queue."""
        self.counts[kind] += 1
        self.sums_ns[kind] += end_ns - start_ns
        if kind == DONE:
            self.latency.append(start_ns, end_ns)
            if run is not None:
                size = -1 if self.nbytes is None else self.nbytes
                name, group = self.op.name, self.group.name
                run.collective(name, start_ns, end_ns, group=group, sequence=sequence, nbytes=size)
            if sequence is not None:
                self.group.ring.append((sequence, self.op.name, self.nbytes or 0, end_ns - start_ns))
            if SETTINGS.verbose:
                self._say(end_ns - start_ns)
        if op is not None:
            self._pair(op, end_ns - start_ns if kind == EXPOSED else None)

    def _pair(self, op: Any, exposed_ns: int | None) -> None:
        # An operation's time and its exposed time may come in either order, the latter in parts.
        if exposed_ns is not None:
            op.exposed_ns += exposed_ns
            op.exposures_left -= 1
        if op.exposures_left == 0 and op.done_ns is not None:
            op.exposures_left = -1
            took_ns = op.done_ns - op.start_ns
            self.paired_ns += took_ns
            self.hidden_ns += took_ns - op.exposed_ns

    def _say(self, took_ns: int) -> None:
        group = self.group
        if group.global_ranks[group.rank] != 0:
            return
        algbw, busbw = bandwidths(self.message_bytes, group.size, took_ns / 1e9, self.op.factor)
        size = "" if self.message_bytes is None else f", {self.message_bytes:.0f} B"
        rates = "" if algbw is None else f", algbw {algbw:.3f} GB/s"
        rates += "" if busbw is None else f", busbw {busbw:.3f} GB/s"
        most = "at most " if self.upper_bound else ""
        try:
            print(f"comm: {self.label}{size}, {group.size} ranks: {most}{took_ns / 1e6:.3f} ms{rates}", file=sys.stderr)
        except Exception as error:
            SETTINGS.verbose = False
            warn_once(
                f"Printing each operation (verbose=True) failed at {self.label} and is off from now on: "
                f"{type(error).__name__}: {error}. Operations are timed as before; "
                "comm.configure(verbose=True) switches it on again.",
                key="comm verbose",
            )


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
        """How far the operations that were seen have advanced the group's sequence number."""
        self.recorded: bool | None = None
        """Whether it times its operations for PyTorch's flight recorder, None until it was asked."""
        self._unseen_from: int | None = None
        """The sequence number less the operations seen and unseen, while unseen ones are counted."""
        self._unseen_before = 0

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

    def count(self, expected: int | None) -> int:
        """Count an operation before which this was the group's next number; returns the number it has."""
        number = self.number()
        if number is None:
            self._own_sequence += 1
            return self._own_sequence
        if expected is not None:
            self.seen += number - expected + 1
        return number

    def watch(self, number: int | None = None) -> None:
        """Count unseen operations from now on, from this sequence number or the present one."""
        number = self.number() if number is None else number
        self._unseen_from = None if number is None else number - self.seen - self._unseen_before

    def unwatch(self) -> None:
        """Stop counting. The count so far stays."""
        self._unseen_before = self.unseen
        self._unseen_from = None

    def forget(self) -> None:
        self.records.clear()
        self.sizes.clear()
        self.ring.clear()
        self._unseen_before = 0
        if self._unseen_from is not None:
            self.watch()

    @property
    def unseen(self) -> int:
        """How many operations the group issued while it was watched that were not seen."""
        number = self.number()
        if number is None or self._unseen_from is None:
            return self._unseen_before
        return max(number - self.seen - self._unseen_from, 0)

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


class CommLog:
    """Every group's records, and the queue in front of them."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[Record, int, int, int, int | None, Any]] = deque()
        self._draining = allocate_lock()
        self._groups: list[Group] = []
        self.known_groups: dict[int, Group] = {}
        self.alone = Group(None, "", 1, 0, [0])
        """Stands in for the group before there is one: the user's own operations need none."""
        self.under_way: dict[int, weakref.ref[Any]] = {}
        """Each unfinished ``PendingOp`` by its ``id``, in the order in which they were issued."""
        self._watching = False

    def put(
        self, record: Record, kind: int, start_ns: int, end_ns: int, sequence: int | None = None, op: Any = None
    ) -> None:
        """Queue one message, from any thread.

        It has the operation's number if ranks are to be compared by it, and the ``PendingOp`` if its time is to be
        paired with its exposed time.
        """
        self.inbox.append((record, kind, start_ns, end_ns, sequence, op))
        if len(self.inbox) >= BATCH or SETTINGS.verbose:
            self.drain(False)

    def drain(self, wait: bool) -> None:
        if not self._draining.acquire(wait):
            return
        run = current()
        inbox = self.inbox
        try:
            while inbox:
                record, kind, start_ns, end_ns, sequence, op = inbox.popleft()
                try:
                    record.take(kind, start_ns, end_ns, sequence, op, run)
                except Exception as error:
                    fault(record.label, error)
        finally:
            self._draining.release()

    # --- operations under way -------------------------------------------------------------------------------------

    def pending(self) -> list[Any]:
        """Each ``PendingOp`` that was issued and has not finished, the oldest first."""
        return [op for op in (reference() for reference in list(self.under_way.values())) if op is not None]

    def await_callbacks(self) -> None:
        """Wait a little for asynchronous operations of the CPU: a caller goes on before the callback has run."""
        deadline = time.monotonic() + CALLBACK_S
        while time.monotonic() < deadline and any(op.asynchronous and op.pool is None for op in self.pending()):
            time.sleep(0.001)

    # --- groups ---------------------------------------------------------------------------------------------------

    def group_of(self, process_group: Any) -> Group | None:
        """The record of a process group (None: there is none yet), or None if this rank is not in it."""
        if process_group is None:
            return self.alone
        group = self.known_groups.get(id(process_group))
        # Another group may have been at that address.
        if group is not None and group.reference() is process_group:
            return group
        return self._new_group(process_group)

    def _new_group(self, process_group: Any) -> Group | None:
        try:
            size, rank = process_group.size(), process_group.rank()
        except Exception:  # The marker for "not a member".
            return None
        try:
            name, ranks = str(process_group.group_name), list(c10d.get_process_group_ranks(process_group))
        except Exception:  # torch.distributed does not know a group that a library made itself.
            name, ranks = str(process_group.name()), list(range(size))
        group = Group(process_group, name, size, rank, ranks)
        if self._watching:
            # Every group that was there when the watch began is known since then: this one is younger.
            group.watch(0)
        for past in self._groups:
            # A group of that name was destroyed: the new one's numbers start again.
            if past.name == group.name:
                past.ring.clear()
        self._groups.append(group)
        self.known_groups[id(process_group)] = group
        return group

    def watch(self) -> None:
        """Count from now on what any group issues unseen."""
        self._watching = False
        for process_group in _existing_groups():
            self.group_of(process_group)
        for group in self.groups():
            group.watch()
        self._watching = True

    def unwatch(self) -> None:
        """Stop counting unseen operations. The count so far stays."""
        for group in self.groups():
            group.unwatch()
        self._watching = False

    def unseen(self) -> dict[str, int]:
        """For each group that issued operations unseen, how many; after emptying the queue."""
        counts: Counter[str] = Counter()
        for group in self.groups():
            counts[group.name] += group.unseen
        return dict(+counts)

    def groups(self) -> list[Group]:
        """Every group that was used, destroyed ones included, and those whose unseen operations are counted."""
        if self._watching:
            # A group of which nothing was ever seen is not known yet.
            for process_group in _existing_groups():
                self.group_of(process_group)
        return [self.alone, *self._groups]

    def records(self) -> Iterator[Record]:
        """Every record that was used, in the order of first use, after emptying the queue."""
        self.drain(True)
        for group in self.groups():
            for record in list(group.records.values()):
                if any(record.counts):
                    yield record

    def reset(self) -> None:
        self.drain(True)
        for group in self.groups():
            group.forget()
        self._groups = [group for group in self._groups if group.reference() is not None]

    def after_fork(self) -> None:
        """Start empty in a child process: the parent reports its own operations."""
        self._draining = allocate_lock()
        self.inbox.clear()
        self.under_way.clear()
        self.known_groups.clear()
        self._groups.clear()
        self.alone = Group(None, "", 1, 0, [0])


def _existing_groups() -> list[Any]:
    # In a PyTorch that keeps them elsewhere, groups are known from their first timed operation on.
    return list(getattr(getattr(c10d, "_world", None), "pg_map", ()))


LOG = CommLog()
os.register_at_fork(after_in_child=LOG.after_fork)
