"""The gradient buckets of ``DistributedDataParallel``, timed through its communication hook."""

from __future__ import annotations

from _thread import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from deep500_timing_torch.comm import _own_time
from deep500_timing_torch.comm._backward import BackwardWait
from deep500_timing_torch.comm._device import EventPair, pool_for
from deep500_timing_torch.comm._log import LOG, fault
from deep500_timing_torch.comm._ops import Op, both_ways, unknown
from deep500_timing_torch.comm._records import DONE, EXPOSED, FAILED, ISSUE, PAIR, UNTIMED, Record
from deep500_timing_torch.comm._settings import SETTINGS
from deep500_timing_torch.comm._short_call import inside
from deep500_timing_torch.comm._timed import original_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing.devices import EventPool
    from deep500_timing_torch.comm._overlap import DeviceOverlap

    Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_BUCKET = Op("ddp_all_reduce", unknown, both_ways, synchronizes=True)
_HOOKED = Op("ddp_hook", unknown, None, synchronizes=True)


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
        hook: A communication hook of your own, such as ``fp16_compress_hook``, to be timed in the place of DDP's. The
            bytes it sends are unknown, so no bandwidth is given; it is called ``ddp_hook``.
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

    __slots__ = ("before", "device", "done_ns", "early", "index", "mark", "overlap", "own", "record", "seq", "start_ns")

    def __init__(self, record: Record, device: EventPool | None, start_ns: int) -> None:
        self.record = record
        self.device = device
        self.start_ns = start_ns
        self.done_ns = 0
        self.seq: int | None = None
        self.mark: EventPair | None = None
        """On a device: from the issue to the end of the computing."""
        self.before: int | None = None
        self.own = False
        """Whether the backend itself tells how long it took."""
        self.overlap: DeviceOverlap | None = None
        self.index = 0
        self.early: list[int | None] = []
        """How long it took, if that was known before the computing was over."""

    def keep(self, start_ns: int, end_ns: int) -> None:
        LOG.put(self.record, DONE, start_ns, end_ns, self.seq)

    def done(self, start_ns: int, end_ns: int) -> None:
        """The backend has told how long it took on the device."""
        self.keep(start_ns, end_ns)
        self._took(end_ns - start_ns)

    def untimed_under_way(self) -> None:
        """How long it took on the device cannot be had."""
        LOG.put(self.record, UNTIMED, 1, 0)
        self._took(None)

    def _took(self, duration_ns: int | None) -> None:
        if self.overlap is None:
            self.early.append(duration_ns)
        else:
            self.overlap.took(self.index, duration_ns)

    def join(self, overlap: DeviceOverlap, index: int) -> None:
        """The computing is over: its end is where the buckets' exposed time begins."""
        self.overlap, self.index = overlap, index
        if self.mark is not None:
            self.mark.end()
        if self.early:
            overlap.took(index, self.early.pop())

    def ahead(self, start_ns: int, end_ns: int) -> None:
        if self.overlap is not None:
            self.overlap.issued(self.index, end_ns - start_ns)

    def not_ahead(self) -> None:
        # The start was not recorded, or the end was not: how far ahead is unknown, and so is the overlap.
        if self.overlap is not None:
            self.overlap.unknown()
            self.overlap.issued(self.index, 0)

    @property
    def waited(self) -> bool:
        return False  # DDP waits at the end of the backward pass, and nobody else

    def exposed(self, start_ns: int, end_ns: int) -> None:
        LOG.put(self.record, EXPOSED, start_ns, end_ns)
        LOG.put(self.record, PAIR, self.done_ns - self.start_ns, end_ns - start_ns)


class _Buckets:
    """The state of the hook: the buckets of the backward pass that runs now."""

    def __init__(self, process_group: Any, hook: Hook | None, state: Any) -> None:
        self._process_group = process_group
        self._hook = hook
        self._state = state
        self._wait = BackwardWait()

    def _launch(self, bucket: GradBucket, sent: _Bucket | None = None) -> Any:
        if self._hook is not None:
            return self._hook(self._state, bucket)
        # As DDP does without a hook: multiply by the reciprocal, sum in place.
        buffer = bucket.buffer().mul_(1.0 / self._process_group.size())
        work = original_of(dist.all_reduce)(buffer, group=self._process_group, async_op=True)
        if sent is not None and sent.own:
            _own_time.follow(work, sent)
        return work.get_future()

    def _result(self, future: Any) -> Any:
        value = future.value()
        return value if self._hook is not None else value[0]

    def send(self, bucket: GradBucket) -> Any:
        sent = None
        if SETTINGS.by_functions:
            try:
                sent = self._start(bucket)
            except Exception as error:
                fault("DDP's buckets", error)
        if sent is None:
            return self._launch(bucket).then(self._result)
        thread = get_ident()
        nested = thread in inside
        inside.add(thread)  # what a hook calls is part of the bucket
        try:
            future = self._launch(bucket, sent)
        except BaseException:
            _give_up(sent, FAILED, under_way=False)
            raise
        finally:
            if not nested:
                inside.discard(thread)
        try:
            self._follow(bucket, sent)
        except Exception as error:
            fault("DDP's buckets", error)

        def done(future: Any) -> Any:
            try:
                result = self._result(future)
            except BaseException:
                _give_up(sent, FAILED)
                raise
            try:
                sent.done_ns = SETTINGS.now_ns()
                if sent.device is None:
                    sent.keep(sent.start_ns, sent.done_ns)
                elif not sent.own:
                    sent.untimed_under_way()
            except Exception as error:
                fault("DDP's buckets", error)
                _give_up(sent, UNTIMED)
            return result

        return future.then(done)

    def _start(self, bucket: GradBucket) -> _Bucket | None:
        # What is noted before a bucket is sent; None if it is not to be timed.
        op = _BUCKET if self._hook is None else _HOOKED
        group = LOG.group_of(self._process_group) if SETTINGS.wants(op.name) else None
        if group is None:
            return None
        if bucket.index() == 0:
            self._wait.sent = []  # of a backward pass that failed on its way
        buffer = bucket.buffer()
        record = group.record(op, op.name, buffer.nbytes)
        device = None if buffer.is_cpu else pool_for(buffer)
        sent = _Bucket(record, device, SETTINGS.now_ns())
        sent.before = None if self._hook is None else group.number()
        if device is not None:
            record.on_device = True
            sent.own = self._hook is None and _own_time.enable(self._process_group, buffer.device)
            sent.mark = EventPair(device, op.name, sent.start_ns, sent.ahead, sent.not_ahead, None)
        return sent

    def _follow(self, bucket: GradBucket, sent: _Bucket) -> None:
        # What is noted after a bucket was sent.
        LOG.put(sent.record, ISSUE, sent.start_ns, SETTINGS.now_ns())
        group = sent.record.group
        sent.seq = group.sequence(self._process_group)
        if self._hook is None:
            group.seen += 1
        elif sent.before is not None:
            group.seen += (group.number() or sent.before) - sent.before
        self._wait.sent.append(sent)
        # Torch's `Join` sends the buckets of a rank that has run out of data outside of any backward pass, where there
        # is no end to wait for and nobody who would wait.
        if bucket.is_last() and torch._C._current_graph_task_id() != -1:
            self._wait.watch(sent.device)


def _give_up(sent: _Bucket, kind: int, *, under_way: bool = True) -> None:
    # A bucket that failed, or whose time cannot be had.
    try:
        LOG.put(sent.record, kind, int(under_way), 0)
        if sent.mark is not None:
            sent.mark.drop()
    except Exception as error:
        fault("DDP's buckets", error)
