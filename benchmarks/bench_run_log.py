"""The cost of a log for the training thread: ``python -m benchmarks.bench_run_log``.

Two timers in turns in one process, one of them with a ``RunLog`` that writes from its own thread, a chunk of so many
regions or steps each: the ratios of the chunks' times, on the wall and of the training thread's processor, their 95 %
intervals by resampling the pairs, and the use by the log's thread of the processor.

And how fast the whole writer is, from the timer's stores to the file: 10⁶ intervals at a time are written by one flush
on one core, and a loop that records 10⁶ a second shows whether the log's thread keeps up.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter_ns, thread_time_ns

import numpy as np

from benchmarks._machine import describe
from deep500_timing import Timer, TimeType
from deep500_timing.runs import RunLog

MILLION = 1_000_000
CHUNK = 2000
WORK = 20_000
"""About a quarter of a millisecond."""
REGIONS = (TimeType.IO, TimeType.FORWARD, TimeType.BACKWARD, "optimizer")


def main() -> None:
    """Measure, and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each of the two races")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"machine": describe()}
    for name, chunk in (("pair", _pairs), ("step of four regions and 1 ms of work", _steps)):
        figures[name] = race(chunk, arguments.seconds)
    figures["whole writer, of what is there"] = write_at_once()
    for keys in ((TimeType.FORWARD,), REGIONS):
        figures[f"whole writer, beside 10⁶ a second in {len(keys)} regions"] = keep_up(arguments.seconds, keys)
    json.dump(figures, sys.stdout, indent=1)
    print()


def write_at_once() -> dict[str, object]:
    """CPU seconds in which one thread takes 10⁶ intervals of five regions from a timer and writes them."""
    used = []
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer()
        with RunLog(folder, timer, rank=0, flush_s=None) as log:
            for _ in range(5):
                for _ in range(MILLION // 5):
                    with timer.region(TimeType.BATCH):
                        for key in REGIONS:
                            timer.start(key)
                            timer.end(key)
                began = time.thread_time()
                log.flush()
                used.append(round(time.thread_time() - began, 3))
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {"CPU s for each 10⁶ intervals": used, "log bytes per interval": round(size / 5 / MILLION, 2)}


def keep_up(seconds: float, keys: Sequence[TimeType | str]) -> dict[str, object]:
    """Record 10⁶ intervals a second with a bounded timer and a log: its thread's use, and the drops."""
    with tempfile.TemporaryDirectory() as folder:
        timer = Timer(keep_last=1000)
        log = RunLog(folder, timer, rank=0)
        recorded = 0
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            for _ in range(CHUNK // len(keys)):
                for key in keys:
                    timer.start(key)
                    timer.end(key)
            recorded += CHUNK // len(keys) * len(keys)
            while time.monotonic() < began + recorded / MILLION:
                pass
        took = time.monotonic() - began
        used = _cpu_of("deep500-timing run log")
        log.close()
        dropped = log._collector.dropped
    return {
        "intervals a second": round(recorded / took),
        "log thread's CPU s for each 10⁶ intervals": None if used is None else round(used / recorded * MILLION, 3),
        "dropped": dropped,
    }


def race(chunk: Callable[[Timer], None], seconds: float) -> dict[str, object]:
    """Let the two timers take turns for so long."""
    with tempfile.TemporaryDirectory() as folder:
        plain, logged = Timer(keep_last=1000), Timer(keep_last=1000)
        log = RunLog(folder, logged, rank=0)
        times: dict[Timer, list[int]] = {plain: [], logged: []}
        used_ns: dict[Timer, list[int]] = {plain: [], logged: []}
        gc.disable()
        end = time.monotonic() + seconds
        turns = 0
        while time.monotonic() < end:
            for timer in (plain, logged) if turns % 2 else (logged, plain):
                began_cpu, began = thread_time_ns(), perf_counter_ns()
                chunk(timer)
                times[timer].append(perf_counter_ns() - began)
                used_ns[timer].append(thread_time_ns() - began_cpu)
            turns += 1
        gc.enable()
        used = _cpu_of("deep500-timing run log")
        log.close()
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return {
        "wall": _ratio(times[logged], times[plain]),
        "the training thread's CPU": _ratio(used_ns[logged], used_ns[plain]),
        "median chunk in ns": int(np.median(times[plain])),
        "log thread's CPU s": used,
        "seconds": seconds,
        "log bytes": size,
    }


def _ratio(with_log: list[int], without: list[int]) -> dict[str, object]:
    """Of the means and medians, each with its 95 % interval by resampling the pairs of neighbours."""
    pairs = np.array((with_log, without))
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, pairs.shape[1], (1000, pairs.shape[1]))
    found: dict[str, object] = {"chunks": pairs.shape[1]}
    for name, of in (("means", np.mean), ("medians", np.median)):
        samples = [np.divide(*of(pairs[:, rows], axis=1)) for rows in chosen]
        low, high = np.quantile(samples, (0.025, 0.975))
        found[f"ratio of {name}"] = round(float(np.divide(*of(pairs, axis=1))), 4)
        found[f"ratio of {name}, 95 %"] = [round(float(low), 4), round(float(high), 4)]
    return found


def _pairs(timer: Timer) -> None:
    for _ in range(CHUNK):
        timer.start(TimeType.FORWARD)
        timer.end(TimeType.FORWARD)


def _steps(timer: Timer) -> None:
    # A fixed amount of work that holds the interpreter, as the Python of a training loop does: what the log's thread
    # takes of it is seen.
    for _ in range(5):
        with timer.region(TimeType.BATCH):
            for key in REGIONS:
                with timer.region(key):
                    sum(range(WORK))


def _cpu_of(name: str) -> float | None:
    for thread in threading.enumerate():
        if thread.name == name and thread.native_id is not None:
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / 100
    return None


if __name__ == "__main__":
    main()
