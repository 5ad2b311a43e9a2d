"""One of many ranks on a store that take part in rounds; some ranks misbehave. Prints what rank 0 was told."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import torch.distributed as dist
from leaping import leap_when_all_are_there

from deep500_timing._distributed.exchange import Exchange
from deep500_timing.ranks import StoreTransport

DEADLINE_S = 120.0
MISSING = [{3}, {3}, {1, 2}, {1, 2}, {1, 2}]
"""The ranks that are late, killed or stopped in each round."""


def main(rank: int, world_size: int, port: int, fault: str) -> None:
    """Take part."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    transport = StoreTransport(dist.PrefixStore("p", store), rank, world_size)
    exchange = Exchange("x", int, dict, dict, transport=transport)  # It connects now, while a training is set up.
    transport.connection._connected.wait()
    if store.add("connected", 1) == world_size:
        store.set("round 0", "")
    found: list[list[Any]] = []
    awaited: set[int] = set()
    if rank == 0:
        leap_when_all_are_there(awaited, DEADLINE_S)
    for number, missing in enumerate(MISSING):
        if fault == "late" and number < 2:
            continue
        store.wait([f"round {number}"])
        if number == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if number < len(MISSING) - 1:  # In the last round no rank is waited for.
            awaited |= set(range(1, world_size)) - missing
        begun = time.monotonic()
        answers = exchange.round(1000 * number + rank, DEADLINE_S)
        took_s = time.monotonic() - begun
        if rank == 0:
            wrong = [of for of, told in answers.result.items() if told != 1000 * number + int(of)]
            found.append([answers.missing, wrong, answers.fault, answers.ahead, took_s])
            if number == 1:
                store.wait(["the call too many has ended"])
            store.set(f"round {number + 1}", "")
        elif fault == "extra" and number == 1:
            exchange.round(-1, 0.2)
            store.set("the call too many has ended", "")
    if rank == 0:
        print(json.dumps(found), flush=True)
