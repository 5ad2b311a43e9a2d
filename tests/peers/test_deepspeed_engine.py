"""Real DeepSpeed engines on the CPU, with our timers in the place of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    pytest.mark.slow,
    pytest.mark.timeout(200),
]


def run(program, *arguments, ranks=1):
    """Run a program on that many processes; hand back what it did."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": "",
    }
    if ranks == 1:
        environment.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        command = [sys.executable]
    else:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"
        ]  # fmt: skip
    return subprocess.run(
        [*command, str(PROGRAMS / program), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_wall_clock_breakdown_of_an_engine_is_right():
    """Each line, cache and rate of an engine with two accumulated micro-batches is that of the known times."""
    done = run("engine.py")
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout[done.stdout.index('{"lines"') :])
    micro, last_micro, whole = (
        "fwd_microstep: 10.00 | bwd_microstep: 20.00 | bwd_inner_microstep: 20.00 | bwd_allreduce_microstep: 0.00 | "
        "step_microstep: 0.00",
        "fwd_microstep: 10.00 | bwd_microstep: 20.00 | bwd_inner_microstep: 20.00 | bwd_allreduce_microstep: 0.00 | "
        "step_microstep: 40.00",
        "fwd: 20.00 | bwd: 40.00 | bwd_inner: 40.00 | bwd_allreduce: 0.00 | step: 40.00",
    )
    assert [f"[Rank 0] time (ms) | {line}" for line in (micro, last_micro, whole)] * 3 == seen["lines"]
    assert seen["caches"][1]["fwd"] == pytest.approx(20.0)
    assert seen["caches"][1]["step"] == pytest.approx(40.0)
    # 8 samples in two forward and backward passes and one step.
    assert seen["rate"] == pytest.approx(8 / 0.100)
    assert seen["steps"] == 3
    assert seen["regions"]["fwd_microstep"] == 6


@pytest.mark.parametrize(("whose", "survives"), [("theirs", False), ("ours", True)])
def test_a_pipeline_engine_with_breakdown(whose, survives):
    """Two stages crash on the engine's own timers, which it starts twice; with ours they train to the end."""
    done = run("pipeline.py", whose, ranks=2)
    if survives:
        assert done.returncode == 0, done.stderr[-3000:]
        assert '"steps": 2' in done.stdout
        assert "bwd_inner_microstep: " in done.stdout
    else:
        assert done.returncode != 0
        assert "timer has already been started" in done.stderr


@pytest.mark.parametrize(("whose", "timed"), [("theirs", False), ("ours", True)])
def test_the_reduction_of_a_pipeline_is_timed(whose, timed):
    """``bwd_allreduce`` runs while gradients are reduced; the engine's own never does."""
    done = run("pipeline.py", whose)
    assert done.returncode == 0, done.stderr[-3000:]
    result = next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    running = json.loads(result.removeprefix("RESULT "))["running_in_reduction"]
    assert running
    assert {timed} == set(running)
