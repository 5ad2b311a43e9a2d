"""The examples of Keras run as a user would run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("keras_convnet.py", []), ("keras_transformer.py", ["--csv", "times.csv"]), ("keras_unet.py", [])],
)
def test_example(name, arguments, tmp_path):
    """The table holds the passes and what no region covers, and how fast it went is printed below it."""
    for needed in ("keras", "tensorflow"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    environment = {**os.environ, "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--quick", "--epochs", "1", *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=140,
        check=False,
    )
    assert 0 == ran.returncode, ran.stderr
    for word in ("FORWARD", "BACKWARD", "IO", "VALIDATION", "share", "the rest", "samples/s"):
        assert word in ran.stdout
    if arguments:
        assert "time/BATCH" in (tmp_path / "times.csv").read_text()
