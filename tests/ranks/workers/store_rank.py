"""One of many ranks on a store that gather in rounds; some ranks misbehave. Prints rank 0's reports."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace

import torch.distributed as dist

from deep500_timing import Timer
from deep500_timing._distributed.exchange import line_of
from deep500_timing.ranks import Gatherer, StoreTransport
from deep500_timing.testing import ManualClock

ROUNDS, DEADLINE_S = 5, 4.0


def main(rank: int, world_size: int, port: int, fault: str) -> None:
    """Take part."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    transport = StoreTransport(dist.PrefixStore("p", store), rank, world_size)
    gatherer = Gatherer(transport)  # It connects now: a training sets up its model meanwhile.
    line_of(transport).connection._connected.wait()
    if store.add("connected", 1) == world_size:
        store.set("round 0", "")
    clock = ManualClock()
    timer = Timer(clock=clock)
    found = []
    for number in range(ROUNDS):
        if fault == "late" and number < 2:
            continue
        store.wait([f"round {number}"])
        with timer.region("BATCH"):
            clock.advance((rank + 1) / 1e3)
        if number == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        snapshot = replace(timer.snapshot(), host="h")
        begun = time.monotonic()
        for _ in range(2 if fault == "extra" and number == 1 else 1):
            report = gatherer.gather(snapshot, deadline_s=DEADLINE_S)
        if report is not None:
            medians = report.of_ranks("BATCH", "median")
            wrong = [of for of, median in medians.items() if abs(median * 1e3 / (of + 1) - 1) > 0.02]
            found.append([report.missing, wrong, report.fault, report.ahead, time.monotonic() - begun])
            store.set(f"round {number + 1}", "")
    gatherer.flush(10.0)
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
