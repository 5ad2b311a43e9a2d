"""Shared by the core's tests: clocks that stand still, their own interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deep500_timing import Timer


@pytest.fixture
def tmr(clock):
    """A timer on that clock."""
    return Timer(clock=clock)


@pytest.fixture
def python(tmp_path):
    """Run a program in its own interpreter, outside the tree, in the form under test; it must end well."""

    def run(program, *, expect=0, **variables):
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert (expect, "") == (done.returncode, done.stderr), done.stdout
        return done.stdout

    return run
