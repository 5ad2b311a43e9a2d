"""One thread of PyTorch for each test of a trainer, since small models are slower with more, and no accelerator."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def _one_thread():
    torch = pytest.importorskip("torch", reason="the trainers train with PyTorch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_test_device():
    """Trainers pin memory for an accelerator. Earlier tests of this process may have registered one that cannot."""
    device = getattr(pytest.importorskip("torch"), "testdev", None)
    if device is None:
        yield
        return
    device.set_available(False)
    yield
    device.set_available(True)


@pytest.fixture(autouse=True)
def _no_telemetry(monkeypatch):
    """TRL reports each use to its makers, on a thread that stays."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True)


@pytest.fixture(autouse=True)
def _no_open_log():
    """A timer's log is open until its program ends. Here it would take the rows of the tests that follow."""
    from deep500_timing.runs import logs

    yield
    for log in list(logs.values()):
        log.close()
