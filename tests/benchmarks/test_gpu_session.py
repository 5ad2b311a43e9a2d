"""``make gpu-session`` where there is no GPU, and what its page looks like where there is one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as session
from benchmarks.gpu import _sections

ROOT = Path(__file__).parents[2]


def test_without_a_gpu_it_says_so_and_ends_well(tmp_path):
    """A section that needs a GPU says why it did not run, others run; nothing is written, and the exit status is 0."""
    page = tmp_path / "GPU.md"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "cupy", "drift", "--page", str(page)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    cupy, drift, last = done.stdout.splitlines()
    assert (0, False) == (done.returncode, page.exists())
    assert cupy.startswith("cupy ")
    assert "needs" in cupy
    assert "4 row(s)" in drift
    assert "nothing is written" in last


def test_a_section_that_dies_costs_itself():
    """A process that ends badly, or not in time, is a line with the reason."""
    assert "ended with 1: KeyError: 'no such section'" == session.run("no such section", 60)["failed"]
    assert "not done within 0.01 s" == session.run("drift", 0.01)["failed"]


def test_the_page():
    """Each section has its heading and its table, or the reason for having none."""
    found = {
        "drift": {"columns": ["a", "b"], "rows": [[1, 2.34567], [None, "x|y"]], "note": "its process ended with 1"},
        "cost": {"skipped": "needs a CUDA device"},
        "gil": {"failed": "not done within 60 s"},
    }
    text = session.page(found)
    assert "| a | b |\n|---|---|\n| 1 | 2.35 |\n| – | x\\|y |\n\nits process ended with 1\n" in text
    assert "## Cost of a pair\n\nNot measured: needs a CUDA device\n" in text
    assert text.endswith("Not measured: not done within 60 s\n")


def test_drift_is_within_what_is_stated():
    """Ten minutes of two clocks that part by up to 40 ppm: no place is off by more than 100 µs and what is stated."""
    columns, rows = _sections.drift()
    assert (3, [0, 5, 20, 40]) == (len(columns), [row[0] for row in rows])
    assert 0 == rows[0][1]
    assert all(error <= 100 + stated for _, error, stated in rows)


@pytest.mark.parametrize("name", sorted(_sections.ALL))
def test_every_section_has_a_heading(name):
    """A heading, and a limit that lets the whole stay under its eight minutes in the good case."""
    assert _sections.ALL[name].title
    assert 0 < _sections.ALL[name].limit_s <= 240
