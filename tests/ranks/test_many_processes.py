"""64 real processes on one store, some of them killed, stopped, late, or calling once too often."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "workers" / "store_rank.py"
RANKS = 64
FAULTS = {1: "killed", 2: "stopped", 3: "late", 4: "extra"}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks its ranks")
def test_64_ranks_on_a_store(tmp_path):
    """Every round has the ranks that live and their own reports; from the third silent one on none is waited for."""
    dist = pytest.importorskip("torch.distributed")
    spec = importlib.util.spec_from_file_location("store_rank", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    reading, writing = os.pipe()
    children = {}
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port}\n".encode())
        time.sleep(1000)
    try:
        port = int(os.read(reading, 100))
        for rank in range(RANKS):
            pid = os.fork()
            if pid == 0:
                try:
                    if rank == 0:
                        os.dup2(os.open(tmp_path / "found", os.O_WRONLY | os.O_CREAT), 1)
                        sys.stdout = os.fdopen(1, "w")
                    worker.main(rank, RANKS, port, FAULTS.get(rank, ""))
                    sys.stdout.flush()
                finally:
                    os._exit(0)
            children[rank] = pid
        os.waitpid(children.pop(0), 0)
        for rank in [rank for rank in children if FAULTS.get(rank) != "stopped"]:
            os.waitpid(children.pop(rank), 0)
    finally:
        for pid in (*children.values(), server):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    found = json.loads((tmp_path / "found").read_text())
    assert worker.MISSING == [set(of[0]) for of in found]
    for _, wrong, fault, _, _ in found:
        assert ([], None) == (wrong, fault)
    assert found[4][4] < 0.5 * worker.DEADLINE_S
