"""Runs programs of ``tests/rehearsal`` over the fake CUDA libraries."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from suite_ranks import free_port

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "rehearsal" / "programs"
FAKES = os.environ.get("DEEP500_TIMING_REHEARSAL")
"""The folder of the libraries, set by ``make test-rehearsal``."""


def environment(**more: str) -> dict[str, str]:
    """The variables of a process that runs over the fake libraries."""
    assert FAKES is not None
    cache = ROOT / "build" / "caches" / "deep500-timing"
    return {
        **os.environ,
        "LD_LIBRARY_PATH": FAKES,
        "LD_PRELOAD": str(Path(FAKES, "libfakecuda.so")),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}",
        "DEEP500_TIMING_PURE": "1",
        "DEEP500_TIMING_CACHE": str(cache),
        **more,
    }


def run_program(name: str, *args: str, ranks: int = 1, timeout_s: float = 240, **variables: str) -> dict:
    """Run a program on so many ranks; what rank 0 printed last, as JSON."""
    port = str(free_port())
    processes = []
    for rank in range(ranks):
        env = environment(
            RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
            **variables,
        )  # fmt: skip
        command = [sys.executable, str(PROGRAMS / f"{name}.py"), *args]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        results = [process.communicate(timeout=timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (output, errors) in zip(processes, results, strict=True):
        assert 0 == process.returncode, output + errors[-4000:]
    return json.loads(results[0][0].strip().splitlines()[-1])
