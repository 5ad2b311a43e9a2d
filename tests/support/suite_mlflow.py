"""An MLflow database with its tables, made once per MLflow version, since that takes seconds."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import suite_plugin

if TYPE_CHECKING:
    from pathlib import Path

# For tests and what they start: else a thread of MLflow's sets a variable of the environment, whenever it likes.
os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
_MAKE = "import sys, mlflow; mlflow.MlflowClient(tracking_uri=sys.argv[1]).search_experiments()"


@pytest.fixture(scope="session")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs, to be copied."""
    folder = suite_plugin.ROOT / "build" / "caches" / "mlflow"
    kept = folder / f"{importlib.metadata.version('mlflow')}.db"
    if not kept.exists():
        made = tmp_path_factory.mktemp("mlflow-empty") / "mlflow.db"
        command = [sys.executable, "-c", _MAKE, f"sqlite:///{made}"]
        subprocess.run(command, cwd=made.parent, check=True, timeout=120)
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{os.getpid()}.part"
        part.write_bytes(made.read_bytes())
        part.replace(kept)
    return kept
