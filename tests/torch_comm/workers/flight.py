"""Rank 1 of 3 leaves out an operation; each rank dumps its flight recorder while the others wait for it."""

from __future__ import annotations

import json
import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
numbers = torch.ones(1000)
for _ in range(30):
    dist.all_reduce(numbers)
pair = dist.new_group([0, 1])
if rank < 2:
    dist.broadcast(numbers, 0, group=pair)
# The store is no operation: all ranks are here, and none ends before the others have dumped.
store = dist.distributed_c10d._get_default_store()
waiting = None if rank == 1 else dist.all_reduce(numbers, async_op=True)
# PyTorch notes the end of an operation a moment after it.
done = False
while not done:
    entries = pickle.loads(c10d._dump_fr_trace(True, False, False))["entries"]
    done = sum(not entry["retired"] for entry in entries) == (rank != 1)
for kind, dump in (
    ("pickle", c10d._dump_fr_trace(True, False, False)),
    ("json", c10d._dump_fr_trace_json(True, False)),
):
    (folder / kind).mkdir(exist_ok=True)
    (folder / kind / f"trace_{rank}").write_bytes(dump if isinstance(dump, bytes) else dump.encode())
store.add("dumped", 1)
while int(store.add("dumped", 0)) < 3:
    pass
(folder / f"{rank}.json").write_text(json.dumps({"waits": waiting is not None and not waiting.is_completed()}))
os._exit(0)
