"""The queue of finished operations, and every group that has issued any.

A finished operation costs the thread that finishes it one append to a queue, whichever thread that is: the training
thread, autograd's, or the backend's own, which runs the callbacks of asynchronous operations. The queue is emptied
into the records in batches, by whichever thread gets the lock without waiting.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

from deep500_timing.adapters import warn_once
from deep500_timing.runs import current, feeders
from deep500_timing_torch.comm._records import DONE, WHOLE, Group, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 256


def fault(name: str, error: Exception) -> None:
    """Say that an operation could not be timed, once; it has run or will run all the same."""
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
                key="comm verbose",
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
