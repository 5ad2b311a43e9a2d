"""The originals' own tests, run against ours: ``make test-peers``, and nowhere else, since they take minutes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ASKED = "DEEP500_TIMING_TEST_ORIGINALS"
SOURCES = "DEEPSPEED_SOURCE"
pytestmark = [pytest.mark.skipif(not os.environ.get(ASKED), reason="`make test-peers` runs it"), pytest.mark.slow]


def test_deepspeed_s_own_tests_of_its_logger_and_timers():
    """They pass with our ``CommsLogger`` and our timers in the modules that they import."""
    pytest.importorskip("deepspeed", exc_type=ImportError)
    source = os.environ.get(SOURCES)
    if not source:
        pytest.skip(f"DeepSpeed's tests are in its sources alone: {SOURCES} names no folder of them")
    tests = Path(source) / "tests" / "unit" / "comm" / "test_comms_logger.py"
    assert tests.exists(), f"{SOURCES}={source} has no {tests.relative_to(source)}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "deepspeed_on_ours", "-p", "no:cacheprovider", "-p"]
    command += ["no:randomly", "--noconftest", "-c", os.devnull, "--rootdir", str(tests.parent), str(tests)]
    paths = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": paths, "DS_ACCELERATOR": "cpu", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    assert " passed" in done.stdout


def _outcomes(folder, mode, ranks=2):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--nnodes=1"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", str(PROGRAMS / "torch_originals.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    launcher = subprocess.Popen(
        [*command, str(folder), mode], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = launcher.communicate(timeout=300)
    except subprocess.TimeoutExpired:
        launcher.terminate()  # the launcher ends its ranks when it is asked to end
        output, _ = launcher.communicate(timeout=300)
        pytest.fail(f"PyTorch's tests on {ranks} ranks hung\n{output}")
    assert 0 == launcher.returncode, output
    return [json.loads((folder / f"{mode}-{rank}.json").read_text()) for rank in range(ranks)]


def test_pytorch_s_own_tests_of_its_operations(tmp_path):
    """On two ranks each has the same outcome with ``instrument()`` as without, and nothing is left under way."""
    pytest.importorskip("torch")
    pytest.importorskip("expecttest", reason="PyTorch's tests import it")
    plain, timed = _outcomes(tmp_path, "plain"), _outcomes(tmp_path, "timed")
    for without, within in zip(plain, timed, strict=True):
        assert without["outcomes"] == within["outcomes"]
        passed = [name for name, outcome in within["outcomes"].items() if outcome == "passed"]
        assert len(passed) >= 30
        assert (0, 0) == (without["operations"], within["pending"])
        assert within["operations"] >= len(passed)
