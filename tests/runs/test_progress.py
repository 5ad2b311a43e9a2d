"""The bar of a first reading."""

from __future__ import annotations

import io
import sys

import pytest

from deep500_timing import Timer
from deep500_timing._base import progress
from deep500_timing._command._output import busy
from deep500_timing.runs import Run
from deep500_timing.runs import _tables as tables


class Terminal(io.StringIO):
    """A terminal that keeps what it is shown."""

    def isatty(self):
        """It is one."""
        return True


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run of two logs, in many parts."""
    monkeypatch.setattr(tables, "CHUNK_ROWS", 100)
    for _ in range(2):
        timer = Timer(run=tmp_path)
        for _ in range(10):
            for _ in range(100):
                with timer.region("BATCH"):
                    pass
            timer.run.flush()
        timer.run.close()
    return tmp_path


def test_a_first_reading_tells_how_far_it_is(folder, monkeypatch):
    """The share rises to nearly the whole, over all logs; a second reading has nothing to tell."""
    told = []
    monkeypatch.setattr(progress, "show", lambda done, of: told.append((done, of)))
    Run.open(folder).close()
    first = told[:]
    Run.open(folder).close()

    assert first == told
    assert {sum(path.stat().st_size for path in folder.glob("*.d5log"))} == {of for _, of in told}
    shares = [done / of for done, of in told]
    assert shares == sorted(shares)
    assert len(set(shares)) > 10
    assert 0.5 < shares[-1] <= 1


def test_a_terminal_shows_the_share(monkeypatch):
    """The bar is on a terminal alone, and nothing of it is left."""
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("TERM", "xterm")
        with busy("Reading the run"):
            progress.show(1, 4)
            progress.show(4, 4)
        progress.show(1, 4)

    states = ["…", "[#####---------------] 25%", "[####################] 100%"]
    assert "".join(f"\r\x1b[KReading the run {state}" for state in states) + "\r\x1b[K" == terminal.getvalue()
    assert "" == file.getvalue()
