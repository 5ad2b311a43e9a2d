"""Real DeepSpeed engines on the CPU, with our timers instead of their own."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import suite_ranks

PROGRAMS = Path(__file__).parent / "programs"
pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    pytest.mark.slow,
]


VARIABLES = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def run_alone(forks, tmp_path):
    """Run a program as the one rank of its job; returns its output."""

    def run(program, *arguments):
        job = suite_ranks.Job(tmp_path, forks.start, [str(PROGRAMS / program), *arguments], 1, **VARIABLES)
        assert [0] == job.wait(300), job.text()
        return job.text(0)

    return run


def test_wall_clock_breakdown_of_an_engine_is_right(run_alone):
    """Each line, cache and rate of an engine with two accumulated micro-batches is that of the known times."""
    text = run_alone("engine.py")
    seen, _ = json.JSONDecoder().raw_decode(text, text.index('{"lines"'))
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
def test_a_pipeline_engine_with_breakdown(forks, tmp_path, whose, survives):
    """Two stages crash on the engine's own timers, which it starts twice; with ours they train to the end."""
    # Ours run in separate interpreters, which share neither a hash seed nor imported modules.
    start = suite_ranks.interpreter if survives else forks.start
    job = suite_ranks.Job(tmp_path, start, [str(PROGRAMS / "pipeline.py"), whose], 2, **VARIABLES)
    statuses = job.wait(300)
    if survives:
        assert [0, 0] == statuses, job.text()
        assert '"steps": 2' in job.text()
        assert "bwd_inner_microstep: " in job.text()
    else:
        assert any(statuses), job.text()
        assert "timer has already been started" in job.text()


@pytest.mark.parametrize(("whose", "timed"), [("theirs", False), ("ours", True)])
def test_the_reduction_of_a_pipeline_is_timed(run_alone, whose, timed):
    """``bwd_allreduce`` runs while gradients are reduced; the engine's own never does."""
    result = next(line for line in run_alone("pipeline.py", whose).splitlines() if line.startswith("RESULT"))
    running = json.loads(result.removeprefix("RESULT "))["running_in_reduction"]
    assert running
    assert {timed} == set(running)


def test_the_tutorial_on_pipelines_trains_alike(tmp_path):
    """With the import changed and nothing else, six losses on two ranks agree to six digits."""
    found = {}
    for which in ("deepspeed", "deep500_timing_deepspeed"):
        folder = tmp_path / which
        folder.mkdir()
        command = [str(PROGRAMS / "tutorial.py"), which, str(folder)]
        job = suite_ranks.Job(folder, suite_ranks.interpreter, command, 2, **VARIABLES)
        assert [0, 0] == job.wait(300), job.text()
        lines = [line for rank in (0, 1) for line in job.text(rank).splitlines() if line.startswith("LOSSES")]
        found[which] = [[round(loss, 6) for loss in json.loads(line.removeprefix("LOSSES"))] for line in lines]
    assert 6 == len(found["deepspeed"][0])
    assert found["deepspeed"] == found["deep500_timing_deepspeed"]
