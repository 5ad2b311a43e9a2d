"""One thread of PyTorch for each test of a trainer: small models are slower with more."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    torch = pytest.importorskip("torch", reason="the trainers train with PyTorch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
