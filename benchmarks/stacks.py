"""Sampled shares of lines beside a stopwatch in the program: `python -m benchmarks.stacks` writes STACKS.md.

A loop has two lines: the first one computes or waits in one of four ways, the second one computes in C without the GIL.
The stopwatch reads the clock around the first. Both ways of sampling see the same loop.
"""

from __future__ import annotations

import os
import platform
import threading
import time
import zlib
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from deep500_timing._base.stack import StackWatch
from deep500_timing.runs._stacks import StackTexts, frames_of

if TYPE_CHECKING:
    from collections.abc import Callable

LENGTHS_MS, SAMPLES = (0.1, 1.0, 10.0, 100.0), 1000
"""Samples of each cell: by chance a share is off by 3 points in one cell of twenty."""
PERIOD_S, PER_SECOND = 1e-3, 50
BLOCK = bytes(1 << 20)


def in_python(amount: int) -> None:
    """Bytecode."""
    total = 0
    for number in range(amount):
        total += number


def keeps_gil(amount: int) -> None:
    """One call in C."""
    sum(range(amount))


def releases_gil(amount: int) -> None:
    """Calls in C, of 1 MiB or less each, that let the GIL go."""
    for _ in range(amount >> 20):
        zlib.crc32(BLOCK)
    zlib.crc32(memoryview(BLOCK)[: amount & 0xFFFFF])


def sleeps(amount: int) -> None:
    """Wait, for an amount in us."""
    time.sleep(amount / 1e6)


KINDS = {"Python": in_python, "C that keeps the GIL": keeps_gil, "C that releases it": releases_gil, "sleep": sleeps}


def amount_for(work: Callable[[int], None], seconds: float) -> int:
    """What takes about so long, by the processor's time."""
    if work is sleeps:
        return round(seconds * 1e6)
    begin = time.thread_time()
    work(10_000_000)
    return max(round(1e7 * seconds / (time.thread_time() - begin)), 1)


def loop(first: Callable[[int], None], amount: int, other: int, goes_on: Callable[[], bool]) -> float:
    """Returns the share of the first line by the stopwatch."""
    clock, spent, begin = time.perf_counter, 0.0, time.perf_counter()
    while goes_on():
        before = clock()
        first(amount)
        spent += clock() - before
        releases_gil(other)
    return spent / (clock() - begin)


def deep(depth: int, work: Callable[[], float]) -> float:
    """A stack as deep as that of a training."""
    return deep(depth - 1, work) if depth else work()


def measure(kind: str, length_ms: float, takes_gil: bool) -> tuple[float, float, float]:
    """The first line's share by the stopwatch and by the samples, and CPU seconds of a sample."""
    watch, texts, cpu_s = StackWatch(PERIOD_S, threading.main_thread().ident or 0), StackTexts(), 0.0
    lines: Counter[str] = Counter()
    if takes_gil:
        watch.follow(time.perf_counter_ns)

    def sample() -> None:
        nonlocal cpu_s
        while lines.total() < SAMPLES:
            for _, stack, _ in watch.watch(0.2):
                frame = next((frame for frame in frames_of(texts.text_of(stack)) if frame.name == "loop"), None)
                lines[frame.expression if frame is not None else ""] += 1
        cpu_s = time.thread_time() / lines.total()

    amount, other = amount_for(KINDS[kind], length_ms / 1e3), amount_for(releases_gil, length_ms / 2e3)
    thread = threading.Thread(target=sample)
    thread.start()
    stopwatch = deep(20, lambda: loop(KINDS[kind], amount, other, thread.is_alive))
    thread.join()
    return stopwatch, lines["first(amount)"] / lines.total(), cpu_s


def main() -> None:
    """Measure each cell in both ways, and write the table."""
    rows, worst = [], [0.0, 0.0]
    cpu: tuple[list[float], list[float]] = ([], [])
    for kind in KINDS:
        for length_ms in LENGTHS_MS:
            cells = []
            for takes_gil in (False, True):
                stopwatch, sampled, cpu_s = measure(kind, length_ms, takes_gil)
                worst[takes_gil] = max(worst[takes_gil], abs(sampled - stopwatch))
                cpu[takes_gil].append(cpu_s)
                cells.append(f"{stopwatch:.1%} | {sampled:.1%} | {100 * (sampled - stopwatch):+.1f}")
            rows.append(f"| {kind} | {length_ms:g} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    costs_s = [sorted(of)[len(of) // 2] for of in cpu]
    lines = [
        "# Sampled stacks",
        "",
        f"Written by `python -m benchmarks.stacks` on Python {platform.python_version()} with {os.cpu_count()} cores "
        f"at a load of {os.getloadavg()[0]:.0f}.",
        "A loop has two lines. The first computes or waits for the time that the row says, the second computes in C",
        f"without the GIL for half of it. The first one's share by a stopwatch around it, and in {SAMPLES} samples;",
        "the difference is in points. 64 samples at a time wait for the GIL: at 1000 a second, unlike at 50, most of a",
        "call that keeps it for 100 ms goes by meanwhile.",
        "",
        f"**Farthest from the stopwatch: {100 * worst[0]:.1f} points without the GIL, {100 * worst[1]:.1f} with it.**",
        f"A sample costs {1e6 * costs_s[0]:.0f} µs of CPU without the GIL and {1e6 * costs_s[1]:.0f} µs with it:",
        f"{PER_SECOND * costs_s[0]:.2%} and {PER_SECOND * costs_s[1]:.2%} of a core at {PER_SECOND} a second.",
        "",
        "| first line | ms | stopwatch | without the GIL | | stopwatch | with the GIL | |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]
    Path(__file__).with_name("STACKS.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
