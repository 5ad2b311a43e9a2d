"""Runs for the tests of views: written by the real log on a clock that moves only when told to."""

from __future__ import annotations

import math
from contextlib import contextmanager
from unittest import mock

from deep500_timing import Timer
from deep500_timing.runs import RunLog
from deep500_timing.runs._machine import LEVELS, RATES
from deep500_timing.testing import ManualClock, ManualDeviceClock

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
        """A region that takes so long, next to its children."""
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
    # Versions are of the process's imports, of any earlier tests.
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


class MadeMachine:
    """The kernel's account of a made rank: its thread's time, added up, and the machine's, in rows of the log.

    Args:
        made: The rank.
        **rates: Columns of the table ``machine`` in every row; the others are unknown.
    """

    def __init__(self, made, **rates):
        self.made, self.rates = made, rates
        self.ran_ns = self.waited_ns = 0
        self.last_ns = made.clock.now_ns()
        self.read()

    def read(self, waited_s=0.0, blocked_s=0.0):
        """A reading: of the time since the one before, so much was waited for a processor, and so much blocked."""
        now_ns = self.made.clock.now_ns()
        self.waited_ns += round(waited_s * 1e9)
        self.ran_ns += max(now_ns - self.last_ns - round((waited_s + blocked_s) * 1e9), 0)
        self.last_ns = now_ns
        self.made.log.add("processor", (now_ns, 0, self.ran_ns, self.waited_ns))
        add_machine(self.made, self.rates)


def add_machine(made, rates):
    """A row of the machine alone."""
    made.log.add("machine", (made.clock.now_ns(), *(rates.get(name, math.nan) for name in (*RATES, *LEVELS))))


def made_on_device(folder, steps, parts):
    """So many steps with times on a device: for each part the times of the CPU and of the device, in ms."""
    clock, device = ManualClock(), ManualDeviceClock()
    tmr = Timer(device, clock=clock)
    with RunLog(folder, tmr, rank=0, flush_s=None):
        for _ in range(steps):
            with tmr.region("BATCH", gpu=True):
                for name, (on_cpu, on_gpu) in parts.items():
                    with tmr.region(name, gpu=True):
                        device.launch(on_gpu * 1e-3)
                        clock.advance(on_cpu * 1e-3)
                    if on_gpu == 0:
                        device.advance(on_cpu * 1e-3)
            device.finish()
        tmr.complete_all()


@contextmanager
def cores(count, of_machine=None):
    """A machine of so many processors, of which this process may use some."""
    with (
        mock.patch("deep500_timing.runs._log.usable_cores", return_value=count),
        mock.patch("deep500_timing.runs._header.os.cpu_count", return_value=of_machine or count),
    ):
        yield
