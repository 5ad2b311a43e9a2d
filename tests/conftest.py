"""What every test shares: a marker for what a machine may lack skips with a reason where it is missing."""

from __future__ import annotations

import functools

import pytest


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
