"""Ranks gather two reports; then some are killed or stopped by the test, and the others gather a third.

Arguments: the folder, what connects the ranks (``store`` or ``folder``), and the victims, which wait for their end.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from deep500_timing import Timer
from deep500_timing.ranks import FolderTransport, Gatherer, find_transport

folder, kind = Path(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
transport = None
if kind == "store":
    import torch.distributed as dist

    dist.init_process_group("gloo")
else:
    transport = FolderTransport(folder / "messages")
gatherer = Gatherer(find_transport() if transport is None else transport)
tmr = Timer(run=folder / "run")
reports = []
for step in range(3):
    if step == 2:
        tmr.run.flush()
        (folder / f"ready-{rank}").touch()
        if str(rank) in sys.argv[3:]:
            threading.Event().wait()
        while not (folder / "go").exists():
            time.sleep(0.01)
    for _ in range(10):
        with tmr.region("BATCH"):
            pass
    begun = time.monotonic()
    report = gatherer.gather(tmr.snapshot(), deadline_s=3.0 if step == 2 else 60.0, step=step)
    took_s = time.monotonic() - begun
    if report is not None:
        reports.append([list(report.ranks), list(report.missing), report.fault])
(folder / f"{rank}.part").write_text(json.dumps({"took_s": took_s, "reports": reports}))
(folder / f"{rank}.part").replace(folder / f"{rank}.json")
tmr.run.close()
gatherer.flush(60.0)
os._exit(0)  # a group with a dead member cannot be destroyed
