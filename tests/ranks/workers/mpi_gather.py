"""Ranks under mpirun: the contract of a transport, then reports, the last without rank 1."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from deep500_timing import Timer
from deep500_timing.ranks import Gatherer, MpiTransport, check_transport

transport = MpiTransport()
check_transport(transport)
timer = Timer()
gatherer = Gatherer(transport)
found = []
for number in range(4):
    with timer.region("BATCH"):
        pass
    if number == 3 and transport.rank == 1:
        continue
    report = gatherer.gather(timer.snapshot(), deadline_s=2.0 if number == 3 else 30.0, step=number)
    if report is not None:
        found.append([report.ranks, report.missing])
if transport.rank == 0:
    (Path(sys.argv[1]) / "report.json").write_text(json.dumps(found))
