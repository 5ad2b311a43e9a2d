"""What the README shows is what happens: its Python blocks run (links and commands: ``test_pages.py``)."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import suite_ranks

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def imports(block: str) -> list[str]:
    """The packages that a block imports."""
    return re.findall(r"^(?:import|from) (\w+)", block, flags=re.MULTILINE)


def test_readme_has_blocks() -> None:
    """The pattern that finds the blocks finds them."""
    assert len(BLOCKS) >= 4


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: imports(block)[0])
def test_block_runs(block: str, forks, request, tmp_path: Path, monkeypatch) -> None:
    """A Python block of the README runs as it stands, in an empty folder."""
    for module in imports(block):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    if "mlflow" in imports(block):
        shutil.copy(request.getfixturevalue("mlflow_database"), tmp_path / "mlflow.db")
        environment["MLFLOW_TRACKING_URI"] = f"sqlite:///{tmp_path / 'mlflow.db'}"
    start = suite_ranks.interpreter
    if any("torch" in module for module in imports(block)):
        start = forks.start
    elif "keras" in imports(block):
        start = forks.start_tensorflow
    output = tmp_path / "output"
    program = start(["-c", block], environment, output)
    try:
        assert program.wait(240) == 0, output.read_text()[-4000:]
    finally:
        program.kill()


def test_batch_of_the_loop_holds_its_io() -> None:
    """In the loop of PyTorch each BATCH holds the wait for its data, as the text says."""
    pytest.importorskip("torch")
    (loop,) = (block for block in BLOCKS if "tmr.iterate(loader)" in block)
    names: dict[str, Any] = {}
    exec(loop.replace("tmr.print_all_time_stats()", ""), names)
    waits, batches = (names["tmr"].intervals(key).tolist() for key in ("IO", "BATCH"))
    assert 100 == len(waits) == len(batches)
    for (asked_ns, there_ns), (began_ns, ended_ns) in zip(waits, batches, strict=True):
        assert began_ns <= asked_ns <= there_ns <= ended_ns
