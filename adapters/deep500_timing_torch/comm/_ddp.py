"""The gradient buckets of ``DistributedDataParallel``, timed through its communication hook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from deep500_timing import TimeType
from deep500_timing_torch.comm._device import Mark, ledger_for
from deep500_timing_torch.comm._ledger import DONE, EXPOSED, FAILED, ISSUE, LEDGER, LOST, PAIR, Record
from deep500_timing_torch.comm._ops import Op, both_ways, unknown
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._timed import inside, original_of
from deep500_timing_torch.comm._work import fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.devices._pool import DeviceLedger

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_BUCKET = Op("ddp_all_reduce", unknown, both_ways, meets=True)
_HOOKED = Op("ddp_hook", unknown, None, meets=True)


def instrument_ddp(
    model: torch.nn.parallel.DistributedDataParallel, *, hook: Hook | None = None, state: Any = None
) -> None:
    """Time the gradient buckets of a DDP model, which its reducer sends from C++ where nothing else sees them.

    Each bucket is a ``ddp_all_reduce`` in the summary. Its exposed time is what remained to be waited for when the
    backward pass had nothing left to compute. The hook does what DDP does by itself, so the gradients and the losses
    are the same to the last bit (with ``gradient_as_bucket_view=True`` and gradients that are kept from step to step,
    to rounding, unless the ranks are a power of two). DDP takes one hook in its life, and has no way to remove it:
    switch the timing off with ``configure(enabled=False)``.

    Args:
        model: The model, after it was wrapped and before its first backward pass.
        hook: A communication hook of your own, such as ``fp16_compress_hook``, to be timed in the place of DDP's; how
            many bytes it sends is its secret, so it has no bandwidth, and is called ``ddp_hook``.
        state: The first argument of ``hook``.

    Raises:
        TypeError: ``model`` is no ``DistributedDataParallel``.
        RuntimeError: The model has a hook already; pass it here instead.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise TypeError(
            f"instrument_ddp of a {type(model).__name__}: it times torch.nn.parallel.DistributedDataParallel. Wrap the "
            "model first; other code is timed by `with comm.instrument()`."
        )
    model.register_comm_hook(_Buckets(model.process_group, hook, state), _hook)


def _hook(state: _Buckets, bucket: GradBucket) -> Any:
    return state.send(bucket)


# DDP compares the annotations with the classes, which as strings they are not.
_hook.__annotations__ = {"bucket": GradBucket}


class _Bucket:
    """One bucket on its way."""

    __slots__ = ("done_ns", "mark", "record", "seq", "start_ns")

    def __init__(self, record: Record, start_ns: int) -> None:
        self.record = record
        self.start_ns = start_ns
        self.done_ns = 0
        self.seq: int | None = None
        self.mark: Mark | None = None

    def keep(self, start_ns: int, end_ns: int) -> None:
        LEDGER.put(self.record, DONE, start_ns, end_ns, self.seq)

    def fail(self) -> None:
        LEDGER.put(self.record, FAILED, 1, 0)


class _Buckets:
    """The state of the hook: the buckets of the backward pass that runs now."""

    def __init__(self, process_group: Any, hook: Hook | None, state: Any) -> None:
        self._process_group = process_group
        self._hook = hook
        self._state = state
        self._sent: list[_Bucket] = []

    def _launch(self, bucket: GradBucket) -> Any:
        if self._hook is not None:
            return self._hook(self._state, bucket)
        # As DDP does without a hook: multiply by the reciprocal, sum in place.
        buffer = bucket.buffer().mul_(1.0 / self._process_group.size())
        return original_of(dist.all_reduce)(buffer, group=self._process_group, async_op=True).get_future()

    def _result(self, future: Any) -> Any:
        value = future.value()
        return value if self._hook is not None else value[0]

    def send(self, bucket: GradBucket) -> Any:
        op = _BUCKET if self._hook is None else _HOOKED
        group = LEDGER.group_of(self._process_group) if SETTINGS.enabled and SETTINGS.wants(op.name) else None
        if group is None:
            return self._launch(bucket).then(self._result)
        if bucket.index() == 0:
            self._sent = []  # of a backward pass that failed on its way
        buffer = bucket.buffer()
        record = group.record(op, op.name, buffer.nbytes)
        device = None if buffer.is_cpu else ledger_for(buffer)
        sent = _Bucket(record, SETTINGS.now_ns())
        if device is not None:
            record.on_device = True
            sent.mark = Mark(device, op.name, sent.start_ns, sent.keep, sent.fail, SETTINGS.device_store())
        before, inside.now = inside.now, True  # what a hook calls is part of the bucket
        try:
            future = self._launch(bucket)
        finally:
            inside.now = before
        sent.seq = group.sequence(self._process_group)
        LEDGER.put(record, ISSUE, sent.start_ns, SETTINGS.now_ns())
        self._sent.append(sent)
        if bucket.is_last():
            # The engine calls back in the order of asking, and DDP asks right after this hook, for the waiting; what
            # is asked for inside a callback comes after that.
            queue_callback: Any = torch.autograd.Variable._execution_engine.queue_callback
            queue_callback(lambda: self._computed(queue_callback, device))

        def done(future: Any) -> Any:
            sent.done_ns = SETTINGS.now_ns()
            try:
                result = self._result(future)
            except BaseException:
                sent.fail()
                raise
            if sent.mark is not None:
                sent.mark.end()
            else:
                sent.keep(sent.start_ns, sent.done_ns)
            return result

        return future.then(done)

    def _computed(self, queue_callback: Any, device: DeviceLedger | None) -> None:
        # The backward pass has computed everything; DDP is about to wait for its buckets.
        buckets, self._sent = self._sent, []
        now_ns = SETTINGS.now_ns()
        mark = None
        if device is not None:
            record = buckets[-1].record

            def keep(start_ns: int, end_ns: int) -> None:
                LEDGER.put(record, EXPOSED, start_ns, end_ns)

            mark = Mark(device, record.label, now_ns, keep, lambda: LEDGER.put(record, LOST, 0, 0), None)
        queue_callback(lambda: self._waited(buckets, now_ns, mark))

    def _waited(self, buckets: list[_Bucket], start_ns: int, mark: Mark | None) -> None:
        # DDP has waited for every bucket.
        if SETTINGS.timer is not None:
            try:
                SETTINGS.timer.record(TimeType.COMM, start_ns, SETTINGS.now_ns())
            except Exception as error:
                fault("the wait for DDP's buckets", error)
        if mark is not None:
            mark.end()
            return
        reached_ns = start_ns
        for sent in buckets:
            # They are waited for in this order, so one that is done while an earlier one is waited for costs nothing.
            exposed_ns = max(sent.done_ns - reached_ns, 0)
            LEDGER.put(sent.record, EXPOSED, reached_ns, reached_ns + exposed_ns)
            LEDGER.put(sent.record, PAIR, sent.done_ns - sent.start_ns, exposed_ns)
            reached_ns += exposed_ns
