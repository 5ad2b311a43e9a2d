"""The queue of finished operations, and every group that has issued any.

A finished operation costs the thread that finishes it one append to a queue: the training thread, autograd's, or the
backend's own, which runs the callbacks of asynchronous operations. Whichever thread gets the lock without waiting
empties the queue into the records, in batches.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import allocate_lock
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import warn_once
from deep500_timing.runs import current
from deep500_timing_torch.comm._records import Group, Record

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterator


BATCH = 32
"""Messages that wait at most. More of them would leave the processor's caches before they are read."""
CALLBACK_S = 0.5
"""Seconds that a reader who waits gives the callbacks of finished operations, which run on the backend's thread."""
_MOST_NAMED = 8


def fault(name: str, error: Exception) -> None:
    """Warn once that an operation could not be timed; it runs all the same."""
    warn_once(
        f"Timing {name} failed; it runs all the same, untimed: {type(error).__name__}: {error}",
        key=f"comm {name} {type(error).__name__}",
    )


def caller() -> str:
    """The name of the function that called into this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("deep500_timing_torch.comm", "torch.distributed")
    ):
        frame = frame.f_back
    return frame.f_code.co_name


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An operation of this rank that was issued and has not finished."""

    op: str
    group: str
    sequence: int | None
    """The group's sequence number of it, the same on every rank; None if the backend does not count."""
    message_bytes: float | None
    age_s: float
    """Seconds since it was issued."""

    def __str__(self) -> str:
        number = "" if self.sequence is None else f" #{self.sequence}"
        size = "" if self.message_bytes is None else f", {self.message_bytes:.0f} B"
        return f"{self.op}{number} of group {self.group!r}{size}, issued {self.age_s:.3f} s ago"


class CommLog:
    """Every group's records, and the queue in front of them."""

    def __init__(self) -> None:
        self.inbox: deque[tuple[Record, int, int, int, int | None]] = deque()
        self._draining = allocate_lock()
        self.known_groups: dict[int, Group] = {}
        self._past: list[Group] = []
        self.alone = Group(None, "", 1, 0, [0])
        """Stands in for the group before there is one: the user's own operations need none."""
        self.under_way: dict[weakref.ref[Any], None] = {}
        """Each unfinished ``PendingOp``, in the order in which they were issued."""
        self.observer: Callable[[Record, int, int, int], None] | None = None
        """Called with every message as it is counted: record, kind, start and end in ns."""
        self._latest = self.alone
        """The group that :meth:`group_of` returned last."""
        self._watching = False
        self._complete = False

    def put(self, record: Record, kind: int, start_ns: int, end_ns: int, sequence: int | None = None) -> None:
        """Queue one message, from any thread."""
        self.inbox.append((record, kind, start_ns, end_ns, sequence))
        if len(self.inbox) >= BATCH or self.observer is not None:
            self.drain(False)

    def drain(self, wait: bool) -> None:
        if not self._draining.acquire(wait):
            return
        run = current()
        inbox = self.inbox
        try:
            while inbox:
                record, kind, start_ns, end_ns, sequence = inbox.popleft()
                try:
                    record.take(kind, start_ns, end_ns, sequence, run)
                except Exception as error:
                    fault(record.label, error)
                if self.observer is not None:
                    self._tell(record, kind, start_ns, end_ns)
        finally:
            self._draining.release()

    def _tell(self, record: Record, kind: int, start_ns: int, end_ns: int) -> None:
        observer = self.observer
        try:
            if observer is not None:
                observer(record, kind, start_ns, end_ns)
        except Exception as error:
            self.observer = None
            warn_once(
                f"Printing each operation (verbose=True) failed at {record.label} and is off from now on: "
                f"{type(error).__name__}: {error}. Operations are timed as before; comm.configure(verbose=True) "
                "switches it on again.",
                key="comm verbose",
            )

    # --- operations under way -------------------------------------------------------------------------------------

    def unfinished(self, clock: Callable[[], int]) -> list[Unfinished]:
        """The operations that were issued and have not finished, the oldest first."""
        try:
            now_ns = clock()
        except Exception as error:
            fault("operations that have not finished", error)
            return []
        found = []
        for reference in list(self.under_way):
            op = reference()
            if op is not None:
                record = op.record
                age_s = max(now_ns - op.start_ns, 0) / 1e9
                found.append(Unfinished(record.label, record.group.name, op.sequence, record.message_bytes, age_s))
        return found

    def await_callbacks(self) -> None:
        """Wait a little for asynchronous operations of the CPU: a caller goes on before the callback has run."""
        deadline = time.monotonic() + CALLBACK_S
        while time.monotonic() < deadline:
            ops = [reference() for reference in list(self.under_way)]
            if not any(op is not None and op.asynchronous and not op.on_device for op in ops):
                return
            del ops
            time.sleep(0.001)

    def report_time_out(self, op: Any, error: BaseException, clock: Callable[[], int]) -> None:
        """If an operation has timed out, warn with what this rank has issued and not finished."""
        text = str(error)
        if not isinstance(error, RuntimeError) or not ("timeout" in text.lower() or "timed out" in text.lower()):
            return
        try:
            waiting = self.unfinished(clock)
            named = "; ".join(map(str, waiting[:_MOST_NAMED]))
            more = f"; and {len(waiting) - _MOST_NAMED} more" if len(waiting) > _MOST_NAMED else ""
            group = op.record.group
            rank = group.global_ranks[group.rank]
            warn_once(
                f"{op.record.label} timed out on rank {rank}. Issued and not finished on this rank: {named}{more}. "
                "A rank that does not list a number has finished or not issued that operation.",
                key=f"comm time-out {op.record.label} {op.sequence}",
            )
        except Exception as failed:
            fault(op.record.label, failed)

    # --- groups ---------------------------------------------------------------------------------------------------

    def group_of(self, process_group: Any) -> Group | None:
        """The record of a process group (None: there is none yet), or None if this rank is not in it."""
        if process_group is None:
            return self.alone
        if self._latest.is_of(process_group):
            return self._latest
        group = self.known_groups.get(id(process_group))
        if group is not None and group.is_of(process_group):
            self._latest = group
            return group
        return self._new_group(process_group)

    def _new_group(self, process_group: Any) -> Group | None:
        from torch.distributed import get_process_group_ranks

        try:
            size, rank, name = process_group.size(), process_group.rank(), str(process_group.group_name)
            ranks = list(get_process_group_ranks(process_group))
            group = Group(process_group, name, size, rank, ranks)
        except Exception:  # The marker for "not a member", or a group that torch.distributed does not know.
            return None
        if self._watching:
            # Every group that was there when the watch began is known since then: this one is younger.
            group.watch(0 if self._complete else None)
        old = self.known_groups.get(id(process_group))
        if old is not None:
            self._past.append(old)
        for past in (*self._past, *self.known_groups.values()):
            # A group of that name was destroyed: the new one's numbers start again.
            if past.name == group.name:
                past.ring.clear()
        self.known_groups[id(process_group)] = group
        return group

    def unregistered_group(self, process_group: Any) -> Group:
        """The record of a group that ``torch.distributed`` does not know, as a library may make one."""
        name, size, rank = process_group.name(), process_group.size(), process_group.rank()
        for group in self._past:
            if (group.name, group.size, group.rank) == (name, size, rank):
                return group
        group = Group(None, name, size, rank, list(range(size)))
        self._past.append(group)
        return group

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
        """Stop counting unseen operations. The count so far stays."""
        self._meet_existing()
        self._watching = False
        for group in self.groups():
            group.unwatch()

    @property
    def has_groups(self) -> bool:
        """Whether there was any process group."""
        return bool(self.known_groups or self._past)

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
        """Every group that was used, destroyed ones included."""
        yield self.alone
        yield from list(self._past)
        yield from list(self.known_groups.values())

    def records(self) -> Iterator[Record]:
        """Every record that was used, in the order of first use, after emptying the queue."""
        self.drain(True)
        for group in self.groups():
            for record in list(group.records.values()):
                if record.used:
                    yield record

    def reset(self) -> None:
        self.drain(True)
        self._meet_existing()
        for group in self.groups():
            group.forget()
        self._past.clear()

    def after_fork(self) -> None:
        """Start empty in a child process: the parent reports its own operations."""
        self._draining = allocate_lock()
        self.inbox.clear()
        self.under_way.clear()
        self.known_groups.clear()
        self._past.clear()
        self.alone = self._latest = Group(None, "", 1, 0, [0])


def _existing_groups() -> list[Any]:
    try:
        from torch.distributed import distributed_c10d

        return list(distributed_c10d._world.pg_map)
    except Exception:  # A PyTorch that keeps them elsewhere: groups are known from their first timed operation on.
        return []


LOG = CommLog()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=LOG.after_fork)
