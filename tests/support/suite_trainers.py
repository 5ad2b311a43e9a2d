"""Helpers of the trainers' tests, and the trainings of two ranks that each trainer is tested with."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from suite_ranks import Job

from deep500_timing.loop import BETWEEN
from deep500_timing.runs import Run, attach
from deep500_timing_torch import CPUGPUTimer

if TYPE_CHECKING:
    from suite_ranks import Forks

    from deep500_timing import Timer

PARTS = ("IO", "copy", "FORWARD", "BACKWARD", "optimizer", *BETWEEN)
"""The parts of BATCH that add up to it. ``clip`` and ``signal check`` lie in these."""


class Processor:
    """A host clock that is the calling thread's time on a processor, so that a busy machine prolongs nothing."""

    @staticmethod
    def now_ns() -> int:
        """That time in nanoseconds."""
        return time.thread_time_ns()


def timer_of_processor() -> CPUGPUTimer:
    """A timer by that clock."""
    return CPUGPUTimer("cpu", clock=Processor())


def counts(timer: Timer) -> dict[str, int]:
    """The number of times of each region that is no gap."""
    return {one.name: one.stats.count for one in timer.snapshot() if one.stats and one.name not in BETWEEN}


def seconds(timer: Timer, name: str) -> float:
    """The total time of a region."""
    return sum(timer.get_time(name))


def check_clock(timer: Timer, own: dict[str, list[float]]) -> None:
    """Check the times of regions at best against a stopwatch's, which may have several for one of the timer's.

    A busy machine makes the code between the two slower, by cold caches, and not each time.

    Both are to be of :class:`Processor`.
    """
    for name, times in own.items():
        ours = timer.get_time(name)
        each, rest = divmod(len(times), len(ours))
        assert not rest, name
        theirs = [sum(times[at : at + each]) for at in range(0, len(times), each)]
        apart = min(abs(one - other) for one, other in zip(ours, theirs, strict=True))
        assert apart <= 0.02 * statistics.median(theirs) + 5e-4, name


def share(timer: Timer, whole: str, *parts: str) -> float:
    """The share of a region that its parts fill, at best, but for the first time, which first calls prolong.

    A part that is missing is missing each time. The timer's clock is to be :class:`Processor`.
    """
    known = {one.name for one in timer.snapshot()}
    inner = [span for part in parts if part in known for span in timer.intervals(part).tolist()]
    shares = [
        sum(end - start for start, end in inner if start >= begun and end <= ended) / (ended - begun)
        for begun, ended in timer.intervals(whole).tolist()
    ]
    return max(shares[1:] or shares)


class StopError(Exception):
    """An error of the user's own in mid-epoch."""


def raise_error() -> None:
    """Raise it."""
    raise StopError("in mid-epoch")


def press_ctrl_c() -> None:
    """Send this process the signal of Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has it ignored after the first
    signal.raise_signal(signal.SIGINT)


FAULTS = {"exception": raise_error, "ctrl-c": press_ctrl_c}
FAULT_AT = SAVED_AT = 5
"""The step of a fault, and the number of steps before a checkpoint."""
_CASES = {"1": {}, "4": {"accumulated": 4}, "resumed": {"resume": True}}
_ON_A_RANK = """
import sys
sys.path[:0] = sys.argv[3:]
import suite_trainers
suite_trainers.train_cases(sys.argv[1], sys.argv[2])
"""


def train_cases(module: str, folder: str) -> None:
    """On a rank: train each case with the timing and without, and write the result.

    Args:
        module: The test module. Its ``fit(folder, timer=None, *, accumulated, saves, resume, fault)`` returns weights.
        folder: For the checkpoint, the runs and the result.
    """
    fit = import_module(module).fit
    found = {}
    fit(folder, saves=True)
    torch.distributed.barrier()
    whole = fit(folder)
    for name, settings in _CASES.items():
        plain, timer = fit(folder, **settings) if settings else whole, timer_of_processor()
        with attach(timer, f"{folder}/run-{name}"):
            timed = fit(folder, timer, **settings)
        same = all(torch.equal(one, other) for one, other in zip(plain, timed, strict=True))
        found[name] = {"counts": counts(timer), "parts": share(timer, "BATCH", *PARTS), "same": same}
    for name, fault in FAULTS.items():
        timer = CPUGPUTimer()
        with attach(timer, f"{folder}/run-{name}"):
            with pytest.raises((StopError, KeyboardInterrupt, SystemExit)):
                fit(folder, timer, fault=fault)
            failed = {one.name: one.failed for one in timer.snapshot() if one.failed}
            at_fault = counts(timer)
            same = all(torch.equal(one, other) for one, other in zip(whole, fit(folder, timer), strict=True))
        found[name] = {"at_fault": at_fault, "failed": failed, "counts": counts(timer), "same": same}
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(found))


def check_two_ranks(
    forks: Forks,
    folder: Path,
    module: str,
    expected: dict[str, dict[str, int]],
    failed: set[str],
    *,
    agent: bool = False,
) -> None:
    """Check what two ranks have found, and that the log of each case has it too.

    Args:
        forks: The fixture.
        folder: An empty one.
        module: The test module.
        expected: The counts of regions of each case. Those of both faults are "fault".
        failed: The regions that a fault ends.
        agent: As of ``Job``.
    """
    paths = (str(Path(__file__).parents[1] / "trainers"), str(Path(__file__).parent))
    job = Job(folder, forks.start, ["-c", _ON_A_RANK, module, str(folder), *paths], 2, agent=agent)
    results = job.results(300)
    for rank, cases in enumerate(results):
        for name, found in cases.items():
            assert found["same"], name
            regions = expected["fault" if name in FAULTS else name]
            there = found["at_fault" if name in FAULTS else "counts"]
            assert {region: there.get(region) for region in regions} == regions, name
            if name in FAULTS:
                assert found["failed"] == dict.fromkeys(failed, 1), name
            else:
                assert found["parts"] == pytest.approx(1, abs=0.02), name
            with Run.open(folder / f"run-{name}") as run:
                rows = run.sql(
                    f"select region, count(*) as n from intervals where rank = {rank} group by region"
                ).rows()
            logged = {row["region"]: row["n"] for row in rows}
            assert {region: logged[region] for region in found["counts"]} == found["counts"], name
