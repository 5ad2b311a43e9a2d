"""Every operation once, timed and plain, with equal results; leaves the records as JSON."""

# ruff: noqa: D103 (each function is named for the operation that it runs)

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as plain

from deep500_timing_deepspeed import comm as deepspeed
from deep500_timing_torch import comm as dist

warnings.simplefilter("ignore", FutureWarning)  # the deprecated names are operations like any other

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
pair = rank ^ 1
generator = torch.Generator().manual_seed(rank)


def tensor(count: int = 1000) -> torch.Tensor:
    """Float32 numbers that differ from rank to rank."""
    return torch.rand(count, generator=generator)


def empty(count: int = 1000) -> torch.Tensor:
    """Room for a result."""
    return torch.zeros(count)


def both(run) -> None:
    """Run with plain ``torch.distributed``, then timed, on the same numbers; compare what comes out."""
    state = generator.get_state()
    expected = run(plain)
    generator.set_state(state)
    actual = run(dist)
    assert len(expected) == len(actual)
    for one, other in zip(expected, actual, strict=True):
        same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        assert same, (run.__name__, one, other)


def finish(handle) -> None:
    """Wait for a handle, a list of them or a future."""
    for one in handle if isinstance(handle, list) else [handle]:
        one.wait()


def own(d, name: str, instead: str):
    """An operation of DeepSpeed's, timed; the plain one that it stands for elsewhere."""
    return getattr(deepspeed, name) if d is dist else getattr(d, instead)


def all_reduce(d):
    x = tensor()
    d.all_reduce(x)
    return [x]


def all_reduce_async(d):
    x = tensor(2000)
    finish(d.all_reduce(x, op=plain.ReduceOp.MAX, async_op=True))
    return [x]


def inference_all_reduce(d):
    x = tensor()
    own(d, "inference_all_reduce", "all_reduce")(x)
    return [x]


def all_reduce_coalesced(d):
    xs = [tensor(), tensor(500)]
    d.all_reduce_coalesced(xs)
    finish(d.all_reduce_coalesced(xs, async_op=True))
    return xs


def reduce(d):
    x = tensor()
    d.reduce(x, dst=0)
    return [x] if rank == 0 else []


def broadcast(d):
    x = tensor()
    d.broadcast(x, src=1)
    return [x]


def all_gather(d):
    out = [empty() for _ in range(n)]
    d.all_gather(out, tensor())
    return out


def all_gather_single(d):
    out = empty(1000 * n)
    d.all_gather_single(out, tensor())
    return [out]


def all_gather_into_tensor(d):
    out = empty(1000 * n)
    d.all_gather_into_tensor(out, tensor())
    return [out]


def allgather_fn(d):
    out = empty(1000 * n)
    own(d, "allgather_fn", "all_gather_single")(out, tensor())
    return [out]


def all_gather_coalesced(d):
    outs = [[empty(), empty(500)] for _ in range(n)]
    d.all_gather_coalesced(outs, [tensor(), tensor(500)])
    return [one for out in outs for one in out]


def reduce_scatter(d):
    out = empty()
    d.reduce_scatter(out, [tensor() for _ in range(n)])
    return [out]


def reduce_scatter_async(d):
    out = empty(2000)
    finish(d.reduce_scatter(out, [tensor(2000) for _ in range(n)], async_op=True))
    return [out]


def reduce_scatter_single(d):
    out = empty()
    d.reduce_scatter_single(out, tensor(1000 * n))
    return [out]


def reduce_scatter_tensor(d):
    out = empty()
    d.reduce_scatter_tensor(out, tensor(1000 * n))
    return [out]


def reduce_scatter_fn(d):
    out = empty()
    own(d, "reduce_scatter_fn", "reduce_scatter_single")(out, tensor(1000 * n))
    return [out]


def all_to_all(d):
    out = [empty() for _ in range(n)]
    d.all_to_all(out, [tensor() for _ in range(n)])
    return out


def all_to_all_single(d):
    out = empty(1000 * n)
    d.all_to_all_single(out, tensor(1000 * n))
    return [out]


def all_to_all_single_uneven(d):
    # Rank i gets i + 1 rows of 10 from everybody.
    send = [10 * (i + 1) for i in range(n)]
    receive = [10 * (rank + 1)] * n
    out = empty(sum(receive))
    d.all_to_all_single(out, tensor(sum(send)), output_split_sizes=receive, input_split_sizes=send)
    return [out]


def gather(d):
    out = [empty() for _ in range(n)] if rank == 0 else None
    d.gather(tensor(), out, dst=0)
    return out or []


def scatter(d):
    out = empty()
    parts = [tensor() for _ in range(n)]
    d.scatter(out, parts if rank == 0 else None, src=0)
    return [out]


def send_recv(d):
    out = empty()
    if rank % 2:
        d.recv(out, src=pair)
        d.send(tensor(), dst=pair)
    else:
        d.send(tensor(), dst=pair)
        assert pair == d.recv(out)
    return [out]


def isend_irecv(d):
    out = empty()
    mine = tensor()
    finish([d.isend(mine, dst=pair), d.irecv(out, src=pair)])
    return [out]


def batch_isend_irecv(d):
    out = empty()
    finish(d.batch_isend_irecv([d.P2POp(d.isend, tensor(), pair), d.P2POp(d.irecv, out, pair)]))
    return [out]


def barriers(d):
    d.barrier()
    finish(d.barrier(async_op=True))
    d.monitored_barrier()
    return []


def objects(d):
    gathered = [None] * n
    d.all_gather_object(gathered, {"rank": rank})
    sent = [rank, "x"]
    d.broadcast_object_list(sent, src=0)
    at_root = [None] * n if rank == 0 else None
    d.gather_object(str(rank), at_root, dst=0)
    part = [None]
    d.scatter_object_list(part, [f"for {i}" for i in range(n)] if rank == 0 else None, src=0)
    got = [None]
    if rank % 2:
        d.recv_object_list(got, src=pair)
        d.send_object_list([rank], dst=pair)
    else:
        d.send_object_list([rank], dst=pair)
        d.recv_object_list(got, src=pair)
    return [gathered, sent, at_root, part, got]


OPERATIONS = [
    all_reduce, all_reduce_async, inference_all_reduce, all_reduce_coalesced, reduce, broadcast, all_gather,
    all_gather_single, all_gather_into_tensor, allgather_fn, all_gather_coalesced, reduce_scatter,
    reduce_scatter_async, reduce_scatter_single, reduce_scatter_tensor, reduce_scatter_fn, all_to_all,
    all_to_all_single, all_to_all_single_uneven, gather, scatter, send_recv, isend_irecv, batch_isend_irecv, barriers,
    objects,
]  # fmt: skip

begin = time.perf_counter()
for operation in OPERATIONS:
    both(operation)

# A group that is not the world, of every rank's neighbour.
groups = [dist.new_group([first, first + 1]) for first in range(0, n, 2)]
mine = groups[rank // 2]
x = tensor(300)
dist.all_reduce(x, group=mine)
elapsed_s = time.perf_counter() - begin
recorded = dist.summary().to_dict()["ops"]

# The same by instrument(): nothing is counted twice, and everything is put back.
dist.reset_log()
before = dict(vars(plain)), dict(vars(plain.distributed_c10d)), dict(vars(plain.P2POp))
early = plain.isend, plain.irecv
with dist.instrument():
    for operation in (all_reduce, send_recv, batch_isend_irecv, barriers, objects, all_gather_into_tensor):
        operation(plain)
    ops = [plain.P2POp(early[0], tensor(), pair), plain.P2POp(early[1], empty(), pair)]
    finish(plain.batch_isend_irecv(ops))
finish(plain.batch_isend_irecv(ops))
after = dict(vars(plain)), dict(vars(plain.distributed_c10d)), dict(vars(plain.P2POp))
for one, other in zip(before, after, strict=True):
    assert list(one) == list(other) or set(one) == set(other)
    assert [name for name in one if one[name] is not other[name]] == []
patched = dist.summary().to_dict()["ops"]

dist.configure(enabled=False)
dist.all_reduce(x, group=mine)
with dist.instrument():
    plain.all_reduce(x)
off = len(dist.summary().ops) == len(patched)

printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    dist.log_summary()
result = {"elapsed_s": elapsed_s, "recorded": recorded, "patched": patched, "off": off, "printed": printed.getvalue()}
(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(result))
# A group that is still held when the interpreter ends is taken down then, and PyTorch's own threads may abort the
# process at that (gloo, with or without timing: about one run in four).
del mine, groups
dist.destroy_process_group()
