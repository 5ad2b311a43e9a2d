"""``deep500-timing bisect``: the walk over an oracle that lies at a known rate, and over a real repository."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import suite_ranks

pytest.importorskip("scipy", reason="tests differences")
pytest.importorskip("duckdb", reason="reads runs")
from deep500_timing.compare import _bisect
from deep500_timing.compare._ab import CommandFailedError
from deep500_timing.compare._bisect import versions, walk

POINTS = [f"commit {number}" for number in range(64)]


def oracle(seed, slow_from, change=0.10, noise=0.01, broken=()):
    """Pairs of runs that differ by some noise each; from a point on, a step is longer."""
    chance = random.Random(seed)

    def measure(point, pair):
        number = POINTS.index(point)
        if number in broken:
            raise CommandFailedError("It does not build.")
        effect = math.log1p(change) if number >= slow_from else 0.0
        return effect + chance.gauss(0, noise) - chance.gauss(0, noise)

    return measure


def test_the_first_slow_commit_is_found():
    """10 % at the 37th of 64, and runs that differ by 1 %: right in 95 of 100 walks or more."""
    found = [walk(POINTS, oracle(seed, 37), 5) for seed in range(100)]
    assert sum((one.first_slow, one.last_fast) == ("commit 37", "commit 36") for one in found) >= 95
    assert all(len(one.seen) <= 6 for one in found)


@pytest.mark.parametrize("slow_from", [1, 63])
def test_the_ends_of_the_walk(slow_from):
    """The first commit after the good one, and the last one."""
    assert POINTS[slow_from] == walk(POINTS, oracle(1, slow_from), 5).first_slow


def test_equal_ends():
    """No difference is shown in 95 of 100 or more, and then nothing is walked."""
    found = [walk(POINTS, oracle(seed, 64), 5) for seed in range(200)]
    assert sum(one.change is None and not one.seen for one in found) >= 190


def test_a_faster_end_is_no_slow_one():
    """There is nothing to find."""
    assert walk(POINTS, oracle(1, 37, change=-0.10), 5).change is None


def test_commits_that_cannot_be_run_are_skipped():
    """The walk goes around them; those beside the answer may be it as well, and are told."""
    found = walk(POINTS, oracle(1, 37, broken=(31, 36)), 5)
    assert ("commit 37", "commit 35", ("commit 36",)) == (found.first_slow, found.last_fast, found.between)
    assert "skipped" == dict(found.seen)["commit 31"]


def test_an_end_that_cannot_be_run():
    """There is no answer."""
    with pytest.raises(CommandFailedError, match="does not build"):
        walk(POINTS, oracle(1, 37, broken=(63,)), 5)


LISTED = "package (1.10)\nAvailable versions: 1.10, 1.2.0, 1.1, 1.0\n  INSTALLED: 1.1"


@pytest.mark.parametrize(
    ("good", "bad", "found"),
    [
        ("package==1.0", "package==1.2", ["1.0", "1.1", "1.2.0"]),
        ("package==1", "package==1.10", ["1.0", "1.1", "1.2.0", "1.10"]),
        ("package==1.1", "package==1.2.0", ["1.1", "1.2.0"]),
    ],
)
def test_versions_in_the_order_of_pip(good, bad, found, monkeypatch):
    """Between both ends; 1.10 comes after 1.2, and 1.2 is 1.2.0."""
    monkeypatch.setattr(_bisect, "_run", lambda command, what: LISTED)
    assert [f"package=={version}" for version in found] == versions(good, bad)


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ("package==1.0", "package==3", "from old to new: 1.0, 1.1, 1.2.0, 1.10"),
        ("package==1.2", "package==1.1", "from old to new: 1.0, 1.1, 1.2.0, 1.10"),
        ("package==1.0", "other==1.1", "two versions of one package"),
        ("package==1.0", "HEAD", "two versions of one package"),
    ],
)
def test_versions_that_are_no_two_ends(good, bad, said, monkeypatch):
    """The error has what the index has."""
    monkeypatch.setattr(_bisect, "_run", lambda command, what: LISTED)
    with pytest.raises(CommandFailedError, match=said):
        versions(good, bad)


PROGRAM = """
from deep500_timing import TimeType, Timer
timer = Timer()
at = timer.now_ns() - 40 * {0}
for step in range(40):
    timer.record(TimeType.BATCH, at, at + {0})
    at += {0}
"""


def commit(folder, *programs):
    """Make a repository with a commit for each program."""

    def git(*words):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *words], cwd=folder, check=True)

    git("init", "-q")
    for number, program in enumerate(programs):
        (folder / "train.py").write_text(f"# {number}{program}")
        git("add", "train.py")
        git("commit", "-qm", f"number {number}")


@pytest.mark.slow
@pytest.mark.one_form
def test_the_output_of_a_program_that_fails_is_kept(tmp_path):
    """The error names the file."""
    commit(tmp_path, *2 * ["\nraise SystemExit(4)"])
    done = suite_ranks.command(tmp_path, "bisect", "--good", "HEAD~1", "--", sys.executable, "train.py")
    assert 1 == done.returncode
    log = Path(re.search(r"exit status 4. Its output is in (\S+\.log)", done.stderr)[1])
    assert log.exists()
    shutil.rmtree(log.parent)


@pytest.mark.slow
@pytest.mark.one_form
def test_a_real_repository(tmp_path):
    """Six commits, from the fourth on with steps that are 10 % longer; the working tree stays as it is."""
    commit(tmp_path, *3 * [PROGRAM.format(1000000)], *3 * [PROGRAM.format(1100000)])
    words = ("bisect", "--good", "HEAD~5", "-n", "3", "--json", "--", sys.executable, "train.py")
    done = suite_ranks.command(tmp_path, *words)
    assert 0 == done.returncode, done.stderr
    log = subprocess.run(["git", "log", "--format=%H"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert log.stdout.split()[2] == json.loads(done.stdout)["first_slow"]
    assert [".git", "train.py"] == sorted(one.name for one in tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.one_form
def test_versions_of_a_package(tmp_path, monkeypatch, write_wheel):
    """Of a made index without a network; one that cannot be imported is skipped, and one before a release left out."""
    index = tmp_path / "index"
    index.mkdir()
    for version, text in {
        "1.0": "1000000",
        "1.1": "broken",
        "1.2.0": "1100000",
        "1.10": "1100000",
        "1.3rc1": "9",
    }.items():
        write_wheel(index, version, f"NS = {text}\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "train.py").write_text("import package" + PROGRAM.format("package.NS"))
    words = ("bisect", "--good", "package==1.0", "--bad", "package==1.10", "-n", "3", "--json")
    done = suite_ranks.command(tmp_path, *words, "--", sys.executable, "train.py")
    assert 0 == done.returncode, done.stderr
    found = json.loads(done.stdout)
    assert ("package==1.2.0", "package==1.0", ["package==1.1"]) == (
        found["first_slow"],
        found["last_fast"],
        found["between"],
    )
    assert ["index", "train.py"] == sorted(one.name for one in tmp_path.iterdir())
