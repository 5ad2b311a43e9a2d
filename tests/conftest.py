"""What tests share: clocks that stand still, no warning said before, a reason where a machine lacks something."""

from __future__ import annotations

import functools
import importlib.util
import sys
import threading

import pytest

from deep500_timing._base.warn import forget_warnings
from deep500_timing.devices import _pool
from deep500_timing.testing import ManualClock, ManualDeviceClock

pytest_plugins = ["suite_guard", "suite_plugin", "suite_mlflow", "suite_ranks"]

# How long an example takes depends on what else the machine does. A `@given` keeps the profile of the moment when it is
# imported: this one for every test, as no file of tests is imported before this one.
# A machine that lends its own PyTorch to `make test-gpu` need not have Hypothesis.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples each time, so that a change breaks only tests of its subject; `make fuzz` looks for new
    # ones (its profile is named on the command line, which comes after this line).
    settings.register_profile("suite", deadline=None, print_blob=True, derandomize=True)
    settings.register_profile("fuzz", deadline=None, print_blob=True, max_examples=1000)
    settings.load_profile("suite")


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


@pytest.fixture
def clock():
    """A host clock that stands still until it is moved."""
    return ManualClock()


@pytest.fixture
def in_thread():
    """Run a function on its own thread to its end; hand back its result, or raise its error."""

    def run(function, *args, name=None):
        outcome = {}

        def target():
            try:
                outcome["result"] = function(*args)
            except BaseException as error:
                outcome["error"] = error

        thread = threading.Thread(target=target, name=name)
        thread.start()
        thread.join()
        if "error" in outcome:
            raise outcome["error"]
        return outcome["result"]

    return run


@pytest.fixture
def device():
    """A device with a time that stands still until it is moved."""
    device = ManualDeviceClock()
    yield device
    _pool._pools.pop(device, None)


@pytest.fixture
def switching():
    """Threads take turns after every few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(scope="module")
def connection():
    """One database for all runs."""
    opened = pytest.importorskip("duckdb").connect()
    yield opened
    opened.close()
