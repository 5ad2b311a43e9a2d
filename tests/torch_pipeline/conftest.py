"""Real ranks for the tests of pipelines: gloo processes that are started together and cannot outlive their test."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import suite_coverage

WORKERS = Path(__file__).parent / "workers"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Ranks:
    """The processes of one job."""

    def __init__(self, folder: Path, script: str, ranks: int, arguments: tuple[str, ...]) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
        port = _free_port()
        self.processes = []
        for rank in range(ranks):
            environment = {
                **kept,
                **suite_coverage.of_a_child(),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            # Into a file: a pipe that nobody reads would stop a rank that says much.
            output = (folder / f"{rank}.log").open("w")
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, str(WORKERS / script), str(folder), *arguments],
                    env=environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
            output.close()

    def text(self) -> str:
        """What the ranks have printed."""
        return "\n".join(f"--- {one.name}\n{one.read_text()[-4000:]}" for one in sorted(self.folder.glob("*.log")))

    def wait(self, timeout_s: float = 200) -> list[int]:
        """The ranks' exit statuses; the test fails if they are not all there in time."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            try:
                process.wait(max(until - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.kill()
                pytest.fail(f"ranks hung\n{self.text()}")
        return [process.returncode for process in self.processes]

    def results(self, timeout_s: float = 200) -> list[dict]:
        """What each rank has left as JSON."""
        assert [0] * len(self.processes) == self.wait(timeout_s), self.text()
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(len(self.processes))]

    def kill(self) -> None:
        """End what is left."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Start a worker script as so many ranks."""
    started: list[Ranks] = []

    def start(script: str, count: int, *arguments: str) -> Ranks:
        started.append(Ranks(tmp_path_factory.mktemp(f"{Path(script).stem}-{count}"), script, count, arguments))
        return started[-1]

    yield start
    for one in started:
        one.kill()
