"""The cost of a log from a training step of four regions: ``python -m benchmarks.bench_log_step``.

A fifth of a percent is less than by how much a machine's speed changes from one second to the next, so a race of steps
with and without a log does not show it. It is measured in its two parts, each where it is large:

* Recording into a timer with a log: the time of a pair of start and end in a tight loop, of two timers in turns, a
  chunk of pairs each. The log's thread does not run meanwhile; its work between the chunks is not timed.
* The log's thread: it takes the interpreter from the training thread when it looks (five times a second) and when it
  flushes (once). The steps in which it was awake, and the one after, are compared with the steps around them. The work
  of two of these steps is Python that never lets go of the interpreter, that of the third PyTorch's, which does.

Five pairs and the thread's time, in relation to the step; 95 % intervals by resampling pairs of chunks and the
thread's turns. Wall time.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from benchmarks._machine import describe
from deep500_timing import Timer, TimeType
from deep500_timing.runs import RunLog

REGIONS = (TimeType.IO, TimeType.FORWARD, TimeType.BACKWARD, "optimizer")
PAIRS = 2000
WORK: dict[str, Callable[[], Callable[[], object]]] = {
    "a step of 0.24 ms of Python": lambda: lambda: sum(range(4_600)),
    "a step of 2 ms of Python": lambda: lambda: sum(range(38_000)),
    "a step of PyTorch": lambda: products(8),
}
"""What makes the work of each region."""
AROUND = 40
"""Steps before and after a turn of the log's thread that it is compared with, each."""
RESAMPLES = 2000


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="for each of the four measurements")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"machine": describe()}
    pairs = recording(arguments.seconds)
    figures["a pair, ns more with a log"] = interval(pairs)
    for name, work in WORK.items():
        figures[name] = steps(work(), arguments.seconds, pairs)
    json.dump(figures, sys.stdout, indent=1, ensure_ascii=False)
    print()


def recording(seconds: float) -> NDArray[np.float64]:
    """How many ns more a pair takes with a log: resampled, the first value is that of all chunks.

    Of the chunks' medians: one in which the machine did something else says nothing about a pair.
    """
    times: list[list[int]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        timers = Timer(keep_last=1000), Timer(keep_last=1000)
        with RunLog(folder, timers[1], rank=0, flush_s=None) as log:
            gc.disable()
            end = time.monotonic() + seconds
            turn = 0
            while time.monotonic() < end:
                for number in (0, 1) if turn % 2 else (1, 0):
                    timer = timers[number]
                    began = perf_counter_ns()
                    for _ in range(PAIRS):
                        timer.start(TimeType.FORWARD)
                        timer.end(TimeType.FORWARD)
                    times[number].append(perf_counter_ns() - began)
                turn += 1
                log.flush()
            gc.enable()
    chunks = np.array(times) / PAIRS
    chosen = resampled(chunks.shape[1])
    return np.array([np.median(chunks[1, rows]) - np.median(chunks[0, rows]) for rows in chosen])


def products(count: int) -> Callable[[], object]:
    """So many products of matrices, one after another, on one thread."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.rand(128, 128), torch.rand(128, 128)

    def work() -> None:
        for _ in range(count):
            torch.mm(left, right)

    return work


def steps(work: Callable[[], object], seconds: float, pairs: NDArray[np.float64]) -> dict[str, object]:
    """The cost for a step of that much work, in all."""
    began, turns = train(work, seconds)
    durations = np.diff(began)
    excess = excess_of(began, durations, turns)
    per_turn = np.array([excess[rows].mean() for rows in resampled(len(excess))])
    turns_a_second = len(turns) / ((began[-1] - began[0]) / 1e9)
    step_ns = float(np.median(durations))
    taken = per_turn * turns_a_second / 1e9
    return {
        "median step in ns": round(step_ns),
        "turns of the log's thread a second": round(turns_a_second, 1),
        "µs that one takes": interval(per_turn / 1e3),
        "% of the time that the thread takes": interval(taken * 100),
        "% that a step pays": interval((taken + 5 * pairs / step_ns) * 100),
    }


class Turns:
    """Stands in for the event on which the log's thread waits: notes when it was awake."""

    def __init__(self) -> None:
        """No one has been woken."""
        self._event = threading.Event()
        self._since = 0
        self.awake: list[tuple[int, int]] = []

    def wait(self, pause: float) -> bool:
        """Wait; what came before it was a turn."""
        if self._since:
            self.awake.append((self._since, perf_counter_ns()))
        ends = self._event.wait(pause)
        self._since = perf_counter_ns()
        return ends

    def set(self) -> None:
        """Let it end."""
        self._event.set()


def train(work: Callable[[], object], seconds: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Train with a log; returns when each step began, and from when to when the log's thread was awake, in ns."""
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(keep_last=1000)
        with RunLog(folder, timer, rank=0, flush_s=None) as log:
            # As RunLog does itself, with an event that takes notes.
            log._wake, log._flush_s = turns, 1.0  # type: ignore[assignment]
            thread = threading.Thread(target=log._work)
            thread.start()
            began = []
            gc.disable()
            end = perf_counter_ns() + int(seconds * 1e9)
            while not began or began[-1] < end:
                began.append(perf_counter_ns())
                with timer.region(TimeType.BATCH):
                    for key in REGIONS:
                        with timer.region(key):
                            work()
            gc.enable()
            turns.set()
            thread.join()
    return np.array(began), np.array(turns.awake)


def excess_of(began: NDArray[np.int64], durations: NDArray[np.int64], turns: NDArray[np.int64]) -> NDArray[np.float64]:
    """How many ns longer the steps took in which a turn fell, and the one after, than as many of those around them."""
    first = np.maximum(np.searchsorted(began, turns[:, 0], side="right") - 1, 0)
    last = np.minimum(np.searchsorted(began, turns[:, 1], side="right") + 1, len(durations))
    touched = np.zeros(len(durations), dtype=np.bool_)
    for low, high in zip(first, last, strict=True):
        touched[low:high] = True
    found = []
    for low, high in zip(first, last, strict=True):
        near = slice(max(low - AROUND, 0), high + AROUND)
        others = durations[near][~touched[near]]
        if high > low and len(others) >= AROUND:
            found.append(durations[low:high].sum() - (high - low) * others.mean())
    return np.array(found)


def resampled(count: int) -> list[NDArray[np.int64]]:
    """All of so many, then as many drawn with replacement, again and again."""
    rng = np.random.default_rng(0)
    return [np.arange(count), *rng.integers(0, count, (RESAMPLES, count))]


def interval(samples: NDArray[np.float64]) -> dict[str, object]:
    """The value of all, and the 95 % interval by resampling."""
    low, high = np.quantile(samples[1:], (0.025, 0.975))
    return {"value": round(float(samples[0]), 4), "95 %": [round(float(low), 4), round(float(high), 4)]}


if __name__ == "__main__":
    main()
