"""The pytest plugin in a fresh project, by pytest itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

TEST = """
import pytest
from work import SECONDS
from deep500_timing.testing import ManualClock
from deep500_timing import Timer

CLOCK = ManualClock()

@pytest.fixture
def deep500_timing():
    timer = Timer(clock=CLOCK)
    yield timer
    if timer.run is not None:
        timer.run.flush()

@pytest.mark.deep500_timing(runs=3, rev="HEAD", fail_on=0.03)
def test_training(deep500_timing):
    with deep500_timing.region("BATCH"):
        CLOCK.advance(SECONDS)
"""

PLAIN = """
def test_plain(deep500_timing):
    with deep500_timing.region("FORWARD"):
        pass
    assert len(deep500_timing.get_time("FORWARD")) == 1
"""


@pytest.fixture
def project(tmp_path):
    """A repository with one timed test, and a change that makes it slower."""
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "test_plain.py").write_text(PLAIN)
    (tmp_path / "work.py").write_text("SECONDS = 0.01\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    for words in (["init", "-q"], ["add", "test_it.py", "work.py", "pytest.ini"], ["commit", "-qm", "one"]):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)
    (tmp_path / "work.py").write_text("SECONDS = 0.02\n")
    return tmp_path


def run_pytest(folder, *words):
    """The exit status and the output of pytest in a folder."""
    plugin = ["-p", "deep500_timing.pytest_plugin"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "DEEP500"))}
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "XDG_STATE_HOME": str(folder / "state")}
    environment["PYTEST_PLUGINS"] = plugin[1]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_marked_test_is_compared_with_a_revision(project):
    """The slowdown is said; a machine that is not qualified fails nothing."""
    status, said = run_pytest(project, "--deep500-timing")
    assert "B is slower: +100.0 %" in said
    assert "not qualified" in said
    assert status == 0, said


def test_without_the_option_it_is_a_test(project):
    """The test runs once, in this process."""
    status, said = run_pytest(project)
    assert status == 0, said
    assert "slower" not in said
