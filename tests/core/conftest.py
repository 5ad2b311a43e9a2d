"""What the core's tests share: clocks that stand still, threads that are joined, interpreters of their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from deep500_timing import Timer


def _process_state() -> dict[str, Any]:
    return {
        "threads": {thread for thread in threading.enumerate() if thread.is_alive()},
        # Hypothesis keeps one of its own.
        "gc callbacks": [callback for callback in gc.callbacks if "hypothesis" not in callback.__module__],
        "gc enabled": gc.isenabled(),
        "tracemalloc": tracemalloc.is_tracing(),
        "SIGUSR1": signal.getsignal(signal.SIGUSR1),
        "switch interval": sys.getswitchinterval(),
        "environment": dict(os.environ, PYTEST_CURRENT_TEST=""),
        "directory": Path.cwd(),
        "trace": sys.gettrace() if sys.gettrace() is None else "a tracer",
    }


@pytest.fixture(autouse=True)
def _leave_nothing_behind():
    """Fail a test that leaves a thread, a callback, a signal handler or a setting of the process behind."""
    before = _process_state()
    yield
    for thread in set(threading.enumerate()) - before["threads"]:
        thread.join(30.0)  # It may be ending.
    after = _process_state()
    after["threads"] |= before["threads"]  # One of an earlier test may end meanwhile.
    left = {name: (before[name], after[name]) for name in before if before[name] != after[name]}
    assert left == {}, f"the test left this behind: {left}"


@pytest.fixture
def tmr(clock):
    """A timer on that clock."""
    return Timer(clock=clock)


@pytest.fixture
def in_thread():
    """Run a function on a thread of its own to its end; hand back what it returned, or raise what it raised."""

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
def python(tmp_path):
    """Run a program in an interpreter of its own, outside the tree, in the form under test; it must end well."""

    def run(program, *, expect=0, **variables):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (expect, "") == (done.returncode, done.stderr), done.stdout
        return done.stdout

    return run
