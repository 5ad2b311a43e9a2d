"""What every test shares: no warning said before, and a reason where a machine lacks what a test needs."""

from __future__ import annotations

import functools

import pytest

from deep500_timing._ground.warn import forget_warnings


@functools.cache
def _why_no_gpu() -> str | None:
    """Return why tests marked ``gpu`` cannot run here, or ``None``; torch is imported for such tests only."""
    try:
        import torch
    except ImportError as error:
        return f"needs PyTorch: {error}"
    return None if torch.cuda.is_available() else "needs a CUDA device, and PyTorch finds none"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test marked ``gpu`` on a machine without one."""
    if item.get_closest_marker("gpu") is not None and (reason := _why_no_gpu()) is not None:
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def _warn_anew() -> None:
    """Let each test see the warnings that are said once in the life of a process."""
    forget_warnings()
