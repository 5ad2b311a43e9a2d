"""How long the backend itself says that an asynchronous operation took, between events on the backend's own stream.

NCCL's backend records two events around each operation if it is told to (``_enable_collectives_timing``), and gives the
time between them when both are done (``Work._get_duration``). Nothing else tells the time of operations that are issued
together: an event on the stream of the caller stands before all of them.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import torch.distributed as dist

from deep500_timing.devices import captures
from deep500_timing_torch.comm._log import fault

if TYPE_CHECKING:
    from deep500_timing_torch.comm._records import Record


class Timed(Protocol):
    """What takes the time of an operation."""

    record: Record
    start_ns: int

    def done(self, start_ns: int, end_ns: int) -> None:
        """It took that long."""

    def untimed_under_way(self) -> None:
        """How long it took cannot be had."""


WAIT_S = 60.0
"""How long who asks for every time waits for operations that do not end."""
_MOST_AT_ONCE = 32
"""Operations that are asked for at most while another is issued."""

_enabled: dict[int, tuple[Any, bool]] = {}
_under_way: deque[tuple[Any, Timed]] = deque()


def enable(process_group: Any, device: Any) -> bool:
    """Let the group's backend time what it issues from now on; whether it can."""
    if process_group is None:
        return False
    key = id(process_group)
    known = _enabled.get(key)
    if known is not None and known[0] is process_group:
        return known[1]
    can = False
    try:
        backend = process_group._get_backend(device)
        if hasattr(backend, "_enable_collectives_timing") and hasattr(dist.Work, "_get_duration"):
            backend._enable_collectives_timing()
            can = True
    except Exception:
        can = False  # a group without a backend for that device, or one that another library made
    _enabled[key] = (process_group, can)
    return can


def forget(process_group: Any) -> None:
    """Forget a group that was destroyed."""
    _enabled.pop(id(process_group), None)


def follow(work: Any, tracker: Timed) -> None:
    """Read the time of an operation when it is over. Its handle is kept until then, and no longer."""
    collect(_MOST_AT_ONCE)
    _under_way.append((work, tracker))


def collect(most: int | None = None, *, wait: bool = False) -> None:
    """Read what is over, oldest first.

    Args:
        most: How many at most; all if None.
        wait: Wait for the others, for a user who asked for it by name.
    """
    deadline = time.monotonic() + WAIT_S
    read = 0
    while _under_way and (most is None or read < most):
        try:
            work, tracker = _under_way[0]
        except IndexError:  # another thread was faster
            return
        try:
            with captures.query_lock:
                if captures.under_way:
                    return
                done = work.is_completed()
            if not done:
                if not wait or time.monotonic() > deadline:
                    return
                time.sleep(0.0005)
                continue
            duration_ns = round(work._get_duration() * 1e6)
        except Exception as error:
            fault(tracker.record.label, error)
            duration_ns = -1
        try:
            _under_way.popleft()
        except IndexError:
            return
        read += 1
        if duration_ns < 0:
            tracker.untimed_under_way()
        else:
            tracker.done(tracker.start_ns, tracker.start_ns + duration_ns)
