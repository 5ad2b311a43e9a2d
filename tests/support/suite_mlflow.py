"""A database for MLflow to track to, whose tables are there: to make them takes seconds, most of them of the disk."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import suite_lanes

if TYPE_CHECKING:
    from pathlib import Path

_MAKE = "import sys, mlflow; mlflow.MlflowClient(tracking_uri=sys.argv[1]).search_experiments()"


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs, to be copied: MLflow makes it once for each of its versions, in the tree's caches."""
    folder = suite_lanes.TESTS.parent / "build" / "caches" / "mlflow"
    kept = folder / f"{importlib.metadata.version('mlflow')}.db"
    if not kept.exists():
        made = tmp_path_factory.mktemp("mlflow-empty") / "mlflow.db"
        environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-c", _MAKE, f"sqlite:///{made}"]
        subprocess.run(command, cwd=made.parent, env=environment, check=True, timeout=120)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{os.getpid()}.part"
        part.write_bytes(made.read_bytes())
        part.replace(kept)
    return kept
