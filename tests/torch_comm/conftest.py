"""Real ranks for the tests of communication: gloo processes under torchrun, or started one by one to be killed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import suite_coverage

WORKERS = Path(__file__).parent / "workers"
SWITCH = "DEEP500_TIMING_COMM_KERNEL"
# No test starts a build behind its back; those of the kernel ask for it.
os.environ[SWITCH] = "off"


def _environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "LOCAL_"))}
    return {**kept, **suite_coverage.of_a_child(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory):
    """Run a worker script on so many ranks; gives what each rank has left as JSON."""

    def run(script: str, ranks: int, timeout_s: float = 100, **environment: str) -> list[dict]:
        folder = tmp_path_factory.mktemp(f"{Path(script).stem}-{ranks}")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=1"]
        command += ["--master-addr=127.0.0.1", f"--master-port={_free_port()}", str(WORKERS / script), str(folder)]
        launcher = subprocess.Popen(
            command,
            env=_environment(**environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            stdout, stderr = launcher.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # The launcher ends its ranks when it is asked to end; killed, it would leave them behind.
            launcher.terminate()
            stdout, stderr = launcher.communicate(timeout=60)
            pytest.fail(f"{script} on {ranks} ranks hung\n{stdout}\n{stderr}")
        assert 0 == launcher.returncode, f"{stdout}\n{stderr}"
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        results[0]["stdout"] = stdout
        results[0]["stderr"] = stderr
        return results

    return run


@pytest.fixture
def processes(tmp_path):
    """Start a worker script as so many ranks, each a process of its own that may be killed."""
    started: list[subprocess.Popen] = []

    def start(script: str, ranks: int, *arguments: str) -> list[subprocess.Popen]:
        port = _free_port()
        for rank in range(ranks):
            environment = _environment(
                RANK=str(rank),
                WORLD_SIZE=str(ranks),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            started.append(
                subprocess.Popen(
                    [sys.executable, str(WORKERS / script), str(tmp_path), *arguments],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        return started

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def free_port() -> int:
    """A port that nobody listens on."""
    return _free_port()


@pytest.fixture(scope="module")
def world():
    """A gloo world of one, for the tests of a file."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def clean():
    """Nothing recorded, configured, said or in force, before and after."""
    from deep500_timing._ground.warn import forget_warnings
    from deep500_timing_torch import comm
    from deep500_timing_torch.comm import _instrument

    forget_warnings()
    comm.reset_log()
    yield
    comm.configure(enabled=True, prof_all=True, prof_ops=[], verbose=False, debug=False, timer=None)
    comm.reset_log()
    assert 0 == _instrument.IN_FORCE.objects
    assert _instrument.IN_FORCE.feed is None


@pytest.fixture(scope="session")
def kernel() -> str:
    """The kernel's library, built once for the tree; the test is skipped where nothing can build it."""
    pytest.importorskip("torch")
    from deep500_timing_torch.comm._kernel import _build

    lacks = _build.why_not_buildable()
    if lacks is not None:
        pytest.skip(f"the compiled kernel cannot be built: {lacks}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SWITCH, "on")
        _build.build(limit_s=240)
        return str(_build.library_path())
