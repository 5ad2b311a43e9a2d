"""What is kept of the operations: per group, operation and message size, in bounded memory.

A finished operation costs the thread that finishes it one append to a queue, whichever thread that is: the training
thread, autograd's, or the backend's own, which runs the callbacks of asynchronous operations. The queue is emptied
into the records in batches, by whichever thread gets the lock without waiting.
"""

from __future__ import annotations

import os
import sys
import weakref
from _thread import allocate_lock
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing._ground.warn import warn_once
from deep500_timing._recording.intervals import Intervals
from deep500_timing.runs import current, feeders

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing_torch.comm._ops import Op

KEEP_LAST = 256
"""Intervals kept one by one for each record; the rest lives on in exact aggregates and a histogram."""
MAX_SIZES = 256
"""Different message sizes of an operation that get a record of their own, in one group; more share a record for each
power of two, so that a run whose sizes all differ does not fill the memory."""
WINDOW = 1024
"""Latest operations of a group that can be compared with those of other ranks."""
BATCH = 256

SYNC, ISSUE, DONE, EXPOSED, PAIR, FAILED, UNTIMED, WHOLE = range(8)
"""Kinds of messages: a blocking operation; the call of an asynchronous one; its completion; a wait for it; its time
and what of it was exposed, in ns; an exception; an operation that took place elsewhere or whose time cannot be had;
all of an asynchronous one that was counted as under way. ``FAILED`` and ``UNTIMED`` say in place of a start whether the
operation had been counted as under way: 1 or 0. ``WHOLE`` has in place of the number of the group that number, the end
of the call, and start and end of the wait, both 0 if nobody waited."""


def fault(name: str, error: Exception) -> None:
    """Say that an operation could not be timed, once; it has run or will run all the same."""
    warn_once(
        f"Timing {name} failed; it runs all the same, untimed: {type(error).__name__}: {error}",
        about=f"comm {name} {type(error).__name__}",
    )


def caller() -> str:
    """The name of the function that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("deep500_timing_torch.comm", "torch.distributed")
    ):
        frame = frame.f_back
    return frame.f_code.co_name


class Record:
    """The times of one operation at one message size in one group."""

    __slots__ = (
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
            return self.bytes_total / self.calls if self.calls else None
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


class Source(Protocol):
    """Whoever sees operations, and keeps them for a while."""

    def drain(self) -> None:
        """Put them into the queue."""


class CommLog:
    """Every group's records, and the queue in front of them."""

    def __init__(self) -> None:
        """Start empty."""
        self.inbox: deque[tuple[Record, int, int, int, Any]] = deque()
        self._draining = allocate_lock()
        self.known_groups: dict[int, Group] = {}
        self._past: list[Group] = []
        self.alone = Group(None, "", 1, 0, [0])
        """Stands in for the group before there is one: the user's own operations need none."""
        self.observer: Callable[[Record, int, int, int], None] | None = None
        """Told of every message as it is counted: record, kind, start and end in ns."""
        self.source: Source | None = None
        """Has messages that are not in the queue yet."""
        self.look: Callable[[], None] | None = None
        """Queues the asynchronous operations that have ended unseen."""
        self._watching = False
        self._complete = False

    def put(self, record: Record, kind: int, start_ns: int, end_ns: int, seq: Any = None) -> None:
        """Queue one message, from any thread; ``seq`` is the number of the group, or what else the kind has."""
        self.inbox.append((record, kind, start_ns, end_ns, seq))
        if len(self.inbox) >= BATCH or self.observer is not None:
            self.drain(wait=False)

    def drain(self, *, wait: bool) -> None:
        """Empty the queue into the records.

        Args:
            wait: If another thread is at it, wait for it. A training thread does not.
        """
        if wait:
            if self.source is not None:
                self.source.drain()
            if self.look is not None:
                self.look()
        if not self._draining.acquire(wait):
            return
        run = current()
        inbox = self.inbox
        try:
            while True:
                try:
                    record, kind, start_ns, end_ns, more = inbox.popleft()
                except IndexError:
                    return
                try:
                    record.take(kind, start_ns, end_ns, more, run)
                except Exception as error:
                    fault(record.label, error)
                if self.observer is not None:
                    self._tell(record, kind, start_ns, end_ns)
        finally:
            self._draining.release()

    def _tell(self, record: Record, kind: int, start_ns: int, end_ns: int) -> None:
        # The thread is whichever empties the queue: the user's training thread, or the backend's.
        observer = self.observer
        try:
            if observer is not None:
                observer(record, DONE if kind == WHOLE else kind, start_ns, end_ns)
        except Exception as error:
            self.observer = None
            warn_once(
                f"Printing each operation (verbose=True) failed at {record.label} and is off from now on: "
                f"{type(error).__name__}: {error}. Operations are timed as before; comm.configure(verbose=True) "
                "switches it on again.",
                about="comm verbose",
            )

    def group_of(self, process_group: Any) -> Group | None:
        """What is remembered of a process group (None: there is none yet), or None if this rank is not in it."""
        if process_group is None:
            return self.alone
        group = self.known_groups.get(id(process_group))
        if group is not None and group.is_of(process_group):
            return group
        return self._new_group(process_group)

    def _new_group(self, process_group: Any) -> Group | None:
        from torch.distributed import get_process_group_ranks

        try:
            size, rank, name = process_group.size(), process_group.rank(), str(process_group.group_name)
            ranks = list(get_process_group_ranks(process_group))
            group = Group(process_group, name, size, rank, ranks)
        except Exception:  # No group: the marker that stands for "not a member", or a group of another make.
            return None
        if self._watching:
            # Every group that was there when the watch began is known since then: this one is younger.
            group.watch(0 if self._complete else None)
        old = self.known_groups.get(id(process_group))
        if old is not None:
            self._past.append(old)
        for past in (*self._past, *self.known_groups.values()):
            # The same group made anew, after the old one was destroyed: its numbers start anew as well.
            if past.name == group.name:
                past.ring.clear()
        self.known_groups[id(process_group)] = group
        return group

    def past_group(self, name: str, size: int, rank: int) -> Group:
        """What is remembered of a group that is gone, whose operations are told of only now."""
        for group in self._past:
            if (group.name, group.size, group.rank) == (name, size, rank):
                return group
        self._past.append(Group(None, name, size, rank, list(range(size))))
        return self._past[-1]

    def watch(self) -> None:
        """Count from now on what any group issues unseen."""
        self._complete = False
        self._watching = True
        for process_group in _existing_groups():
            group = self.group_of(process_group)
            if group is not None:
                group.watch(None)
        self._complete = True

    def unwatch(self) -> None:
        """Stop counting what is unseen; what was counted stays."""
        self._meet_existing()
        self._watching = False
        for group in self.groups():
            group.unwatch()

    @property
    def has_groups(self) -> bool:
        """Whether there was any process group."""
        return bool(self.known_groups or self._past)

    @property
    def watching(self) -> bool:
        """Whether what groups issue unseen is counted now."""
        return self._watching

    def unseen(self) -> dict[str, int]:
        """For each group that issued operations unseen, how many; after emptying the queue."""
        self._meet_existing()
        counts: dict[str, int] = {}
        for group in self.groups():
            if group.unseen:
                counts[group.name] = counts.get(group.name, 0) + group.unseen
        return counts

    def _meet_existing(self) -> None:
        # A group of which nothing was ever seen is not known yet.
        if self._watching:
            for process_group in _existing_groups():
                self.group_of(process_group)

    def groups(self) -> Iterator[Group]:
        """Every group that was used, those that are gone included."""
        yield self.alone
        yield from list(self._past)
        yield from list(self.known_groups.values())

    def records(self) -> Iterator[Record]:
        """Every record that was used, in the order of first use, after emptying the queue."""
        self.drain(wait=True)
        for group in self.groups():
            for record in list(group.records.values()):
                if record.used:
                    yield record

    def reset(self) -> None:
        """Forget every time, and what is under way now with them."""
        self.drain(wait=True)
        self._meet_existing()
        for group in self.groups():
            group.forget()
        self._past.clear()

    def after_fork(self) -> None:
        """Start anew in a child process: the parent reports what it did."""
        self._draining = allocate_lock()
        self.inbox.clear()
        self.known_groups.clear()
        self._past.clear()
        self.alone = Group(None, "", 1, 0, [0])


def _existing_groups() -> list[Any]:
    try:
        from torch.distributed import distributed_c10d

        return list(distributed_c10d._world.pg_map)
    except Exception:  # A PyTorch that keeps them elsewhere: groups are known from their first timed operation on.
        return []


LOG = CommLog()
"""The log of this process."""


def _hand_over() -> None:
    LOG.drain(wait=False)


# Before a run is flushed, what has finished is counted, and so queued for it.
feeders.append(_hand_over)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOG.after_fork)
