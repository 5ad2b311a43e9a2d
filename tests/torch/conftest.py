"""Shared by the tests of the PyTorch adapter: the test device, and processes without any device."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture
def dev():
    """The controls of the test device, in the state after loading; skips where it cannot be built."""
    if "torch_device" not in sys.modules:
        path = HERE.parent / "torch_device" / "__init__.py"
        spec = importlib.util.spec_from_file_location("torch_device", path)
        sys.modules["torch_device"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    device = sys.modules["torch_device"].load_or_skip()
    from deep500_timing.devices import _pool as _device

    device.reset()
    # The events of earlier tests are of a time that is no more.
    _device._pools.clear()
    yield device
    device.reset()
    _device._pools.clear()


@pytest.fixture
def run_alone():
    """Runs a program in its own interpreter, which has imported nothing; gives its output."""

    def run(program, *, check=True, **environment):
        import os

        result = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if check:
            assert result.returncode == 0, result.stderr
        return result

    return run


@pytest.fixture
def run_forked(forks, tmp_path):
    """Runs a program where PyTorch and its compiler are imported, and neither an accelerator nor anything of ours.

    Gives its output, errors included. For programs without PyTorch.
    """

    def run(program):
        return forks.printed(program, tmp_path / "program.log", CUDA_VISIBLE_DEVICES="")

    return run
