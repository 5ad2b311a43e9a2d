"""Scripts written for DeepSpeed's timers run here with the import changed, and there as they were."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import suite_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.matrix,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch"),
]


VARIABLES = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


@pytest.fixture
def run(forks, tmp_path):
    """Run a script to its end; returns its output."""

    def run_alone(script, *arguments):
        output = tmp_path / "output"
        output.unlink(missing_ok=True)
        program = forks.start([str(script), *arguments], suite_ranks.environment(**VARIABLES), output)
        try:
            assert program.wait(300) == 0, output.read_text()[-3000:]
        finally:
            program.kill()
        return output.read_text()

    return run_alone


@pytest.fixture
def run_two(tmp_path):
    """Run a script on two ranks, in separate interpreters; returns their output."""

    def run_ranks(script):
        job = suite_ranks.Job(tmp_path, suite_ranks.interpreter, [str(script)], 2, **VARIABLES)
        assert job.wait(300) == [0, 0], job.text()
        return job.text(0) + job.text(1)

    return run_ranks


def shape(text):
    """A script's output without its numbers, ranks, memory, and the lines that only DeepSpeed prints."""
    lines = [line for line in text.splitlines() if re.match(r"\[Rank|step \d|epoch=|means|[0-9]+ samples", line)]
    without = [re.sub(r"( \| (host|mem|max_mem|cache|max_cache).*|, MemAllocated.*)", "", line) for line in lines]
    return [re.sub(r"-?\d+(\.\d+)?(e-?\d+)?", "#", line) for line in without]


def test_a_script_for_deepspeeds_timers(run, tmp_path):
    """``deepspeed_timers.py`` prints the same lines with DeepSpeed's import and with ours, save for the memory."""
    script = EXAMPLES / "deepspeed_timers.py"
    ours = run(script)
    assert len(shape(ours)) == 12 + 5 + 5 + 2 + 2
    assert all(word in ours for word in ("fwd_microstep: ", "host_rss: ", "RunningAvgSamplesPerSec=", "means: "))
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed to compare with")
    source = script.read_text(encoding="utf-8")
    theirs = tmp_path / "theirs.py"
    # Its tuner would import MLflow, and with that pandas and polars: three seconds that have no part in this.
    without = "import sys\n\nsys.modules['mlflow'] = None\n"
    ours_is = "from deep500_timing_deepspeed.wallclock import"
    assert ours_is in source
    theirs.write_text(source.replace(ours_is, f"{without}from deepspeed.utils.timer import"), encoding="utf-8")
    assert shape(run(theirs)) == shape(ours)


def test_a_script_for_deepspeeds_timers_with_timing_off(run):
    """The same script runs with ``NoopTimer``, and prints no time."""
    text = run(EXAMPLES / "deepspeed_timers.py", "--no-timing")
    assert "time (ms)" not in text
    assert "step 4: forward took 0.000 ms" in text
