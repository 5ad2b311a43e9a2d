"""What holds for every test: no process outlives the test that started it, and caches stay in the tree."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import suite_caches
import suite_guard

if TYPE_CHECKING:
    from collections.abc import Container, Generator

ROOT = Path(__file__).parents[2]
# A process that was asked to end, or has lost its parent, gets this long.
GRACE_S = 30.0
# These live as long as the process that first used them.
SERVICES = ("wandb-core", "multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor")
_PR_SET_CHILD_SUBREAPER = 36

_caches = pytest.StashKey[object]()
_current_file = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for the numbers of random programs and of changed files."""
    parser.addoption("--fuzz-seeds", type=int, default=6, help="random programs to run in test_fuzz.py (default: 6)")
    parser.addoption("--mutations", type=int, default=60, help="changes to try in test_mutations.py (default: 60)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize a test that takes a ``seed``."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--fuzz-seeds")))


def pytest_configure(config: pytest.Config) -> None:
    """Restore Ctrl-C, keep seeding cheap, adopt orphans, and redirect caches."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        # A shell ignores SIGINT for background jobs, and every child would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if (randomly := config.pluginmanager.getplugin("randomly")) is not None:
        # DeepSpeed registers a seeding hook, which would import PyTorch in every run.
        randomly.entrypoint_reseeds = []
    if sys.platform == "linux":
        # Orphaned grandchildren become children of this process, so that the check below finds them.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    config.stash[_caches] = suite_caches.use(ROOT / "build" / "caches")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that fork programs as slow, and start slow files first.

    Else one worker would end with a slow file while the others have nothing to do.
    """
    for item in items:
        if "forks" in getattr(item, "fixturenames", ()):
            item.add_marker("slow")
    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Freeze the objects of earlier files: many tests call the garbage collector."""
    if item.config.stash.get(_current_file, None) != item.path:
        item.config.stash[_current_file] = item.path
        gc.collect()
        suite_guard.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter free them: DuckDB prints a page about a connection that it finds alive at the end."""
    gc.unfreeze()


def _descendants(known: Container[int] = (), pid: int | str = "self") -> dict[int, str]:
    """The running processes below a process and their commands, without the ones that serve a whole run.

    A child of a process of ``known``, such as a browser that tests share, is left out with it.
    """
    found = {}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            if int(child) in known:
                continue
            state = _read(Path(f"/proc/{child}/stat")).rpartition(")")[2].split()[:1]
            command = _read(Path(f"/proc/{child}/cmdline")).replace("\0", " ").strip()
            is_fork_server = pid == "self" and "suite_forks" in command
            if state and state != ["Z"] and not is_fork_server and not any(name in command for name in SERVICES):
                found[int(child)] = command
            found.update(_descendants(known, child))
    return found


def _read(path: Path) -> str:
    """A file of ``/proc``, empty once its process has ended."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Kill the processes that the test left running; fail a test that passed but left one."""
    before = _descendants()
    # Linux may leave out children of a process while another one of them ends.
    while (more := _descendants()).keys() - before.keys():
        before |= more
    try:
        result = yield
        deadline = time.monotonic() + GRACE_S
        while (running := _descendants(before)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not running, f"the test left these running: {', '.join(running.values())}"
    finally:
        for pid in _descendants(before):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return result
