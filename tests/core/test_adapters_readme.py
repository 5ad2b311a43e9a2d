"""The page on writing an adapter: what it shows runs."""

from __future__ import annotations

import re
from concurrent import futures
from pathlib import Path

import pytest

from deep500_timing import DeviceClock

PAGE = Path(__file__).parents[2] / "adapters" / "README.md"


@pytest.fixture
def blocks(monkeypatch):
    """The Python blocks of the page, run one after the other as one module; their threads end with the test."""
    workers = []

    class Worker(futures.ThreadPoolExecutor):
        def __init__(self, **settings):
            super().__init__(**settings)
            workers.append(self)

    monkeypatch.setattr(futures, "ThreadPoolExecutor", Worker)
    names = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), names)
    yield names
    for worker in workers:
        worker.shutdown()


def test_its_clock_is_one(blocks):
    """The clock that it shows is a device clock."""
    assert isinstance(blocks["tmr"]._device.clock, DeviceClock)


def test_its_times(blocks, capsys):
    """The loop that it shows has a time on the device for each batch, and prints them."""
    tmr = blocks["tmr"]
    assert 100 == len(tmr.get_time("BATCH", gpu=True))
    assert 0 < min(tmr.get_time("BATCH", gpu=True))


@pytest.mark.parametrize(
    "test", ["test_is_a_device_clock", "test_the_same_stream_is_equal", "test_another_stream_is_not"]
)
def test_its_rig(blocks, test):
    """The rig that it shows serves the suite (the parts that take no time)."""
    rig = blocks["WorkerRig"]()
    getattr(blocks["TestWorkerClock"](), test)(rig)


def test_its_rig_has_work_done(blocks):
    """Events of that rig are done once it has finished."""
    suite = blocks["TestWorkerClock"]()
    suite.work_seconds = 0.0
    suite.test_done_when_the_device_is(blocks["WorkerRig"]())
