"""The wait at the end of a backward pass, which DDP does from C++, and what of each operation the computing hid.

Each ``op`` is a ``PendingOp`` of the module ``_operation``, which imports this one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing_torch.comm._device import Stretch
from deep500_timing_torch.comm._log import EXPOSED, LOG, PAIR, UNTIMED, fault
from deep500_timing_torch.comm._settings import SETTINGS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from deep500_timing_torch.comm._log import Record

_MOST_PASSES = 64
_passes: dict[int, list[tuple[Any, Stretch | None]]] = {}
"""The operations that were issued in each backward pass that runs now, by the number of its graph task; with each, the
device's time since its issue, None if its own duration will not be known."""


def watch_backward(op: Any, task: int) -> None:
    """Follow an operation to the end of the backward pass with that graph task, in which it was issued.

    The engine runs callbacks in the order in which they were queued. DDP queues its wait after its last bucket: the
    first callback here comes before that wait, and the one that it queues in turn comes after it.
    """
    ops = _passes.get(task)
    if ops is None:
        if len(_passes) >= _MOST_PASSES:  # passes that failed before their end
            _passes.clear()
        _queue(lambda: _computed(task))
        ops = _passes[task] = []
    ops.append((op, Stretch(op.pool, op.record.label, SETTINGS.now_ns()) if op.recorded else None))


def _computed(task: int) -> None:
    try:
        issued = _passes.pop(task, [])
        now_ns = SETTINGS.now_ns()
        waiting = []
        for op, ahead in issued:
            if op.waits_left > 0:
                waiting.append((op, ahead))
            elif ahead is not None:
                ahead.drop()
        overlap = None
        if waiting and waiting[-1][0].pool is not None:
            overlap = DeviceOverlap(waiting, now_ns)
        ops = [op for op, _ in waiting]
        _queue(lambda: _waited(ops, now_ns, overlap))
    except Exception as error:
        fault("the wait at the end of a backward pass", error)


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _waited(ops: list[Any], start_ns: int, overlap: DeviceOverlap | None) -> None:
    try:
        SETTINGS.region("the wait at the end of a backward pass", start_ns, SETTINGS.now_ns())
        if overlap is not None:
            overlap.stood.end(overlap.waited)
            return
        reached_ns = start_ns
        for op in ops:
            if op.waits_left <= 0 or not op.done_ns:
                continue
            # They are waited for in this order: an operation that ends during an earlier wait exposes nothing.
            exposed_ns = max(op.done_ns - reached_ns, 0)
            op.waits_left = 0
            op.exposed(reached_ns, reached_ns + exposed_ns)
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

    def __init__(self, ops: Sequence[tuple[Any, Stretch | None]], start_ns: int) -> None:
        """The computing is over, at this time on the host's clock; each operation comes as from :data:`_passes`."""
        self._records: list[Record] = [op.record for op, _ in ops]
        self._start_ns = start_ns
        self._ahead_ns: dict[int, int | None] = {}
        self._duration_ns: dict[int, int | None] = {}
        self._expected = set(range(len(ops)))
        self._stood_ns: int | None = None
        # Times come on any thread; the thread that takes the last token adds them up. Taking one is atomic.
        self._tokens = [None] * (2 * len(ops))
        for index, (op, ahead) in enumerate(ops):
            if ahead is None:
                self._issued(index, 0, None)
                op.untimed()
            else:
                ahead.end(functools.partial(self._issued, index))
            op.tell_duration(functools.partial(self._took, index))
        last = ops[-1][0]
        self.stood = Stretch(last.pool, last.record.label, start_ns)
        """The time that the stream stands still for all of them, to be ended behind the wait."""

    def _issued(self, index: int, start_ns: int, end_ns: int | None) -> None:
        self._ahead_ns[index] = None if end_ns is None else end_ns - start_ns
        self._piece()

    def _took(self, index: int, duration_ns: int | None) -> None:
        if index in self._expected:
            self._expected.discard(index)
            self._duration_ns[index] = duration_ns
            self._piece()

    def waited(self, start_ns: int, end_ns: int | None) -> None:
        """The stream that computes has passed the wait; the end is None if unknown."""
        self._stood_ns = None if end_ns is None else end_ns - start_ns
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
            LOG.put(self._records[index], PAIR, exposed, duration)
