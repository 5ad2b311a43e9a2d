"""What runs the files of ``cases``: a their own process, as Keras's backend is chosen once."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import suite_coverage
import suite_ranks

CASES = Path(__file__).parent / "cases"
PYTEST = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.fixture
def assert_cases_pass(tmp_path, forks):
    """Run every case of some files on a backend; skip where a package is not there."""

    def run(cases, backend, package):
        for needed in ("keras", package):
            if importlib.util.find_spec(needed) is None:
                pytest.skip(f"needs {needed}")
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        environment.update(suite_coverage.of_a_child())
        environment["KERAS_MODULE"] = "tf_keras" if package == "tf_keras" else "keras"
        environment.pop("TF_USE_LEGACY_KERAS", None)
        if backend == "jax":
            # Most cases fit the same model, which so is compiled by XLA once; each train function still compiles.
            environment["JAX_COMPILATION_CACHE_DIR"] = str(tmp_path)
            environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
            environment["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
        # The files of cases take their shared parts from one another.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CASES), environment.get("PYTHONPATH")]))
        files = [str(CASES / case) for case in cases.split()]
        command = ["-c", PYTEST, *files, "-q", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:randomly"]
        log = tmp_path / "log"
        start = {"tensorflow": forks.start_tensorflow, "torch": forks.start}.get(backend, suite_ranks.interpreter)
        assert 0 == start(command, environment, log).wait(700), log.read_text()

    return run
