"""Real ranks for tests: processes that are started together, as a launcher would, and cannot outlive their test."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import pytest
import suite_coverage
import suite_forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from suite_forks import Program

# What nearly every rank imports, or its first optimizer does, and nothing of this project.
LIBRARIES = ("numpy", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim")
JAX = ("numpy", "jax.numpy")
# What programs of Keras on TensorFlow import, and the variables that are read meanwhile.
TENSORFLOW = ("tensorflow", "tf_keras")
ON_TENSORFLOW = {"KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
# Launchers' variables that may be in the environment of the tests themselves.
_LAUNCHERS = ("RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
# What torchrun does: it keeps the job's store itself, and tells its ranks so.
_AGENT = """
import sys, time
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
path = Path(sys.argv[1])
path.with_suffix(".part").write_text(str(store.port))
path.with_suffix(".part").replace(path)
time.sleep(3600)
"""
# `deep500-timing run` in a fork, where no import of PyTorch is left to begin the timing.
_RUN = """
import sys
from deep500_timing._launch import command

prepare = command._prepare
def prepare_and_begin(options, rest):
    prepare(options, rest)
    sys.meta_path[0].find_spec("torch")
command._prepare = prepare_and_begin
sys.exit(command.main(sys.argv[1:]))
"""


def command(folder: Path, *words: str, timeout_s: float = 600, **more: str) -> subprocess.CompletedProcess[str]:
    """``deep500-timing`` in a folder, in a process without the variables of a launcher."""
    return subprocess.run(
        [sys.executable, "-m", "deep500_timing", *words],
        cwd=folder,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def free_port() -> int:
    """A port that no one listens on, and that the system gives to no other program by its own choice.

    It stays bound until this process ends. Listeners with SO_REUSEADDR can take it, as PyTorch's store and web servers.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    port: int = probe.getsockname()[1]
    probe.detach()
    return port


def environment(**more: str) -> dict[str, str]:
    """What every rank's environment holds."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    return {**kept, **suite_coverage.of_a_child(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def interpreter(command: Sequence[str], variables: dict[str, str], output: Path) -> Program:
    """Start a program in its own interpreter, with its output in a file."""
    with output.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *command], env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )


class Job:
    """The ranks of one program.

    Args:
        folder: Where each rank writes its result, ``RANK.json``, and its output is kept, ``RANK.log``.
        start: What starts a program, given its command, environment and the file for its output.
        command: A script and its arguments, or ``-c``, a program's text and arguments.
        ranks: How many.
        agent: Whether a process next to them keeps their store, as under torchrun; else rank 0 does.
        variables: What else is in their environment.
    """

    def __init__(
        self,
        folder: Path,
        start: Callable[[Sequence[str], dict[str, str], Path], Program],
        command: Sequence[str],
        ranks: int,
        *,
        agent: bool = False,
        **variables: str,
    ) -> None:
        self.folder = folder
        self.processes: list[Program] = []
        self._agent: Program | None = None
        job = environment(MASTER_ADDR="127.0.0.1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), **variables)
        if agent:
            port = folder / "port"
            self._agent = start(["-c", _AGENT, str(port)], job, folder / "agent.log")
            until = time.monotonic() + 300
            while not port.exists():
                if self._agent.poll() is not None or time.monotonic() > until:
                    pytest.fail(f"no store for the ranks\n{self.text()}")
                time.sleep(0.005)
            job |= {"MASTER_PORT": port.read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
            job |= {"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        else:
            job["MASTER_PORT"] = str(free_port())
        for rank in range(ranks):
            own = {**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            self.processes.append(start(command, own, folder / f"{rank}.log"))

    def text(self, rank: int | None = None) -> str:
        """The ranks' output, or one of them."""
        if rank is not None:
            return (self.folder / f"{rank}.log").read_text(errors="replace")
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {one.name}\n{one.read_text(errors='replace')[-4000:]}" for one in logs)

    def wait_for(self, names: Iterable[str], timeout_s: float = 300) -> None:
        """Wait until files of these names are in the folder; the test fails if they do not come in time."""
        until = time.monotonic() + timeout_s
        for path in [self.folder / name for name in names]:
            while not path.exists():
                assert time.monotonic() < until, f"waiting for {path}\n{self.text()}"
                time.sleep(0.01)

    def wait(self, timeout_s: float = 300) -> list[int | None]:
        """The ranks' exit statuses, once all have ended or one has failed; the rest are then killed, as by torchrun.

        ``None`` stands for a rank that had to be killed, as it had not ended alone.
        """
        until = time.monotonic() + timeout_s
        left = [*self.processes]
        while left and time.monotonic() < until and not any(one.returncode for one in self.processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                left[0].wait(0.05)
            left = [one for one in left if one.poll() is None]
        statuses = [one.returncode for one in self.processes]
        self.kill()
        return statuses

    def results(self, timeout_s: float = 300) -> list[dict]:
        """What each rank has left as JSON; the test fails if they do not all end well in time."""
        statuses = self.wait(timeout_s)
        assert [0] * len(self.processes) == statuses, f"(None: hung, or killed after another failed)\n{self.text()}"
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]

    def kill(self) -> None:
        """End the rest."""
        for process in [*self.processes, *([self._agent] if self._agent else [])]:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


class Forks:
    """The servers of forks of a run, each started when it is first needed."""

    def __init__(self) -> None:
        self._servers: dict[tuple[str, ...], suite_forks.Server] = {}

    def start(self, command: Sequence[str], variables: dict[str, str], output: Path) -> Program:
        """Start a program that uses PyTorch."""
        return self._start(LIBRARIES, {}, command, variables, output)

    def start_tensorflow(self, command: Sequence[str], variables: dict[str, str], output: Path) -> Program:
        """Start a program that uses TensorFlow, with or without one of its Kerases."""
        return self._start(TENSORFLOW, ON_TENSORFLOW, command, {**variables, **ON_TENSORFLOW}, output)

    def start_jax(self, command: Sequence[str], variables: dict[str, str], output: Path) -> Program:
        """Start a program that uses JAX, and perhaps PyTorch, which it imports itself."""
        return self._start(JAX, {}, command, variables, output)

    def _start(
        self,
        libraries: tuple[str, ...],
        importing: dict[str, str],
        command: Sequence[str],
        variables: dict[str, str],
        output: Path,
    ) -> Program:
        if not suite_forks.AVAILABLE:
            return interpreter(command, variables, output)
        if libraries not in self._servers:
            there = [name for name in libraries if importlib.util.find_spec(name.partition(".")[0]) is not None]
            self._servers[libraries] = suite_forks.Server(there, importing)
        return self._servers[libraries].start(command, variables, output)

    def run(self, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """``deep500-timing run`` in a folder, of a program that uses PyTorch; its errors are in its output."""
        command = [sys.executable, "-m", "deep500_timing", "run", *words]
        with (folder / "output").open("w+", errors="replace") as output:
            done = self.run_instead(command, cwd=folder, env=environment(**variables), stdout=output)
            done.stdout = output.read()
        return done

    def run_instead(
        self, words: Sequence[str], *, env: dict[str, str], stdout: IO[Any], cwd: Path | str | None = None, **_: object
    ) -> subprocess.CompletedProcess[str]:
        """What ``subprocess.run`` does with ``python -m deep500_timing run ...`` and a file for all of its output."""
        with contextlib.chdir(cwd or "."):
            program = self.start(["-c", _RUN, *words[4:]], env, Path(stdout.name).absolute())
        try:
            return subprocess.CompletedProcess(words, program.wait(300))
        finally:
            program.kill()

    def printed(self, program: str, output: Path, timeout_s: float = 300, **variables: str) -> str:
        """The output of a program's text, errors included; the test fails if it does not end well in time."""
        started = self.start(["-c", program], environment(**variables), output)
        try:
            status = started.wait(timeout_s)
        finally:
            started.kill()
        text = output.read_text(errors="replace")
        assert 0 == status, text
        return text

    def close(self) -> None:
        """End all of them."""
        for server in self._servers.values():
            server.close()


@contextlib.contextmanager
def jobs_of(workers: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Job]]:
    """Start scripts of the folder ``workers`` as so many ranks, with arguments; what runs at the end is killed."""
    started: list[Job] = []

    def start(script: str, ranks: int, *arguments: str) -> Job:
        folder = tmp_path_factory.mktemp(f"{script.removesuffix('.py')}-{ranks}")
        started.append(Job(folder, forks.start, [str(workers / script), str(folder), *arguments], ranks))
        return started[-1]

    try:
        yield start
    finally:
        for job in started:
            job.kill()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Start programs in milliseconds: of PyTorch by ``forks.start``, of TensorFlow by ``forks.start_tensorflow``."""
    forks = Forks()
    yield forks
    forks.close()
