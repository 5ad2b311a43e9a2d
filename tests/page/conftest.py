"""Shared by the tests of the page and the timeline: one run with everything in it, and one browser."""

from __future__ import annotations

import random
import shutil
import threading

import pytest

from deep500_timing import Timer, TimeType
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock, ManualDeviceClock

STEPS = 40
HOSTILE = "</script><script>alert(1)</script>&\"'\u2028"
"""A region's name that closes a script, an attribute and a line."""


def train(folder, rank, *, steps=STEPS, slow=(1, 30)):
    """A rank's training in a time that stands still: with a device, a loader's thread, collectives and samples."""
    clock, rng, device = ManualClock(10**9), random.Random(rank), ManualDeviceClock(f"rank {rank}")
    tmr = Timer(device, clock=clock)
    with RunLog(folder, tmr, rank=rank, flush_s=None) as log:
        log.declare("kernels", start_ns="time", dur_ns="int", kernel="name", block="int")
        for epoch in range(2):
            with tmr.region(TimeType.EPOCH):
                for step in range(steps // 2):
                    _step(tmr, log, clock, rng, device, rank, epoch * (steps // 2) + step, slow)
                    if step % 7 == 0:
                        log.flush()
                with tmr.region("VALIDATION"):
                    clock.advance_ns(20_000_000)
        log.event("checkpoint", "saved", path="somewhere")
        device.advance(1.0)
    return tmr


def _step(tmr, log, clock, rng, device, rank, step, slow):
    with tmr.region(TimeType.BATCH):
        with tmr.region(TimeType.IO):
            clock.advance_ns(1_900_000 + rng.randrange(300_000))
            if slow == (rank, step):
                clock.advance_ns(80_000_000)
        with tmr.region(TimeType.FORWARD, gpu=True):
            start = clock.now_ns()
            device.launch(0.012)
            clock.advance_ns(10_000_000 + rng.randrange(900_000))
            log.add("kernels", (start, 4_000_000, "conv1", 3))
        with tmr.region(HOSTILE):
            clock.advance_ns(2_000_000)
        with tmr.region(TimeType.COMM):
            start = clock.now_ns()
            clock.advance_ns(1_000_000 + (80_000_000 if slow[1] == step and slow[0] != rank else 0))
            log.collective("all_reduce", start, clock.now_ns(), group="data", sequence=step, nbytes=4096)
        log.sample("memory.device_allocated_bytes", 1e9 + step * 1e6, region="FORWARD")
        log.sample("throughput.samples_per_s", 1000.0 + step)
        clock.advance_ns(50_000)
    if step % 10 == 0:
        start = clock.now_ns()
        clock.advance_ns(300_000)
        log.collective("broadcast", start, clock.now_ns(), group="weights", sequence=step, nbytes=1 << 20)
        worker = threading.Thread(target=_load, args=(tmr, clock, log), name="loader")
        worker.start()
        worker.join()
    device.advance(0.02)


def _load(tmr, clock, log):
    with tmr.region("decode"):
        clock.advance_ns(500_000)
    log.flush()  # A thread that has ended has no name any more.


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run of two ranks, and their timers; rank 1 is slow in step 30."""
    folder = tmp_path_factory.mktemp("page") / "digits"
    return folder, [train(folder, rank) for rank in range(2)]


@pytest.fixture(scope="session")
def run(trained):
    """That run, open."""
    with Run.open(trained[0]) as run:
        yield run


@pytest.fixture(scope="module")
def browser():
    """Debian's Chromium without a screen, started once for a file; skips where there is none.

    While it is there, this thread has a running event loop, in which no other file could run its coroutines.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("no Chromium on this machine; system-packages.txt names its package")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # Root may not sandbox a browser; the page is the project's own.
        started = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"], timeout=120_000)
        yield started
        started.close()
