"""Each program under PyTorch's profiler, timed by the compiled kernel, and by patched functions: what each counted."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from pathlib import Path

import programs
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from deep500_timing_torch import comm

warnings.simplefilter("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, n = programs.rank, programs.n = dist.get_rank(), dist.get_world_size()
folder = Path(sys.argv[1])

# Where the profiler shows no list of lists, only one rank's share is in its largest argument.
SHARES = {"allgather_", "gather_", "scatter_", "reduce_scatter_", "allgather_coalesced_"}
ITEMS = {"float": 4, "int": 4, "long int": 8, "unsigned char": 1, "c10::Half": 2}


def _elements(dims):
    if dims and all(isinstance(size, int) for size in dims):
        product = 1
        for size in dims:
            product *= size
        return product
    return sum(_elements(inner) for inner in dims if isinstance(inner, list))


def _as_torch_counts(recorded, halves):
    trace = folder / f"trace-{rank}.json"
    recorded.export_chrome_trace(str(trace))
    counts = Counter()
    for event in json.loads(trace.read_text())["traceEvents"]:
        name = event.get("name", "")
        if name.startswith("c10d::") and "args" in event:
            elements = max([_elements(dims) for dims in event["args"].get("Input Dims", [])] or [0])
            name = name.removeprefix("c10d::")
            counts[name, elements * (n if name in SHARES else 1) * (2 if halves else 1)] += 1
    return counts


def _counted(name, *, kernel):
    with comm.instrument(kernel=kernel):
        run = programs.PROGRAMS[name]()
        dist.barrier()
        comm.reset_log()
        group = dist.group.WORLD
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
            before = group._get_sequence_number_for_group()
            run()
            advanced = group._get_sequence_number_for_group() - before
        found = comm.summary(wait=True)
        text = str(found)
        dist.barrier()
    return {
        "torch": [[*key, count] for key, count in _as_torch_counts(recorded, halves=False).items()],
        "ours": [[op.op, op.message_bytes, op.count + op.untimed, op.pending, op.failed] for op in found.ops],
        "unseen": sum(found.unseen.values()),
        "advanced": advanced,
        "text": text,
    }


names = sys.argv[2:] or list(programs.PROGRAMS)
result = {"kernel": {}, "patched": {}}
for program in names:
    if os.environ.get("SHOW") and rank == 0:
        print(program, flush=True)
    result["kernel"][program] = _counted(program, kernel=True)
for program in ("ddp", "ddp_hook", "functional", "objects", "mixture", "coalescing_block", "uneven", "by_the_group"):
    if program in names:
        result["patched"][program] = _counted(program, kernel=False)
(folder / f"{rank}.json").write_text(json.dumps(result))
dist.barrier()
dist.destroy_process_group()
