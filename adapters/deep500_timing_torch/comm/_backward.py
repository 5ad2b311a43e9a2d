"""The wait at the end of a backward pass, which DDP does from C++, and what of each operation the computing hid.

Each ``op`` is a ``PendingOp`` of the module ``_operation``, which imports this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from deep500_timing_torch.comm._device import RECORDER, Stretch
from deep500_timing_torch.comm._log import EXPOSED, LOG, UNTIMED
from deep500_timing_torch.comm._settings import SETTINGS, fault

_THE_WAIT = "the wait at the end of a backward pass"
_MOST_PASSES = 64
_passes: dict[int, list[Any]] = {}
"""The operations that were issued in each backward pass that runs now, by the number of its graph task."""


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
    ops.append(op)


def _queue(callback: Callable[[], None]) -> None:
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def _computed(task: int) -> None:
    try:
        ops = [op for op in _passes.pop(task, []) if op.waits_left > 0]
        now_ns = SETTINGS.now_ns()
        stands = None
        if ops and ops[-1].pool is not None:
            stands = Stretch(ops[-1].pool, ops[-1].record.label, now_ns)
        _queue(lambda: _waited(ops, now_ns, stands))
    except Exception as error:
        fault(_THE_WAIT, error)


def _waited(ops: list[Any], start_ns: int, stands: Stretch | None) -> None:
    try:
        SETTINGS.region(_THE_WAIT, start_ns, SETTINGS.now_ns())
        if stands is not None:
            for op in ops:
                if not op.recorded:
                    op.untimed()
            stands.end(functools.partial(_stood, ops))
            return
        reached_ns = start_ns
        for op in ops:
            if op.waits_left <= 0 or op.done_ns is None:
                continue
            # They are waited for in this order: an operation that ends during an earlier wait exposes nothing.
            exposed_ns = max(op.done_ns - reached_ns, 0)
            op.waits_left = 0
            op.exposed(reached_ns, reached_ns + exposed_ns)
            reached_ns += exposed_ns
    except Exception as error:
        fault(_THE_WAIT, error)


def _stood(ops: list[Any], start_ns: int, end_ns: int | None) -> None:
    # The device has passed the wait, for which the stream that computes stood still.
    if end_ns is None:
        LOG.put(ops[-1].record, UNTIMED, 0, 0)
    elif all(op.recorded for op in ops):
        RECORDER.when_read(ops, functools.partial(_expose, ops, start_ns, end_ns))
    else:
        _expose(ops, start_ns, end_ns)


def _expose(ops: list[Any], start_ns: int, end_ns: int) -> None:
    """Share the time that the stream stood still among the operations for which it did.

    All were issued before, and a communicator runs one after another. So they ran without a gap until the end of the
    wait: the last one was exposed first, as far as it lasted, then the one before it.
    """
    if any(op.done_ns is None for op in ops):
        # Only the sum is known.
        LOG.put(ops[-1].record, EXPOSED, start_ns, end_ns)
        return
    for op in reversed(ops):
        begins_ns = max(end_ns - (op.done_ns - op.start_ns), start_ns)
        op.exposed(begins_ns, end_ns)
        end_ns = begins_ns
