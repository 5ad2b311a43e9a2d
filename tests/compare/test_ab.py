"""``deep500-timing ab`` on tiny projects: two commands, two revisions, two versions of a package, the noise floor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deep500_timing._command._app import main
from deep500_timing.compare._ab import split_commands

pytestmark = pytest.mark.slow

PROGRAM = """
import sys
from deep500_timing import Timer
from deep500_timing.testing import ManualClock
from package import SECONDS

clock = ManualClock()
tmr = Timer(clock=clock)
for step in range(40):
    with tmr.region("BATCH"):
        with tmr.region("FORWARD"):
            clock.advance(SECONDS * float((sys.argv + ["1"])[1]))
        with tmr.region("BACKWARD"):
            clock.advance(0.01)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A program with a package that says how long FORWARD takes; it runs in its folder."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "package.py").write_text("SECONDS = 0.01\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def git(*words):
    """Run git with its own name."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *words], check=True, capture_output=True)


def ab(capsys, *words, status=0):
    """The result of the command, as data."""
    assert status == main(["ab", "--json", *words])
    return json.loads(capsys.readouterr().out)


def test_a_slower_command_is_known_after_three_pairs(project, capsys):
    """FORWARD takes twice as long: it is named, and five pairs are not needed."""
    found = ab(capsys, "--", sys.executable, "train.py", "---", sys.executable, "train.py", "2", "--twice")
    assert (found["slower"], found["pairs"], found["explains"]["path"]) == (True, 3, "BATCH/FORWARD")
    assert found["step"]["change"] == pytest.approx(0.5)
    assert ["arguments", "(none)", "2 --twice"] in found["differences"]


def test_what_is_not_installed_is_said_before_the_first_run(project, capsys, monkeypatch):
    """Without SciPy nothing is run."""
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    assert main(["ab", "--run", "here", "--", sys.executable, "train.py", "---", sys.executable, "train.py", "2"]) == 1
    assert "pip install 'deep500-timing[compare]'" in capsys.readouterr().err
    assert not (project / "here").exists()


def test_a_revision_is_run_in_a_worktree(project, capsys):
    """The commit before against the working tree; the worktree is gone afterwards."""
    git("init", "-q")
    git("add", "train.py", "package.py")
    git("commit", "-qm", "fast")
    (project / "package.py").write_text("SECONDS = 0.03\n")
    found = ab(capsys, "-n", "3", "--rev", "HEAD", "--", sys.executable, "train.py")
    assert found["step"]["change"] == pytest.approx(1.0)
    listed = subprocess.run(["git", "worktree", "list"], capture_output=True, text=True, check=True).stdout
    assert len(listed.splitlines()) == 1


def test_an_unknown_revision_is_said(project, capsys):
    """Outside a repository, and with a revision that is none."""
    assert main(["ab", "--rev", "nowhere", "--", sys.executable, "train.py"]) == 1
    assert "--rev nowhere" in capsys.readouterr().err


def test_two_versions_of_a_package_are_run(project, capsys, monkeypatch, write_wheel):
    """Each version is installed in front of the environment; the program imports it."""
    (project / "package.py").unlink()
    for version, seconds in (("1.0", 0.01), ("2.0", 0.02)):
        write_wheel(project, version, f"SECONDS = {seconds}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(project))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    versions = ["--with", "package==1.0", "--with", "package==2.0"]
    found = ab(capsys, "-n", "3", *versions, "--", sys.executable, "train.py")
    assert found["step"]["change"] == pytest.approx(0.5)


def test_a_machine_is_qualified_before_its_gate_fails(project, capsys):
    """The gate has no verdict, then `--same` stores the floor, then the gate fails with 1."""
    slow = ["-n", "3", "--fail-on", "3%", "--", sys.executable, "train.py", "---", sys.executable, "train.py", "2"]
    assert "not qualified" in ab(capsys, "--run", "one", *slow)["gate"]["text"]
    assert main(["ab", "--run", "two", "--same", "-n", "3", "--", sys.executable, "train.py"]) == 0
    assert "This machine finds" in capsys.readouterr().out
    assert "FAILED" in ab(capsys, "--run", "three", *slow, status=3)["gate"]["text"]
    assert main(["compare", "three"]) == 0
    assert "B is slower: +50.0 %" in capsys.readouterr().out


def test_a_command_that_fails_shows_its_end(project, capsys):
    """Exit status 1, with the last lines of the output and its file."""
    bad = "import sys; sys.exit('no data')"
    assert main(["ab", "--", sys.executable, "-c", bad, "---", sys.executable, "train.py"]) == 1
    err = capsys.readouterr().err
    assert "no data" in err
    assert "A-0.log" in err


def test_a_program_that_times_nothing_is_told_how(project, capsys):
    """No run: the remedy is a Timer."""
    assert main(["ab", "--same", "--", sys.executable, "-c", "pass"]) == 1
    assert "requires a Timer" in capsys.readouterr().err


def test_commands_are_split(project, capsys):
    """Three dashes stand between the sides; other uses are wrong."""
    assert split_commands(["a", "-x", "---", "b"]) == (("a", "-x"), ("b",))
    assert split_commands(["a"]) == (("a",), ("a",))
    for words in ([], ["a", "---"], ["a", "---", "b", "---", "c"]):
        with pytest.raises(ValueError, match="Name one command"):
            split_commands(words)
    assert main(["ab", "--", "a"]) == 2
    assert "--same" in capsys.readouterr().err


def test_different_sessions_exit_with_1(write_run, capsys):
    """That the gate failed is never said of runs that cannot be compared."""
    for day in range(2):
        for number in range(3):
            write_run(f"day{day}/{number}", minute=10_000 * day + number, forward=0.02 + day)
    base = Path(write_run("day0/4", minute=4)).parents[1]
    assert main(["compare", f"{base}/day0", f"{base}/day1", "--fail-on", "3%"]) == 1
    assert "not comparable: different sessions" in capsys.readouterr().out
