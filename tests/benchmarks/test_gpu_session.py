"""``make gpu-session`` where there is no GPU, and what its page looks like where there is one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as session
from benchmarks.gpu import _sections

pytestmark = [pytest.mark.slow, pytest.mark.matrix]

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
        timeout=300,
        check=False,
    )
    cupy, drift, last = done.stdout.splitlines()
    assert (0, False) == (done.returncode, page.exists())
    assert cupy.startswith("cupy ")
    assert "needs" in cupy
    assert "4 row(s)" in drift
    assert "nothing is written" in last


INJECTED = """
import os, subprocess, sys
from pathlib import Path
from benchmarks.gpu import __main__ as session, _sections
def dies():
    yield ["a"]
    yield [0]
    os._exit(3)
def hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(sys.argv[0] + ".child").write_text(str(child.pid))
    yield ["a"]
    child.wait()
def works():
    yield ["a"]
    yield [1]
_sections.ALL = {
    "dies": _sections.Section("Dies", dies, process="main"),
    "hangs": _sections.Section("Hangs", hangs, limit_s=3, process="main"),
    "works": _sections.Section("Works", works, process="main"),
    "raises": _sections.Section("Raises", lambda: 1 / 0, process="main"),
}
start = subprocess.Popen
def start_this(command, **settings):
    # The process of a section has to know these sections too.
    return start([command[0], sys.argv[0], *command[3:]] if "--inside" in command else command, **settings)
session.subprocess.Popen = start_this
sys.exit(session.main())
"""


def has_ended(pid):
    """Whether a process ends. A pidfd sees the end of a process that its parent has not reaped."""
    if not hasattr(os, "pidfd_open"):
        pytest.skip("the end of a process that is no child is seen on Linux alone")
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], 30.0)[0])
    finally:
        os.close(watched)


def test_sections_that_die_or_hang_cost_themselves(tmp_path):
    """Each gets a line with its reason, its child processes are ended, and the other sections run."""
    program, page, child = tmp_path / "injected.py", tmp_path / "GPU.md", tmp_path / "injected.py.child"
    program.write_text(INJECTED)
    done = subprocess.run(
        [sys.executable, str(program), "--page", str(page)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'adapters'}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = [line.split(" s  ")[1] for line in done.stdout.splitlines()[:4]]
    assert [
        "ended with 3: it said nothing", "stopped after 3 s", "1 row(s)", "ZeroDivisionError: division by zero",
    ] == said, done.stderr  # fmt: skip
    text = page.read_text()
    assert 0 == done.returncode
    assert "## Dies\n\n| a |\n|---|\n| 0 |\n\nNot complete: ended with 3" in text
    assert "## Works\n\n| a |\n|---|\n| 1 |" in text
    if child.exists():  # A machine may be too busy to come that far within the limit.
        assert has_ended(int(child.read_text()))


def test_the_compiled_packages_come_before_the_tree(tmp_path, monkeypatch):
    """Sections run in the tree and import the packages of ``make gpu-site``, if they are for this Python."""
    package = tmp_path / "deep500_timing"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(session, "SITE", tmp_path)
    origins = []
    for built in (f"timer.{sys.implementation.cache_tag}-linux.so", "timer.cpython-30-linux.so"):
        (package / built).touch()
        environment = {**os.environ, **session._environment("cost")}
        command = [sys.executable, "-c", "import deep500_timing as d, benchmarks.gpu; print(d.__file__)"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        origins.append(Path(done.stdout.strip()).parents[1])
        (package / built).unlink()
    assert [tmp_path, ROOT] == origins


def test_the_session_ends_in_time(tmp_path, capsys):
    """What does not begin within ``--limit-s`` is a line that says so."""
    found = session.Session(tmp_path / "GPU.md", 0.0)
    found.run(["captures", "calls"])
    assert 2 == capsys.readouterr().out.count("not started: the session has used 0 s")
    assert not found.write()


def test_the_limits_leave_time_for_every_section():
    """The session ends within eight minutes in any case."""
    assert session.LIMIT_S <= 480
    assert max(section.limit_s for section in _sections.ALL.values()) < session.LIMIT_S


def test_the_page():
    """Each section has its heading and its table, or the reason for having none or a part."""
    found = {
        "drift": {"columns": ["a", "b"], "rows": [[1, 2.34567], [None, "x|y"]], "failed": "ended with 1"},
        "cost": {"skipped": "needs a CUDA device"},
        "gil": {"failed": "stopped after 60 s"},
    }
    text = session.page(found)
    assert "| a | b |\n|---|---|\n| 1 | 2.35 |\n| – | x\\|y |\n\nNot complete: ended with 1\n" in text
    assert "## Cost of a pair\n\nNot measured: needs a CUDA device\n" in text
    assert text.endswith("Not measured: stopped after 60 s\n")


def test_drift_is_within_what_is_stated():
    """Ten minutes with a drift of up to 40 ppm: no place is off by more than 100 µs plus the stated uncertainty."""
    columns, *rows = _sections.drift()
    assert (3, [0, 5, 20, 40]) == (len(columns), [row[0] for row in rows])
    assert 0 == rows[0][1]
    assert all(error <= 100 + stated for _, error, stated in rows)


@pytest.mark.parametrize("name", sorted(_sections.ALL))
def test_every_section_has_a_heading(name):
    """A heading, and a limit that lets the whole stay under its eight minutes in the good case."""
    assert _sections.ALL[name].title
    assert 0 < _sections.ALL[name].limit_s <= 320
