"""The page on writing an adapter: its examples run."""

from __future__ import annotations

import re
from concurrent import futures
from pathlib import Path

import pytest

from deep500_timing import DeviceClock, TimingWarning, adapters

pytestmark = pytest.mark.one_form

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
    assert isinstance(blocks["tmr"].device.clock, DeviceClock)


def test_its_times(blocks):
    """The loop that it shows has a time on the device for each batch."""
    assert 100 == len(blocks["batches"].get_time("BATCH", gpu=True))
    assert 0 < min(blocks["batches"].get_time("BATCH", gpu=True))


def test_its_adapter_finds_the_device_late(blocks, monkeypatch):
    """The timer that it shows has found its worker by the first region on it, and not before."""
    tmr = blocks["tmr"]
    assert 1 == len(tmr.get_time("on the worker", gpu=True))
    # The first event stays where it is, to place the others by; two serve the exchange after the region.
    assert (blocks["worker_clock"], 3) == (tmr.device.clock, tmr.device.events)
    fresh = blocks["CPUGPUTimer"]()
    with fresh.region("on the host"):
        pass
    assert fresh.device.clock is None
    monkeypatch.setattr(blocks["WorkerClock"], "why_unavailable", lambda: "The worker is on strike.")
    with pytest.warns(TimingWarning, match="on strike"), fresh.region("on the worker", gpu=True):
        pass
    assert ([], 1) == (fresh.get_time("on the worker", gpu=True), len(fresh.get_time("on the worker")))


def test_its_exchange_is_timed_on_the_device(blocks):
    """The example's time outside regions comes under the name that it gives."""
    assert 1 == len(blocks["tmr"].get_time("exchange", gpu=True))
    assert [] == blocks["tmr"].get_time("exchange")


def test_it_names_all_that_adapters_share():
    """Its table has every name of ``deep500_timing.adapters``, each once, and each is there."""
    table = PAGE.read_text(encoding="utf-8").partition("## Shared parts")[2]
    rows = [line.split("|")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = re.findall(r"`(\w+)`", "".join(rows))
    assert sorted(adapters.__all__) == sorted(named)
    assert all(getattr(adapters, name) is not None for name in named)
    assert set(adapters.__all__) <= set(dir(adapters))


def test_it_needs_public_names_only():
    """Nothing that it imports from this project is private."""
    imports = re.findall(
        r"^(?:from|import) (deep500_timing[\w.]*)(?: as \w+| import (.*))?$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert 5 == len(imports)
    names = [name for module, names in imports for name in (*module.split("."), *names.split(", "))]
    assert [] == [name for name in names if name.startswith("_")]
