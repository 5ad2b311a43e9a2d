"""Sections on NCCL in a world of one: real works, handles and watchdog, no links."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.gpu._device import UnavailableError, need_torch, sized, spinner

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["held", "parallel", "recorder"]


def _world() -> tuple[Any, Any]:
    torch = need_torch()
    import torch.distributed as dist

    if not dist.is_nccl_available():
        raise UnavailableError("this PyTorch has no NCCL")
    if not dist.is_initialized():
        device = torch.device("cuda:0")
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    return torch, dist


def recorder() -> Iterator[list[Any]]:
    """Six asynchronous gathers in flight at once: times of the summary, and of the handles' ``_get_duration``."""
    torch, _ = _world()
    from deep500_timing_torch import comm

    yield ["measurement", "µs, or as said"]
    # Gathers into another tensor: in place, NCCL launches nothing in a world of one.
    full, shard = torch.empty(1 << 28, device="cuda"), torch.ones(1 << 28, device="cuda")
    comm.all_gather_into_tensor(full, shard)
    torch.cuda.synchronize()
    comm.summary(wait=True)
    comm.reset_log()
    works = [comm.all_gather_into_tensor(full, shard, async_op=True) for _ in range(6)]
    for work in works:
        work.wait()
    torch.cuda.synchronize()
    found = comm.summary(wait=True)
    times = found.find("all_gather_into_tensor")
    yield ["six gathers of 1 GiB issued together, mean", times.mean_s and times.mean_s * 1e6]
    yield ["_get_duration of their handles, mean", statistics.mean(work._get_duration() * 1e3 for work in works)]
    yield ["upper bound", times.upper_bound]
    yield ["timed", found.device_times]
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    comm.all_gather_into_tensor(full, shard)
    end.record()
    torch.cuda.synchronize()
    yield ["one gather between two bare events", start.elapsed_time(end) * 1e3]


def held() -> Iterator[list[Any]]:
    """Peak memory of 24 gathers of 64 MiB while the host is ahead: by ``torch.distributed``, and timed."""
    torch, dist = _world()
    from deep500_timing_torch import comm

    yield ["gathers by", "peak above the start, MiB"]
    spin, shard = spinner(torch), torch.ones(1 << 24, device="cuda")
    for name, module in (("torch.distributed", dist), ("comm, timed", comm)):
        peak = 0
        for _ in range(2):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for _ in range(24):
                full = torch.empty_like(shard)
                module.all_gather_into_tensor(full, shard, async_op=True).wait()
                spin(0.005)
                del full
            peak = torch.cuda.max_memory_allocated() - before
            torch.cuda.synchronize()
        yield [name, peak >> 20]


def parallel() -> Iterator[list[Any]]:
    """Rows for DDP's buckets and for FSDP2's gathers and reductions, without the compiled kernel."""
    torch, _ = _world()
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from deep500_timing_torch import comm

    yield ["by", "operation", "count", "pending", "failed", "untimed", "mean", "upper bound"]
    width, depth = sized(4096, 256), 8

    def net() -> Any:
        return nn.Sequential(*(nn.Linear(width, width, device="cuda") for _ in range(depth)))

    def rows(name: str) -> Iterator[list[Any]]:
        torch.cuda.synchronize()
        for op in comm.summary(wait=True).ops:
            mean = op.mean_s and op.mean_s * 1e6
            yield [name, op.op, op.count, op.pending, op.failed, op.untimed, mean, op.upper_bound]
        comm.reset_log()

    x = torch.randn(8, width, device="cuda")
    comm.reset_log()
    model = nn.parallel.DistributedDataParallel(net(), device_ids=[0])
    comm.instrument_ddp(model)
    for _ in range(5):
        model(x).sum().backward()
    yield from rows("DDP")
    with comm.instrument(kernel=False):
        sharded = net()
        for layer in sharded:
            fully_shard(layer)
        fully_shard(sharded)
        for _ in range(5):
            sharded(x).sum().backward()
        found = list(rows("FSDP2"))
        # With one rank there may be nothing to gather.
        yield from found or [["FSDP2", "none issued", 0, 0, 0, 0, None, None]]
