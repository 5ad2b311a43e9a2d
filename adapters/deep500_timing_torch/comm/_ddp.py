"""The gradient buckets of ``DistributedDataParallel``, timed through its communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from deep500_timing_torch.comm._functions import original_of
from deep500_timing_torch.comm._operation import dispatched, run
from deep500_timing_torch.comm._ops import Op, both_ways, unknown
from deep500_timing_torch.comm._settings import SETTINGS

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

_BUCKET = Op("ddp_all_reduce", unknown, both_ways, synchronizes=True)
_HOOKED = Op("ddp_hook", unknown, None, synchronizes=True)


def instrument_ddp(
    model: torch.nn.parallel.DistributedDataParallel, *, hook: Hook | None = None, state: Any = None
) -> None:
    """Time the gradient buckets of a DDP model, which its reducer sends from C++.

    Each bucket is a ``ddp_all_reduce`` in the summary. Its exposed time is the wait that remained when the backward
    pass had nothing left to compute. The hook repeats DDP's default, so gradients and losses stay
    bit-identical (with ``gradient_as_bucket_view=True`` and gradients that are kept from step to step, equal to
    rounding, unless the number of ranks is a power of two). DDP takes one hook in its life and cannot remove it:
    switch the timing off with ``configure(enabled=False)``. :func:`instrument` with the compiled kernel sees the
    buckets without a hook, as ``all_reduce``.

    Args:
        model: The model, after it was wrapped and before its first backward pass.
        hook: A communication hook of your own, such as ``fp16_compress_hook``, to be timed instead of DDP's. It
            is called ``ddp_hook``; the bytes it sends are unknown, so it has no bandwidth.
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
    model.register_comm_hook(None, _timed_hook(model.process_group, hook, state))


def _timed_hook(group: Any, hook: Hook | None, state: Any) -> Callable[[None, GradBucket], Any]:
    op = _BUCKET if hook is None else _HOOKED

    def launch(bucket: GradBucket) -> Any:
        if hook is not None:
            return hook(state, bucket)
        # As DDP does without a hook: multiply by the reciprocal, sum in place.
        buffer = bucket.buffer().mul_(1.0 / group.size())
        return original_of(dist.all_reduce)(buffer, group=group, async_op=True).get_future()

    def result(future: Any) -> Any:
        return future.value() if hook is not None else future.value()[0]

    def send(_state: None, bucket: GradBucket) -> Any:
        pending = None
        if SETTINGS.by_functions:
            buffer = bucket.buffer()
            pending = dispatched(op, buffer.nbytes, group, buffer)
        if pending is None:
            return launch(bucket).then(result)
        future = run(pending, launch, (bucket,), {})
        if pending.launched(False):
            pending.follow(future)
        return future.then(result)

    # DDP compares the annotations with the classes, so they must not be strings.
    send.__annotations__ = {"bucket": GradBucket}
    return send
