"""No process outlives the test, nor the run, that started it.

What a test's call starts carries that test's name in its environment (pytest's ``PYTEST_CURRENT_TEST``), and whatever
a run starts carries the run's own mark. Both are read from ``/proc``, so that a process is found wherever it hangs: a
rank whose launcher is dead, a server in a session of its own, a compiler below a build. Servers that a fixture shares
are started in a test's set-up and may outlive that test; the run they do not outlive, however it ends: a guardian waits
for the end of the run's process, then kills what bears its mark.

A fork that executes no program shows its parent's environment and is not found. Elsewhere than on Linux nothing is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

AVAILABLE = Path("/proc/loadavg").exists()
RUN = "DEEP500_TIMING_TEST_RUN"
TEST = "PYTEST_CURRENT_TEST"
# Libraries keep these for the life of the process that first used them.
SERVICES = ("wandb-core", "multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor")


def bearers(name: str, value: str, spared: Collection[str] = ()) -> dict[int, str]:
    """The processes that were started with ``name=value`` and their commands; without the spared and this one."""
    mark = f"{name}={value}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # It has ended, or is another user's.
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if not any(word in line for word in spared):
                    found[int(folder.name)] = line
    found.pop(os.getpid(), None)
    return found


def kill(name: str, value: str, spared: Collection[str] = ()) -> None:
    """Kill the bearers of a mark, until none is left that could start another."""
    deadline = time.monotonic() + 10
    while (left := bearers(name, value, spared)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def last_started() -> str:
    """What changes whenever a process or thread is started on this machine."""
    return Path("/proc/loadavg").read_text(encoding="ascii").rsplit(maxsplit=1)[-1]


def guard(run: str) -> None:
    """Wait until the run's process has ended, whatever ended it; then kill what it left."""
    sys.stdin.buffer.read()
    kill(RUN, run)


def set_guardian(run: str) -> subprocess.Popen[bytes]:
    """Start a guardian of this process; keep what comes back, for the guardian waits for the end of its input."""
    return subprocess.Popen(
        [sys.executable, "-I", __file__, run],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run alone.
    )


if __name__ == "__main__":
    guard(sys.argv[1])
