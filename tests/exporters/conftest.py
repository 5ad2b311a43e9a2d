"""What the tests of exporters share: a machine that is always the same, and snapshots of known content."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from deep500_timing import CPUGPUTimer, TimeType
from deep500_timing._ground.warn import forget_warnings
from deep500_timing._summary import anchor as _anchor
from deep500_timing._summary import snapshot as _snapshot
from deep500_timing._summary.snapshot import RegionTimes, Snapshot
from deep500_timing._summary.stats import TimeStats

UNIX_TIME_S = 1_800_000_000.0  # 2027-01-15 08:00:00 UTC


@pytest.fixture(autouse=True)
def _said_nothing_yet():
    """Let each test see the warnings that are said once."""
    forget_warnings()
    yield
    forget_warnings()


@pytest.fixture
def machine(monkeypatch):
    """A host, process, moment and time zone for snapshots, so that what is printed can be compared whole."""
    monkeypatch.setattr(_snapshot, "time", SimpleNamespace(time=lambda: UNIX_TIME_S))
    monkeypatch.setattr(_anchor, "time", SimpleNamespace(time_ns=lambda: int(UNIX_TIME_S * 1e9)))
    monkeypatch.setattr(_snapshot, "known_rank_and_world", lambda: (None, None))
    monkeypatch.setattr(_snapshot, "socket", SimpleNamespace(gethostname=lambda: "node01"))
    monkeypatch.setattr(_snapshot, "os", SimpleNamespace(getpid=lambda: 4711))
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def tmr(clock, device, machine):
    """A timer after two batches of 1 s on the host and 2 s on the device, the second with I/O of 250 ms."""
    timer = CPUGPUTimer(clock=clock, device_clock=device)
    for _ in range(2):
        timer.start(TimeType.BATCH, gpu=True)
        device.launch(2.0)
        clock.advance(1.0)
        timer.end(TimeType.BATCH, gpu=True)
    with timer.region(TimeType.IO):
        clock.advance(0.25)
    device.finish()
    return timer


def _stats_of(value: float, **changes) -> TimeStats:
    values = dict.fromkeys(("min", "mean", "median", "max", "total", "p90", "p95", "p99"), value)
    return TimeStats(**{**values, "stdev": 0.0, "count": 1, "median_ci": None, **changes})


@pytest.fixture
def snapshot_of():
    """Make a snapshot of regions: ``snapshot_of(("BATCH", "CPU", 1.5), RegionTimes(...))``."""

    def make(*regions) -> Snapshot:
        return Snapshot(
            tuple(
                region if isinstance(region, RegionTimes) else RegionTimes(*region[:2], _stats_of(region[2]))
                for region in regions
            ),
            UNIX_TIME_S,
            "node01",
            4711,
        )

    return make


@pytest.fixture(scope="session")
def stats_of():
    """Make statistics of one value: ``stats_of(1.5, p95=2.0)``."""
    return _stats_of
