"""The finding ``waits-for-data`` says the work of the data loader's workers."""

from __future__ import annotations

import pytest
from made_runs import made_rank

from deep500_timing._views.findings import find
from deep500_timing._views.page._page import build
from deep500_timing.runs import Run

pytest.importorskip("duckdb")
COLUMNS = ("time_ns", "loader", "iteration", "workers", "is_training", "cpus", "worker")
NUMBERS = ("start_us", "idle_us", "fetch_us", "collate_us", "put_us", "batches", "samples")
STEPS = 80


def made(folder, *workers, wait_ms=40.0, cpus=8):
    """A run of 80 steps of 60 ms and a wait. A worker is the ms of idle, fetch, collate and put, and its batches."""
    with made_rank(folder) as rank:
        rank.log.declare("loader_workers", **dict.fromkeys((*COLUMNS, *NUMBERS), "int"))
        for step in range(STEPS):
            with rank.region("BATCH"):
                rank.spend("IO", wait_ms * (1 + step % 3 / 10) / 1e3)
                rank.spend("FORWARD", 0.02)
                rank.spend("BACKWARD", 0.04)
        known = (rank.clock.now_ns(), 0, 0, len(workers), 1, cpus)
        for number, (*parts, batches) in enumerate(workers):
            rank.log.add("loader_workers", (*known, number, 1000, *(1000 * ms for ms in parts), batches, 4 * batches))
        if not workers:
            rank.log.add("loader_workers", (*known, -1, *(0,) * len(NUMBERS)))
    with Run.open(folder) as run:
        return next((one for one in find(run) if one.rule == "waits-for-data"), None)


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ([(100, 7800, 100, 20, 40)] * 2, ": fetch takes 48.8 ms a sample; 4 workers would keep up, 2 are there."),
        ([(100, 100, 7800, 20, 40)] * 2, ": collate takes 195 ms a batch; 4 workers would keep up, 2 are there."),
        ([(7900, 100, 20, 2, 10)] * 8, ": a worker makes a batch in 12.0 ms, and handing it over takes longer."),
        ([(6000, 2500, 0, 0, 40)] * 2, " idle for 70 % of the time, so the main process is the limit."),
        (
            [(100, 7900, 0, 0, 20), *[(7500, 500, 0, 0, 20)] * 3],
            ": 3 of 4 workers are idle: they wait for worker 0, which takes 395 ms a batch, the others 25.0 ms, as "
            "batches keep their order.",
        ),
        (
            [(100, 7900, 0, 0, 20), (7500, 500, 0, 0, 20)],
            ": 1 of 2 workers is idle: it waits for worker 0, which takes 395 ms a batch, the others 25.0 ms, as "
            "batches keep their order.",
        ),
        ([], ": the loop loads the data itself (num_workers=0); 1 worker would keep up."),
        ([(3000, 5000, 0, 0, 40)] * 2, "a step."),
        ([(100, 7800, 100, 20, 9)] * 2, "a step."),
    ],
    ids=["fetch", "collate", "cheap", "main process", "uneven", "of two", "no workers", "neither", "few batches"],
)
def test_the_cause(workers, said, tmp_path):
    """The sentence has the workers' parts, or stays as it is."""
    found = made(tmp_path / "run", *workers)
    assert found.text.endswith(said), found.text


@pytest.mark.parametrize(("wait_ms", "speaks"), [(4, False), (7, True), (15, True), (60, True)])
def test_the_threshold(wait_ms, speaks, tmp_path):
    """Below 10 % of the step nothing is said, whatever the workers do; at 1, 2 and 5 times that the cause is named."""
    found = made(tmp_path / "run", *[(100, 7800, 100, 20, 40)] * 2, wait_ms=wait_ms)
    assert speaks == (found is not None and "fetch takes 48.8 ms a sample" in found.text)


@pytest.mark.parametrize(("a_start_ms", "rules"), [(0, ["waits-for-data"]), (300, ["between-epochs"])])
def test_workers_that_start_for_few_batches_are_not_idle(a_start_ms, rules, tmp_path):
    """Epochs of five batches on eight workers: these have nothing to do, and the first batch of each epoch waits."""
    with made_rank(tmp_path / "run") as rank:
        rank.log.declare("loader_workers", **dict.fromkeys((*COLUMNS, *NUMBERS), "int"))
        for epoch in range(10):
            with rank.region("EPOCH"):
                rank.spend("EPOCH (start)", a_start_ms / 1e3)
                for step in range(5):
                    with rank.region("BATCH"):
                        rank.spend("IO", (0.005 if step else 0.150) * (1 + epoch % 3 / 10))
                        rank.spend("FORWARD", 0.03)
                        rank.spend("BACKWARD", 0.04)
            known = (rank.clock.now_ns(), 0, epoch, 8, 1, 2)
            for number in range(8):
                one = number < 5
                rank.log.add("loader_workers", (*known, number, 30_000, 10**6, 10**5 * one, 10**4, 100, one, 4 * one))
    with Run.open(tmp_path / "run") as run:
        found = [one for one in find(run) if one.rule in ("waits-for-data", "between-epochs")]
    assert rules == [one.rule for one in found]
    assert "persistent_workers=True" in found[0].remedy


def test_the_section_of_the_page(tmp_path):
    """Each worker is a row with its parts; a loader without workers has no section."""
    made(tmp_path / "two", (100, 7800, 90, 20, 40), (150, 7750, 80, 30, 41))
    made(tmp_path / "none")
    with Run.open(tmp_path / "two") as run:
        [section] = [one for one in build(run)[1] if one.name == "workers"]
    [(_, heads, rows)] = section.content.tables
    assert heads == ("worker", "fetch", "collate", "put", "idle", "start-up", "batches", "samples")
    assert rows == [
        (0, "7.800 s", "90.00 ms", "20.00 ms", "100.0 ms", "1.000 ms", 40, 160),
        (1, "7.750 s", "80.00 ms", "30.00 ms", "150.0 ms", "1.000 ms", 41, 164),
    ]
    with Run.open(tmp_path / "none") as run:
        assert "workers" not in [one.name for one in build(run)[1]]
