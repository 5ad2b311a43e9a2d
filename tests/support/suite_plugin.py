"""What holds for the whole suite: which tests run in which lane, and that a run leaves nothing running or locked.

``tests/README.md`` says how to write a test that fits in; the lanes are those of the Makefile.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest
import suite_caches
import suite_lanes
import suite_processes

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# What was asked to end, or ends because its parent did, may take that long.
GRACE_S = 5.0

_kept = pytest.StashKey[object]()
_begun = pytest.StashKey["Path"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """How many programs at random to try."""
    parser.addoption("--fuzz-seeds", type=int, default=6, help="programs at random to try in test_fuzz.py (default: 6)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that takes a ``seed`` as many as were asked for."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--fuzz-seeds")))


def pytest_configure(config: pytest.Config) -> None:
    """Prepare the run; a worker, and a pytest that a test runs, belong to the run that started them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell starts what it runs in the background so, and all that is started from there would be deaf to Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (randomly := config.pluginmanager.getplugin("randomly")) is not None:
        # DeepSpeed offers itself to be seeded, which would import it and PyTorch in every run, whatever is tested.
        randomly.entrypoint_reseeds = []
    if suite_processes.RUN not in os.environ:
        os.environ[suite_processes.RUN] = run = f"{os.getpid()}-{time.monotonic_ns()}"
        guardian = suite_processes.set_guardian(run) if suite_processes.AVAILABLE else None
        config.stash[_kept] = guardian, suite_caches.use(suite_lanes.TESTS.parent / "build" / "caches")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Let the collector, which many tests call, look only at what has come up since the file was begun.

    Frameworks and the files' own modules make a million objects, through which each call would go.
    """
    if item.config.stash.get(_begun, None) != item.path:
        item.config.stash[_begun] = item.path
        gc.collect()
        gc.freeze()


# After the tests were shuffled, before those that are not wanted are left out.
@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Mark what runs in which lane; put the files that take long first, so that no worker ends with one alone."""
    for item in items:
        suite_lanes.mark(item)
    yield
    turns: dict[Path, int] = {}
    for item in items:
        turns[item.path] = min(suite_lanes.turn(item), turns.get(item.path, sys.maxsize))
    items.sort(key=lambda item: turns[item.path])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Kill what a test's call has left running; for that, a test that has passed otherwise fails."""
    if not suite_processes.AVAILABLE:
        return (yield)
    mark = suite_processes.TEST, f"{item.nodeid} (call)", suite_processes.SERVICES
    before = suite_processes.last_started()
    try:
        result = yield
    except BaseException:
        suite_processes.kill(*mark)
        raise
    if suite_processes.last_started() != before:
        deadline = time.monotonic() + GRACE_S
        while (left := suite_processes.bearers(*mark)) and time.monotonic() < deadline:
            time.sleep(0.02)
        suite_processes.kill(*mark)
        assert not left, f"the test left these running: {', '.join(left.values())}"
    return result
