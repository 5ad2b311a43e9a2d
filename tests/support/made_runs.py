"""Runs for the tests of views: written by the real log on a clock that moves only when told to."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

from deep500_timing import Timer
from deep500_timing.runs import RunLog
from deep500_timing.testing import ManualClock

START_UNIX_NS = 1_700_000_000_000_000_000
"""When every made run begins: 2023-11-14 22:13:20 UTC."""


class MadeRank:
    """One rank of a run that is being made up."""

    def __init__(self, folder, rank, **settings):
        """Begin its log."""
        self.clock = ManualClock()
        self.tmr = Timer(clock=self.clock)
        self.log = RunLog(folder, self.tmr, rank=rank, flush_s=None, **settings)

    @contextmanager
    def region(self, name, seconds=0.0):
        """A region that takes so long, beside what is in it."""
        with self.tmr.region(name):
            yield
            self.clock.advance(seconds)

    def spend(self, name, seconds):
        """A region with nothing in it that takes so long."""
        with self.tmr.region(name):
            self.clock.advance(seconds)

    def wait(self, seconds):
        """Let time pass outside every region that is not open."""
        self.clock.advance(seconds)


@contextmanager
def made_rank(folder, rank=0, *, started_s=None, **settings):
    """A rank whose log begins at :data:`START_UNIX_NS`, so long after its process, and is closed at the end."""
    started_ns = None if started_s is None else START_UNIX_NS - int(started_s * 1e9)
    # Versions are of what the process has imported, which is whatever tests ran before.
    with (
        mock.patch("deep500_timing._summary.snapshot.time.time_ns", return_value=START_UNIX_NS),
        mock.patch("deep500_timing.runs._header._versions", return_value={}),
        mock.patch("deep500_timing.runs._header._process_start_unix_ns", return_value=started_ns),
    ):
        made = MadeRank(folder, rank, **settings)
        try:
            yield made
        finally:
            made.log.close()
