"""The wait at the end of a backward pass, which DDP does from C++, and what of each operation the computing hid.

Each ``op`` is a ``PendingOp``, whose module imports this one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._records import EXPOSED, PAIR, UNTIMED
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deep500_timing_torch.comm._device import Stretch
    from deep500_timing_torch.comm._records import Record

_MOST_PASSES = 64
_passes: dict[int, BackwardWait] = {}
"""The backward passes that run now, by the number of their graph task."""


def watch_backward(op: Any, task: int) -> None:
    """Follow an operation to the end of the backward pass with that graph task, in which it was issued."""
    found = _passes.get(task)
    if found is None:
        if len(_passes) >= _MOST_PASSES:  # passes that failed before their end
            _passes.clear()
        found = _passes[task] = BackwardWait(task)
    found.add(op)


class BackwardWait:
    """The operations that were issued in one backward pass.

    The engine runs callbacks in the order in which they were queued. DDP queues its wait after its last bucket: the
    first callback here comes before that wait, and the one that it queues in turn comes after it.
    """

    def __init__(self, task: int) -> None:
        self._task = task
        self._ops: list[tuple[Any, Stretch | None]] = []
        _queue(self._computed)

    def add(self, op: Any) -> None:
        self._ops.append((op, op.mark()))

    def _computed(self) -> None:
        try:
            _passes.pop(self._task, None)
            now_ns = SETTINGS.now_ns()
            waiting = []
            for op, ahead in self._ops:
                if not op.waited:
                    waiting.append((op, ahead))
                elif ahead is not None:
                    ahead.drop()
            stood = None
            overlap = None
            if waiting and waiting[-1][0].on_device:
                overlap = DeviceOverlap([op.record for op, _ in waiting], now_ns)
                for index, (op, ahead) in enumerate(waiting):
                    overlap.follow(index, op, ahead)
                stood = waiting[-1][0].stretch_from(now_ns)
            ops = [op for op, _ in waiting]
            _queue(lambda: _waited(ops, now_ns, overlap, stood))
        except Exception as error:
            fault("the wait at the end of a backward pass", error)


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _waited(ops: list[Any], start_ns: int, overlap: DeviceOverlap | None, stood: Stretch | None) -> None:
    try:
        if SETTINGS.timer is not None:
            SETTINGS.region("the wait at the end of a backward pass", start_ns, SETTINGS.now_ns())
        if overlap is not None and stood is not None:
            stood.end(lambda start_ns, end_ns: overlap.stood(end_ns - start_ns), lambda: overlap.stood(None))
            return
        reached_ns = start_ns
        for op in ops:
            if op.waited or not op.done_ns:
                continue
            # They are waited for in this order: an operation that ends during an earlier wait exposes nothing.
            exposed_ns = max(op.done_ns - reached_ns, 0)
            op.exposed_at_end(reached_ns, reached_ns + exposed_ns)
            reached_ns += exposed_ns
    except Exception as error:
        fault("the wait at the end of a backward pass", error)


class DeviceOverlap:
    """The operations of one backward pass on a device, in the order in which they were issued.

    Three times are known when the device has passed all of it: how long before the end of the computing each
    operation was issued (two events on the stream that computes), how long each took (NCCL's own events), and how long
    that stream then stood still. A communicator runs one operation after another, so an operation ran from the later
    of its issue and the end of the one before. Its exposed time is what lies behind the end of the computing and
    behind the operation before.
    """

    def __init__(self, records: Sequence[Record], start_ns: int) -> None:
        count = len(records)
        self._records = records
        self._start_ns = start_ns
        self._ahead_ns: dict[int, int | None] = {}
        self._duration_ns: dict[int, int | None] = {}
        self._expected = set(range(count))
        self._stood_ns: int | None = None
        # Times come on any thread; the thread that takes the last token adds them up. Taking one is atomic.
        self._tokens = [None] * (2 * count)

    def follow(self, index: int, op: Any, ahead: Stretch | None) -> None:
        """The computing is over: learn how long before an operation was issued, and how long it takes."""
        if ahead is None:
            self._issued(index, None)
            op.untimed()
        else:
            ahead.end(
                lambda start_ns, end_ns: self._issued(index, end_ns - start_ns), lambda: self._issued(index, None)
            )
        op.join(self, index)

    def _issued(self, index: int, ahead_ns: int | None) -> None:
        self._ahead_ns[index] = ahead_ns
        self._piece()

    def took(self, index: int, duration_ns: int | None) -> None:
        """An operation took so long; None if unknown."""
        if index in self._expected:
            self._expected.discard(index)
            self._duration_ns[index] = duration_ns
            self._piece()

    def stood(self, stood_ns: int | None) -> None:
        """The stream that computes stood still so long for all of them; None if unknown."""
        self._stood_ns = stood_ns
        self._piece()

    def _piece(self) -> None:
        try:
            self._tokens.pop()
        except IndexError:
            self._add_up()

    def _add_up(self) -> None:
        durations = [self._duration_ns[index] for index in range(len(self._records))]
        if None in durations or None in self._ahead_ns.values():
            # Only the sum is known: the stream stood still for the last of them.
            if self._stood_ns is None:
                LOG.put(self._records[-1], UNTIMED, 0, 0)
            else:
                LOG.put(self._records[-1], EXPOSED, self._start_ns, self._start_ns + self._stood_ns)
            return
        ended = reached = 0  # from the end of the computing on
        for index, duration in enumerate(durations):
            assert duration is not None
            issued = -(self._ahead_ns[index] or 0)
            ended = duration + (issued if index == 0 else max(ended, issued))
            exposed = min(max(ended - reached, 0), duration)
            begins_ns = self._start_ns + reached
            reached = max(reached, ended)
            LOG.put(self._records[index], EXPOSED, begins_ns, begins_ns + exposed)
            LOG.put(self._records[index], PAIR, duration, exposed)
