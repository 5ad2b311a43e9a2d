"""Programs that communicate in every way that PyTorch has, each a function that sets up and returns the counts."""

from __future__ import annotations

import contextlib
import tempfile
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deep500_timing_torch import comm

rank = n = 0


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _steps(model, optimizer=None, count=3):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)

    def run():
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).sum().backward()
            optimizer.step()

    return run


def ddp():
    """DDP alone."""
    return _steps(DistributedDataParallel(_model()))


def ddp_hook():
    """DDP with the hook, of which the kernel needs nothing."""
    model = DistributedDataParallel(_model())
    comm.instrument_ddp(model)
    return _steps(model)


def ddp_no_sync():
    """DDP that synchronises every other step."""
    model = DistributedDataParallel(_model())

    def run():
        for step in range(4):
            with model.no_sync() if step % 2 else contextlib.nullcontext():
                model(torch.randn(16, 64)).sum().backward()

    return run


def ddp_fp16():
    """DDP that sends half precision."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(_model())
    comm.instrument_ddp(model, hook=fp16_compress_hook)
    return _steps(model)


def fsdp1():
    """FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    return _steps(FullyShardedDataParallel(_model(), device_id=torch.device("cpu")))


def fsdp2():
    """``fully_shard``."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = _model(), init_device_mesh("cpu", (n,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _steps(model)


def zero():
    """ZeroRedundancyOptimizer over DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(_model())
    return _steps(model, ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01))


def tensor_parallel():
    """DTensor's tensor parallelism."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return _steps(parallelize_module(_model(), init_device_mesh("cpu", (n,)), plan))


def functional():
    """Functional collectives."""
    import torch.distributed._functional_collectives as fc

    gather = getattr(fc, "all_gather_single", None) or fc.all_gather_tensor

    def run():
        for _ in range(5):
            out = fc.all_reduce(torch.ones(1000), "sum", dist.group.WORLD)
            gather(out, 0, dist.group.WORLD).sum().item()

    return run


def compiled():
    """An all_reduce inside a compiled function."""

    @torch.compile(backend="aot_eager")
    def step(data):
        dist.all_reduce(data)
        return data * 2

    def run():
        for _ in range(4):
            step(torch.ones(1000))

    return run


def point_to_point():
    """Messages, in batches and one by one."""

    def run():
        for _ in range(4):
            sent, received = torch.ones(256), torch.zeros(256)
            batch = [dist.P2POp(dist.isend, sent, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
            for work in dist.batch_isend_irecv(batch):
                work.wait()
        for _ in range(3):
            if rank == 0:
                dist.send(torch.ones(100), 1)
            elif rank == 1:
                dist.recv(torch.zeros(100), 0)

    return run


def pipeline():
    """A pipeline of one stage a rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(nn.Linear(64, 64), rank, n, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).pow(2).mean())

    def run():
        for _ in range(2):
            if rank == 0:
                schedule.step(torch.randn(16, 64))
            elif rank == n - 1:
                schedule.step(target=torch.randn(16, 64))
            else:
                schedule.step()

    return run


def objects():
    """Python objects."""

    def run():
        for _ in range(3):
            dist.all_gather_object([None] * n, {"a": rank})
            dist.broadcast_object_list([rank], 0)
            dist.gather_object(rank, [None] * n if rank == 0 else None)
            dist.scatter_object_list([None], list(range(n)) if rank == 0 else None)

    return run


def subgroups():
    """Groups of some of the ranks, and both barriers."""
    both, last = dist.new_group([0, 1]), dist.new_group([n - 1])

    def run():
        for _ in range(5):
            if rank < 2:
                dist.all_reduce(torch.ones(1000), group=both)
            if rank == n - 1:
                dist.all_reduce(torch.ones(10), group=last)
        dist.monitored_barrier()
        dist.barrier()

    return run


def mixture():
    """The plain operations."""

    def parts():
        return [torch.zeros(1024) for _ in range(n)]

    def run():
        data = torch.ones(1024)
        for _ in range(3):
            dist.all_reduce(data)
            dist.broadcast(data, 0)
            dist.all_gather(parts(), data)
            dist.reduce(data, 0)
            dist.reduce_scatter(torch.zeros(1024 // n), list(data.chunk(n)))
            dist.all_to_all_single(torch.zeros(1024), data)
            dist.all_reduce(data, async_op=True).wait()
            dist.gather(data, parts() if rank == 0 else None)
            dist.scatter(torch.zeros(1024), parts() if rank == 0 else None)

    return run


def coalescing_block():
    """Two all_reduces that are issued as one."""

    def run():
        for _ in range(3):
            with dist._coalescing_manager():
                dist.all_reduce(torch.ones(100))
                dist.all_reduce(torch.ones(200))

    return run


def coalesced():
    """Operations on lists of tensors."""

    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for _ in range(3):
                dist.all_reduce_coalesced([torch.ones(100), torch.ones(200)])
                lists = [[torch.zeros(100), torch.zeros(50)] for _ in range(n)]
                dist.all_gather_coalesced(lists, [torch.ones(100), torch.ones(50)])

    return run


def checkpoint():
    """A distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)

    def run():
        dcp.save({"w": torch.ones(100)}, checkpoint_id=folder[0])

    return run


def averaging():
    """Post-local SGD, which averages the model."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = _model()
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    return _steps(model, PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager))


def uneven():
    """DDP with the hook under ``Join``, where a rank that has run out of data shadows the others."""
    from torch.distributed.algorithms.join import Join

    model = DistributedDataParallel(_model())
    comm.instrument_ddp(model)

    def run():
        with Join([model]):
            for _ in range(3 + rank):
                model(torch.randn(16, 64)).sum().backward()

    return run


def by_the_group():
    """Methods of the process group itself."""

    def run():
        for _ in range(3):
            dist.group.WORLD.allreduce([torch.ones(10)]).wait()

    return run


PROGRAMS = {
    program.__name__: program
    for program in (
        ddp, ddp_hook, ddp_no_sync, ddp_fp16, fsdp1, fsdp2, zero, tensor_parallel, functional, compiled, point_to_point,
        pipeline, objects, subgroups, mixture, coalescing_block, coalesced, checkpoint, averaging, uneven, by_the_group,
    )
}  # fmt: skip
