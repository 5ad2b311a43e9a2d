"""Some collectives, then a summary that one rank (the second argument) never comes to: it is ready, and hangs.

The third argument is the deadline. Of a rank other than 0 that is absent the summary does not wait for its end.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2] / "support"))
from leaping import leap_when_all_are_there

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
victim, deadline_s = int(sys.argv[2]), float(sys.argv[3])
if rank == 0:
    leap_when_all_are_there({1, 2} - {victim}, deadline_s)
found = dist.log_summary(show_straggler=True, deadline_s=deadline_s, file=io.StringIO())
(folder / f"{rank}.part").write_text(json.dumps({"text": str(found), **found.to_dict()}))
(folder / f"{rank}.part").replace(folder / f"{rank}.json")
os._exit(0)  # a group with a dead member cannot be destroyed
