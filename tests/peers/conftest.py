"""Fixtures of the comparisons with DeepSpeed: the real package, on the CPU, reading a manual clock."""

from __future__ import annotations

import os
import types

import pytest


@pytest.fixture(scope="session")
def deepspeed():
    """DeepSpeed's ``utils.timer``, as installed."""
    pytest.importorskip("torch")
    # Else it looks for hardware, and takes the suite's test device for one.
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = "cpu"
    pytest.importorskip("deepspeed", exc_type=ImportError)
    import deepspeed.utils.timer as module

    yield module
    if before is None:
        del os.environ["DS_ACCELERATOR"]
    else:
        os.environ["DS_ACCELERATOR"] = before


@pytest.fixture
def their(deepspeed, clock, monkeypatch):
    """DeepSpeed's timers, reading the manual clock."""
    # It takes a start time of 0 for none.
    monkeypatch.setattr(deepspeed, "time", types.SimpleNamespace(time=lambda: 1.0 + clock.now_ns() / 1e9))
    return deepspeed
