"""Every script of the gallery runs, with its fault and without; `make gallery` prints what `run` says of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from suite_ranks import free_port

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.matrix, pytest.mark.one_form]

SCRIPTS = sorted((Path(__file__).parents[2] / "examples" / "gallery").glob("*.py"))
PROGRAM = """
import runpy, sys, time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.001))  # what stands for work takes no time here
sys.argv = {command!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("options", [[], ["--fixed"]], ids=["fault", "fixed"])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_of_the_gallery_runs(script, options, forks, tmp_path, monkeypatch):
    """Each rank exits with 0; the pipeline has two, the others are content with one."""
    monkeypatch.chdir(tmp_path)
    ranks = 2 if script.stem == "pipeline_bubble" else 1
    port = free_port()
    started = []
    for rank in range(ranks):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
        environment = {**os.environ, **of_rank, "MASTER_ADDR": "127.0.0.1"}
        output = tmp_path / f"output-{rank}"
        command = ["-c", PROGRAM.format(command=[str(script), *options])]
        started.append((forks.start(command, environment, output), output))
    try:
        for program, output in started:
            assert program.wait(300) == 0, output.read_text()[-4000:]
    finally:
        for program, _ in started:
            program.kill()
