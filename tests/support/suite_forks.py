"""Start test programs by forking a process that has already imported PyTorch, JAX or TensorFlow.

Importing PyTorch takes two seconds of CPU, and a job has up to eight ranks. A server process imports the libraries
once and forks for each program. The program runs as ``__main__`` with its own environment, arguments, folder, output
and exit status, and its ``atexit`` callbacks run. ``multiprocessing``'s forkserver does not serve here: it skips
``atexit`` and keeps one set of preloaded modules per process, and PyTorch and TensorFlow programs need different ones.

The server imports nothing of this project. All forks share its hash seed. Where forking is not possible (not Linux), or
with ``DEEP500_TIMING_TEST_FORKS=0``, each program gets a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AVAILABLE = hasattr(os, "pidfd_open") and os.environ.get("DEEP500_TIMING_TEST_FORKS") != "0"
# A busy machine's time to import the libraries from disk, and to fork.
_ANSWER_S = 300.0
# Read when libraries are imported: a process with a second thread cannot be forked safely. The last is for Apache
# Arrow, which pandas imports, and so Keras.
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}


class Program(Protocol):
    """A running program: the part of ``subprocess.Popen`` that tests of ranks use."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """The exit status, or ``None`` while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for; raises ``subprocess.TimeoutExpired``."""

    def kill(self) -> None:
        """Kill it."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""


class Fork:
    """A program that a server has forked; see ``Program``."""

    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """The exit status, or ``None`` while it runs."""
        return self._server.status(self, 0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, waited for."""
        status = self._server.status(self, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)


class Server:
    """A process that has imported libraries and is forked for programs; it ends with its owner's end of a pipe.

    Args:
        modules: Its imports.
        environment: What else is in its environment while it imports them.
    """

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env={**kept, **_ONE_THREAD, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._out, selectors.EVENT_READ)
        self._text = b""
        self._running: dict[int, Fork] = {}

    @property
    def _out(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout

    def start(self, command: Sequence[str], environment: Mapping[str, str], output: Path) -> Fork:
        """Fork a program: a script and its arguments, or ``-c``, a program's text and arguments.

        Its output goes to a file: a pipe that no one reads would stop a program that says much.
        """
        asked = {
            "command": [*command],
            "environment": {**environment},
            "output": str(output.absolute()),
            "folder": str(Path.cwd()),
        }
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # How it ended is known from its answer.
            self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        until = time.monotonic() + _ANSWER_S
        while True:
            said = self._read(until - time.monotonic())
            if said is None:
                raise RuntimeError(f"the server of forks did not answer in {_ANSWER_S:g} s")
            if "started" in said:
                fork = self._running[said["started"]] = Fork(self, said["started"])
                return fork

    def status(self, fork: Fork, timeout: float | None) -> int | None:
        """A fork's exit status, once it is there."""
        until = None if timeout is None else time.monotonic() + timeout
        while fork.returncode is None:
            if self._read(None if until is None else max(until - time.monotonic(), 0.0)) is None:
                break
        return fork.returncode

    def _read(self, timeout: float | None) -> dict[str, int] | None:
        """The server's next line; ``None`` if it says nothing in time."""
        while b"\n" not in self._text:
            if not self._selector.select(None if timeout is None else max(timeout, 0.0)):
                return None
            more = os.read(self._out.fileno(), 1 << 16)
            if not more:
                raise RuntimeError(f"the server of forks has ended with status {self._process.wait()}")
            self._text += more
        line, _, self._text = self._text.partition(b"\n")
        said: dict[str, int] = json.loads(line)
        if "ended" in said and (fork := self._running.pop(said["ended"], None)) is not None:
            fork.returncode = said["status"]
        return said

    def close(self) -> None:
        """End it, and its forks."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._selector.close()
        self._out.close()


# --- in the server ---------------------------------------------------------------------------------------------------


def _serve() -> dict[str, Any] | None:
    """Fork a program for each line of the input; a fork is given its request, the server ``None``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which closes the input.
    sends = os.dup(1)
    os.dup2(2, 1)  # A library's output at its import is no answer.
    for module in sys.argv[1:]:
        importlib.import_module(module)
    ours = [name for name in sys.modules if name.startswith("deep500_timing")]
    assert not ours, f"a program would find {ours} imported"
    threads = len([*Path("/proc/self/task").iterdir()])
    assert threads == 1, f"a process of {threads} threads cannot be forked safely"
    gc.collect()
    gc.freeze()
    children: dict[int, int] = {}
    text = b""

    def say(**said: int) -> None:
        os.write(sends, json.dumps(said).encode() + b"\n")

    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    pid = children.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    say(ended=pid, status=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                more = os.read(0, 1 << 16)
                text += more
                while b"\n" in text:
                    line, _, text = text.partition(b"\n")
                    pid = os.fork()
                    if not pid:
                        for descriptor in (sends, *children):
                            os.close(descriptor)
                        asked: dict[str, Any] = json.loads(line)
                        return asked
                    watched = os.pidfd_open(pid)
                    children[watched] = pid
                    selector.register(watched, selectors.EVENT_READ)
                    say(started=pid)
                if not more:
                    for pid in children.values():
                        os.kill(pid, signal.SIGKILL)
                        os.waitpid(pid, 0)
                    return None


def _search_path() -> list[str]:
    """Entries of the environment in front of an interpreter's own search path."""
    return [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def _become(asked: dict[str, Any]) -> tuple[types.CodeType, dict[str, Any]]:
    """Be the interpreter of a program; hand back its code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    not_its = _search_path()
    os.environ.clear()
    os.environ.update(asked["environment"])
    for descriptor, path, how in (
        (0, os.devnull, os.O_RDONLY),
        (1, asked["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, how, 0o666)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)
    os.chdir(asked["folder"])
    sys.path[1:] = [*_search_path(), *(path for path in sys.path[1:] if path not in not_its)]
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        import coverage

        coverage.process_startup()
    if "numpy" in sys.modules:
        # Else the state of the server, the same in each rank; Python's own generator is seeded again by a fork.
        sys.modules["numpy"].random.seed()
    script, *arguments = asked["command"]
    main = types.ModuleType("__main__")
    if script == "-c":
        text, *arguments = arguments
        code = compile(text, "<string>", "exec")
        sys.path[0] = ""
    else:
        code = compile(Path(script).read_bytes(), script, "exec")
        main.__file__ = script
        sys.path[0] = str(Path(script).parent)
    sys.argv = [script, *arguments]
    sys.modules["__main__"] = main
    return code, main.__dict__


if __name__ == "__main__" and (asked := _serve()) is not None:
    exec(
        *_become(asked)
    )  # As the last thing, for an interpreter that ends is one of the program's, not of a function's.
