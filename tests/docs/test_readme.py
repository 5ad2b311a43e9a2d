"""The README's examples run: its Python blocks run (links and commands: ``test_pages.py``)."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import suite_ranks

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


# The reader's part of the README's loops.
PREPARED = {
    "train_step(batch)": """
import torch
net = torch.nn.Linear(64, 10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = [(torch.randn(32, 64), torch.randint(10, (32,))) for _ in range(100)]
def train_step(batch):
    torch.nn.functional.cross_entropy(net(batch[0]), batch[1]).backward()
    optimizer.step()
""",
    "model.fit(": """
import keras
import numpy as np
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
images, labels = np.random.rand(1000, 64), np.random.randint(10, size=1000)
""",
}


def prepared(block: str) -> str:
    """A block with the definitions that it takes for granted."""
    return "".join(text for mark, text in PREPARED.items() if mark in block) + block


def imports(block: str) -> list[str]:
    """The packages that a block imports."""
    return re.findall(r"^(?:import|from) (\w+)", block, flags=re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: imports(block)[0])
def test_block_runs(block: str, forks, tmp_path: Path, monkeypatch) -> None:
    """A Python block of the README runs as it stands, in an empty folder."""
    block = prepared(block)
    for module in imports(block):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    start = suite_ranks.interpreter
    if any("torch" in module for module in imports(block)):
        start = forks.start
    elif "keras" in imports(block):
        start = forks.start_tensorflow
    output = tmp_path / "output"
    program = start(["-c", block], environment, output)
    try:
        assert program.wait(300) == 0, output.read_text()[-4000:]
    finally:
        program.kill()


def test_batch_of_the_loop_holds_its_io() -> None:
    """In the loop of PyTorch each BATCH holds the wait for its data, as the comment says."""
    pytest.importorskip("torch")
    (loop,) = (block for block in BLOCKS if "tmr.steps(loader" in block)
    names: dict[str, Any] = {}
    exec(prepared(loop).replace("tmr.print_all_time_stats()", ""), names)
    waits, batches = (names["tmr"].intervals(key).tolist() for key in ("IO", "BATCH"))
    assert 100 == len(batches)
    assert len(waits) >= 100
    for (asked_ns, there_ns), (began_ns, ended_ns) in zip(waits[:100], batches, strict=True):
        assert began_ns <= asked_ns <= there_ns <= ended_ns
