"""Some collectives, then a summary that one rank (the second argument) never comes to: it is ready, and hangs."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

from deep500_timing_torch import comm as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
for _ in range(4):
    dist.all_reduce(torch.ones(1000))
(folder / f"ready-{rank}").touch()
if rank == int(sys.argv[2]):
    threading.Event().wait()
while not (folder / "go").exists():
    time.sleep(0.01)
before = time.monotonic()
found = dist.log_summary(show_straggler=True, deadline_s=8, file=io.StringIO())
took_s = time.monotonic() - before
(folder / f"{rank}.part").write_text(json.dumps({"took_s": took_s, "text": str(found), **found.to_dict()}))
(folder / f"{rank}.part").replace(folder / f"{rank}.json")
os._exit(0)  # a group with a dead member cannot be destroyed
