"""The examples of Keras run as a user would run them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import suite_ranks

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("keras_convnet.py", []), ("keras_transformer.py", ["--csv", "times.csv"]), ("keras_unet.py", [])],
)
def test_example(name, arguments, forks, tmp_path, monkeypatch):
    """The table holds the passes and what no region covers, and how fast it went is printed below it."""
    for needed in ("keras", "tensorflow"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    monkeypatch.chdir(tmp_path)
    output = tmp_path / "output"
    command = [str(EXAMPLES / name), "--quick", "--epochs", "1", *arguments]
    status = forks.start_tensorflow(command, suite_ranks.environment(), output).wait(300)
    said = output.read_text()
    assert 0 == status, said
    for word in ("FORWARD", "BACKWARD", "IO", "VALIDATION", "share", "the rest", "samples/s"):
        assert word in said
    if arguments:
        assert "time/BATCH" in (tmp_path / "times.csv").read_text()
