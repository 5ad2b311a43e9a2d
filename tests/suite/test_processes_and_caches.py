"""A run leaves nothing running and nothing locked, however its tests or the run itself end."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import suite_caches

SUPPORT = Path(__file__).parents[1] / "support"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

# Starts a child that starts a grandchild in its own session; both wait for ever.
FAMILY = """
import subprocess, sys
grandchild = "import time; time.sleep(1000)"
child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}], start_new_session=True)"

def family(path):
    process = subprocess.Popen([sys.executable, "-c", child])
    path.write_text("started")
    return process
"""


@pytest.fixture
def project(tmp_path):
    """A project with our plug-in and this one file of tests; runs it as its own run, with a mark to look for."""
    shutil.copytree(SUPPORT, tmp_path / "tests" / "support", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "tests" / "conftest.py").write_text('pytest_plugins = ["suite_plugin"]\n', encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = tests/support\n", encoding="utf-8")

    def start(tests: str) -> subprocess.Popen[str]:
        (tmp_path / "tests" / "test_it.py").write_text(FAMILY + tests, encoding="utf-8")
        environment = {**os.environ, "PROJECT": str(tmp_path)}
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
            environment.pop(name, None)
        options = ["-p", "no:randomly", "-p", "no:cacheprovider", "-p", "no:cov", "-p", "no:xdist", "-q"]
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, "tests"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return start


def test_children_die_with_a_test_that_fails(project, tmp_path):
    """A failing test's processes are gone before the next test runs, grandchildren included."""
    run = project("""
import os
import suite_plugin

def test_fails(tmp_path):
    family(tmp_path / "started")
    raise ValueError("as intended")

def test_next():
    assert {} == suite_plugin._descendants()
""")
    output, _ = run.communicate(timeout=300)
    assert "ValueError: as intended" in output
    assert "1 failed, 1 passed" in output


def test_a_test_that_leaves_a_child_fails(project):
    """A test that passes and leaves a process running fails, with the command."""
    run = project("""
import suite_plugin
suite_plugin.GRACE_S = 0.2

def test_leaves(tmp_path):
    global kept
    kept = family(tmp_path / "started")
""")
    output, _ = run.communicate(timeout=300)
    assert "the test left these running: " in output
    assert "import time; time.sleep(1000)" in output
    assert "1 failed" in output


def test_a_child_that_ends_by_itself_is_no_fault(project):
    """A test that waits for its processes passes, and so does one with a child that ends a moment later."""
    run = project("""
def test_waits():
    subprocess.run([sys.executable, "-c", ""])

def test_ends_soon():
    global kept
    kept = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"])
""")
    output, _ = run.communicate(timeout=300)
    assert "2 passed" in output


def test_a_run_in_the_background_hears_ctrl_c(project):
    """A run that a shell has started in the background, deaf to Ctrl-C, gives its tests' programs their ears back."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run = project("""
import signal

def test_hears():
    program = "import signal; signal.raise_signal(signal.SIGINT)"
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE)
    assert b"KeyboardInterrupt" in done.stderr
""")
    finally:
        signal.signal(signal.SIGINT, before)
    output, _ = run.communicate(timeout=300)
    assert "1 passed" in output


def test_a_killed_build_does_not_spoil_the_next_run(project, tmp_path):
    """PyTorch's lock file of a build that was killed is gone when the next run's first test begins."""
    lock = tmp_path / "build" / "caches" / "torch_extensions" / "py311_cpu" / "operator" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    run = project("""
import os, pathlib

def test_there_is_no_lock():
    folder = pathlib.Path(os.environ["TORCH_EXTENSIONS_DIR"])
    assert [folder / "py311_cpu" / "operator"] == list(folder.glob("*/*"))
    assert [] == list(folder.glob("*/*/lock"))
""")
    output, _ = run.communicate(timeout=300)
    assert "1 passed" in output


def test_a_build_of_another_run_keeps_its_lock(tmp_path, monkeypatch):
    """While another run of the same tree is on, its lock files are not touched; once it has ended, they are."""
    for variable in suite_caches.FOLDERS:
        monkeypatch.setenv(variable, "")
    lock = tmp_path / "torch_extensions" / "py311_cpu" / "operator" / "lock"
    with suite_caches.use(tmp_path) as first:
        fcntl.flock(first, fcntl.LOCK_SH | fcntl.LOCK_NB)
        lock.parent.mkdir(parents=True)
        lock.touch()
        with suite_caches.use(tmp_path):
            assert lock.exists()
    with suite_caches.use(tmp_path):
        assert not lock.exists()
    assert str(tmp_path / "torch_extensions") == os.environ["TORCH_EXTENSIONS_DIR"]
