"""Every example runs as a user would run it, in its own process, and shows the promised result.

The demo and those without a framework are run by their own interpreters; the others by forks that find PyTorch or
TensorFlow imported.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

EXAMPLES = Path(__file__).parents[2] / "examples"

CASES = {
    # file: (arguments, modules that it needs, words that its output must hold)
    "numpy_only.py": ([], [], ["EPOCH", "BATCH", "FORWARD", "BACKWARD", "IO", "warm-up", "median"]),
    "custom_regions.py": ([], [], ["count", "read", "tokenise", "failed", "line 1234 is left out"]),
    "pytorch_loop.py": (["--epochs", "1"], ["torch", "sklearn"], ["EPOCH", "BATCH", "FORWARD", "BACKWARD", "IO"]),
    "jax_loop.py": ([], ["jax"], ["EPOCH", "BATCH", "dispatch", "10 steps", "compile", "'train_step': 2"]),
    "jax_sharded_loop.py": (
        [],
        ["jax"],
        ["step 100: loss", "VALIDATION", "CHECKPOINT", "logging", "by the median of 9 times", "'train_step': 1"],
    ),
    "layers.py": ([], ["torch", "sklearn", "vl_convert"], ["6 × Block", "GFLOP/s", "◀", "trace.json", "plot.png"]),
    "pipeline.py": ([], ["torch", "sklearn", "vl_convert"], ["steps: 30 loss:", "1F1B of 2 ranks", "pipeline.png"]),
    "keras_callback.py": (["--epochs", "1"], ["keras", "tensorflow", "sklearn"], ["EPOCH", "BATCH", "IO"]),
    "mlflow_and_wandb.py": (
        ["--output", "tracked"],
        ["mlflow", "wandb"],
        ["train/CPU/BATCH.p95 =", "train/CPU/EPOCH ="],
    ),
    "tensorflow_workers.py": ([], ["tensorflow"], ["train of 2 workers, the median of each"]),
    "demo.py": (
        ["--epochs", "1", "--output", "out"],
        ["torch", "keras", "tensorflow", "sklearn", "mlflow", "wandb", "rich", "click", "duckdb", "vl_convert"],
        ["optimizer", "FORWARD", "times.jsonl", "mlflow ui", "wandb sync", "over the run", "run-keras.html"],
    ),
}


FORKED: dict[str, tuple[str, ...]] = {"PyTorch": ("pytorch_loop.py", "layers.py", "pipeline.py")}
FORKED["TensorFlow"] = ("keras_callback.py", "tensorflow_workers.py")
STARTS_ITSELF = """
import os, runpy, subprocess, sys

class Fork:
    def __init__(self, command, env):
        interpreter, script = command
        assert interpreter == sys.executable
        self.pid = os.fork()
        if not self.pid:
            os.environ.clear()
            os.environ.update(env)
            runpy.run_path(script, run_name="__main__")
            sys.exit()

    def wait(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

subprocess.Popen = Fork
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""Runs an example that starts interpreters with itself, and makes forks of them."""


@pytest.fixture
def run(forks, tmp_path, monkeypatch):
    """Run a script in an empty folder, away from the tree, with nothing of this process but its environment.

    Hands back its exit status, its output, and its error output.
    """
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "WANDB_MODE": "offline", "COLUMNS": "160"}

    def run_fork(name: str, command: list[str], folder: Path) -> tuple[int, str, str]:
        output = folder / "output"
        if name == "tensorflow_workers.py":
            command = ["-c", STARTS_ITSELF, *command]
        start = forks.start_tensorflow if name in FORKED["TensorFlow"] else forks.start
        program = start(command, environment, output)
        try:
            status = program.wait(300)
        finally:
            program.kill()
        printed = output.read_text(encoding="utf-8")
        return status, printed, printed

    def run_interpreter(command: list[str]) -> tuple[int, str, str]:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
        return done.returncode, done.stdout, done.stderr

    def start(name: str, arguments: list[str], folder: Path) -> tuple[int, str, str]:
        command = [str(EXAMPLES / name), *arguments]
        if any(name in those for those in FORKED.values()):
            return run_fork(name, command, folder)
        return run_interpreter([sys.executable, *command])

    return start


@pytest.mark.parametrize("name", CASES)
def test_example_runs(name: str, run, request, tmp_path: Path, tmp_path_factory) -> None:
    """An example exits with 0 and prints the regions that it times."""
    arguments, needs, words = CASES[name]
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    if name == "mlflow_and_wandb.py":
        # As at its second run; the demo makes its own.
        (tmp_path / "tracked").mkdir()
        shutil.copy(request.getfixturevalue("mlflow_database"), tmp_path / "tracked" / "mlflow.db")
    status, printed, errors = run(name, arguments, tmp_path_factory.mktemp("said"))
    assert status == 0, errors[-4000:]
    assert [] == [word for word in words if word not in printed], printed


def test_every_example_is_run() -> None:
    """No example is left out of the tests, here or in the its subject's tests."""
    tests = Path(__file__).parents[1]
    tested = "\n".join(path.read_text(encoding="utf-8") for path in tests.rglob("test_*.py"))
    examples = {path.stem: path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py")}
    shared = {name for name in examples if any(f"\nimport {name}\n" in text for text in examples.values())}
    assert [] == [name for name in sorted(examples.keys() - shared) if f"{name}.py" not in tested]
