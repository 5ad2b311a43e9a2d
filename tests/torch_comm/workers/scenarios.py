"""DDP on the digits with and without timing, overlap, a late rank, and ranks that ran different operations."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.fsdp import fully_shard

from deep500_timing import Timer
from deep500_timing.testing import ManualClock
from deep500_timing_torch import comm as dist

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
result = {}

# --- DDP -----------------------------------------------------------------------------------------------------------
# The file alone, as importing scikit-learn takes a second.
digits = np.loadtxt(Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
images = torch.tensor(digits[:, :-1], dtype=torch.float32) / 16
labels = torch.tensor(digits[:, -1], dtype=torch.long)


def train(timed: bool) -> list[float]:
    """The losses of two epochs."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(1024, 10))
    # The first bucket is full at 1 MiB, with the second layer; the first layer goes in another.
    model = torch.nn.parallel.DistributedDataParallel(model)
    if timed:
        dist.instrument_ddp(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(2):
        for start in range(rank * 64, len(images) - 64 * (n - rank), 64 * n):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(images[start : start + 64]), labels[start : start + 64])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


result["plain"] = train(timed=False)
result["before"] = len(dist.summary().ops)
result["timed"] = train(timed=True)
result["ddp"] = dist.summary().to_dict()["ops"]

# --- a hook of the user's, and FSDP, which import torch.distributed themselves -------------------------------------
dist.reset_log()
with dist.instrument():
    hooked = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    dist.instrument_ddp(hooked, hook=fp16_compress_hook)
    hooked(images[:8]).sum().backward()
result["hook"] = dist.summary().to_dict()["ops"]


def train_sharded(timing) -> list[float]:
    """The losses of some steps of a sharded model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    mesh = init_device_mesh("cpu", (n,))
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with timing:
        for start in range(rank * 64, 5 * 64 * n, 64 * n):
            loss = torch.nn.functional.cross_entropy(model(images[start : start + 64]), labels[start : start + 64])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


dist.reset_log()
result["sharded"] = train_sharded(contextlib.nullcontext()), train_sharded(dist.instrument())
result["fsdp"] = dist.summary().to_dict()["ops"]


# --- overlap -------------------------------------------------------------------------------------------------------
class Read(ManualClock):
    """A clock that stands still and counts its readings."""

    reads = 0

    def now_ns(self) -> int:
        """The time in nanoseconds."""
        self.reads += 1
        return super().now_ns()


clock = Read()
store = _get_default_store()
dist.configure(timer=Timer(clock=clock))
small = torch.ones(1000)


def let_rank_1_come(turn: str) -> None:
    """On rank 0: 10 ms pass, then rank 1 comes."""
    clock.advance(0.01)
    store.set(turn, "")


def come_meanwhile(turn: str) -> threading.Thread:
    """The same on another thread, once the calling one has begun to wait, by one more reading of the clock."""
    before = clock.reads

    def come() -> None:
        while clock.reads == before:
            time.sleep(0.0005)
        let_rank_1_come(turn)

    thread = threading.Thread(target=come)
    thread.start()
    return thread


for name in ("without", "under work"):
    dist.barrier()
    dist.reset_log()
    for number in range(10):
        dist.barrier()
        turn = f"{name} {number}"
        if rank == 1:
            store.wait([turn])
        handle = dist.all_reduce(small, async_op=True)
        if rank == 1:
            handle.wait()
        elif name == "without":
            thread = come_meanwhile(turn)
            handle.wait()
            thread.join()
        else:
            let_rank_1_come(turn)
            while not handle.is_completed():
                time.sleep(0.001)
            handle.wait()
    result[name] = dist.summary().to_dict()["ops"]

# --- a late rank ---------------------------------------------------------------------------------------------------
dist.barrier()
dist.reset_log()
for number in range(60):
    turn = f"late {number}"
    if rank == 1:
        store.wait([turn])
        dist.all_reduce(small)
    else:
        thread = come_meanwhile(turn)
        dist.all_reduce(small)
        thread.join()
text = io.StringIO()
late = dist.log_summary(show_straggler=True, deadline_s=300, file=text)
result["late"] = late.to_dict()
result["late text"] = text.getvalue()
dist.configure(timer=None)

# --- ranks that recorded different operations ----------------------------------------------------------------------
dist.reset_log()
alone = dist.new_group([0])
dist.configure(enabled=rank == 0)
dist.all_reduce(small)  # seen by rank 0 only
dist.configure(enabled=True)
for _ in range(3):
    if rank == 0:
        dist.all_reduce(small, group=alone)
        dist.broadcast(small, src=0, group=alone)
    dist.all_reduce(small)
    dist.all_gather_single(torch.empty(1000 * n), small)
dist.configure(prof_all=False, prof_ops=["all_gather_single"] if rank == 0 else ["all_reduce"])
dist.all_reduce(small)
dist.all_gather_single(torch.empty(1000 * n), small)
result["different"] = dist.log_summary(show_straggler=True, deadline_s=300, file=io.StringIO()).to_dict()

# --- one report too many on one rank -------------------------------------------------------------------------------
dist.configure(prof_all=True, prof_ops=[])
if rank == 1:
    dist.log_summary(show_straggler=True, deadline_s=1, file=io.StringIO())
rounds = []
for _ in range(3):
    dist.barrier()
    dist.reset_log()
    dist.all_reduce(small)
    found = dist.log_summary(show_straggler=True, deadline_s=300, file=io.StringIO())
    count = sum(row.count for row in found.stragglers or () if row.op == "all_reduce")
    rounds.append((found.missing_ranks, found.fault, sorted(found.ahead_ranks.items()), count))
result["one extra"] = rounds
result["world"] = dist.get_process_group_ranks(dist.group.WORLD)

(Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(result))
# A group that is still held when the interpreter ends is taken down then, and PyTorch's own threads may abort the
# process at that (gloo, with or without timing: about one run in four).
del alone
dist.destroy_process_group()
