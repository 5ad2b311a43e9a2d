"""Programs on PyTorch's CUDA build, over libraries that compute nothing and keep time; see README.md."""

from __future__ import annotations

import subprocess
import sys

import pytest
from suite_rehearsal import FAKES, environment

# Their environment has 3 GB: `make test-rehearsal` sets it up and names the folder of the libraries.
collect_ignore_glob = [] if FAKES else ["test_*.py"]


@pytest.fixture(scope="session")
def kernel() -> None:
    """The compiled kernel of communication, built once for the rehearsal's PyTorch."""
    command = [sys.executable, "-m", "deep500_timing_torch.comm", "build"]
    subprocess.run(command, env=environment(), check=True, timeout=300)
