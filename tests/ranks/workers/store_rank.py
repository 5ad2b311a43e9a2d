"""One of many ranks on a store that take part in rounds; some ranks misbehave. Prints what rank 0 was told."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import torch.distributed as dist

from deep500_timing._distributed.exchange import Exchange, line_of
from deep500_timing.ranks import StoreTransport

ROUNDS, DEADLINE_S = 5, 4.0


def main(rank: int, world_size: int, port: int, fault: str) -> None:
    """Take part."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    transport = StoreTransport(dist.PrefixStore("p", store), rank, world_size)
    exchange = Exchange("x", int, dict, dict, transport=transport)  # It connects now, while a training is set up.
    line_of(transport).connection._connected.wait()
    if store.add("connected", 1) == world_size:
        store.set("round 0", "")
    found = []
    for number in range(ROUNDS):
        if fault == "late" and number < 2:
            continue
        store.wait([f"round {number}"])
        if number == 2 and fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 2 and fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        begun = time.monotonic()
        answers = exchange.round(1000 * number + rank, DEADLINE_S)
        took_s = time.monotonic() - begun
        if rank == 0:
            wrong = [of for of, told in answers.result.items() if told != 1000 * number + int(of)]
            found.append([answers.missing, wrong, answers.fault, answers.ahead, took_s])
            store.set(f"round {number + 1}", "")
        elif fault == "extra" and number == 1:
            exchange.round(-1, 0.2)
    if rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
