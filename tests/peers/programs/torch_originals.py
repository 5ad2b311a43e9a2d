"""PyTorch's own tests of its operations, on running gloo ranks: outcomes by name, with ``instrument()`` and without.

Arguments: a folder, and "plain" or "timed".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import unittest
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")
folder, mode = Path(sys.argv[1]), sys.argv[2]
(folder / "files").mkdir(exist_ok=True)
os.environ.update(BACKEND="gloo", TEMP_DIR=str(folder / "files"), INIT_METHOD="env://")
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, ranks = dist.get_rank(), dist.get_world_size()

from torch.testing._internal.distributed import distributed_test as originals  # noqa: E402 - it reads the environment

from deep500_timing_torch import comm  # noqa: E402

# Of the plain operations, their asynchronous forms, object and point-to-point ones, and groups; those left out are
# of GPUs or end ranks on purpose.
WANTED = re.compile(
    r"test_(all_gather|all_reduce|reduce|broadcast|scatter|gather|barrier|send_recv|isend|irecv|allgather)"
)
UNWANTED = re.compile(r"cuda|nccl|timeout|profiler|failure|error|monitored|hang|autograd")

issue_barrier = dist.barrier
originals.BACKEND = "gloo"
# Theirs meets in files, which a test after a failed one would find from before.
originals.Barrier.sync = classmethod(lambda cls, *arguments, **settings: issue_barrier())


class Case(originals.TestDistBackend, originals.DistributedTest._DistTestBase):
    """Its tests in a group that is there already, in the place of processes of each one's own."""

    def setUp(self):
        """There is nothing to set up."""

    def tearDown(self):
        """Nor to take down."""

    @property
    def world_size(self):
        """Ranks of the group."""
        return ranks


def outcome(name: str) -> str:
    """Run one: "passed", "skipped", or the error."""
    case = Case(name)
    case.rank, case.file_name = rank, str(folder / "files" / "unused")
    torch.manual_seed(0)
    try:
        getattr(case, name)()
    except (unittest.SkipTest, SystemExit):
        return "skipped"
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "passed"


found = {}
with comm.instrument(kernel=False) if mode == "timed" else contextlib.nullcontext():
    for name in sorted(dir(Case)):
        if WANTED.match(name) and not UNWANTED.search(name):
            found[name] = outcome(name)
            issue_barrier()
    summary = comm.summary()
result = {
    "outcomes": found,
    "operations": sum(op.count for op in summary.ops),
    "pending": sum(op.pending for op in summary.ops),
}
(folder / f"{mode}-{rank}.json").write_text(json.dumps(result))
dist.destroy_process_group()
