"""The cost of a pair of calls: warm, cold, in the tail, in bytes, and what an empty region reads."""

from __future__ import annotations

import gc
import random
import sys
import tracemalloc
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks._cold import evictor, tick_source
from benchmarks._contenders import CLOCK, Contender
from benchmarks._loops import cold_loop, same_without_timing, tail_loop, warm_loop
from benchmarks._summary import Spread

Step = Callable[[], None]
_TURN_NS = 400_000
"""How long a turn of one contender takes: short next to what disturbs a shared machine, long next to a pair."""


@dataclass
class Rounds:
    """Nanoseconds per pair: for each contender one number per round."""

    ns: dict[str, list[float]] = field(default_factory=dict)
    clock_ns: dict[str, list[float]] = field(default_factory=dict)
    """Two clock reads, measured right before each contender's turn."""


class without_gc:  # noqa: N801 (reads as its effect)
    """No garbage collection in the block, as in ``timeit``; one before it."""

    def __enter__(self) -> None:
        gc.collect()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        gc.enable()


def warm(contenders: list[Contender], rounds: int, step: Step, seed: int = 0) -> Rounds:
    """Nanoseconds per pair in a loop, the empty loop subtracted, in rounds of random order."""
    loops = {contender.label: warm_loop(contender) for contender in contenders}
    empty = {contender.label: same_without_timing(contender) for contender in contenders}
    clock, clock_empty = loops[CLOCK], empty[CLOCK]
    pairs = {}
    for contender in contenders:
        loop = loops[contender.label]
        for count in (5, 200, 200):
            taken = loop(count)
        contender.reset()
        pairs[contender.label] = max(20, int(200 * _TURN_NS / max(taken, 1)))
    measured = Rounds({label: [] for label in loops}, {label: [] for label in loops})
    shuffled, order = list(contenders), random.Random(seed)
    with without_gc():
        for _ in range(rounds):
            order.shuffle(shuffled)
            for contender in shuffled:
                label = contender.label
                loop, count = loops[label], pairs[label]
                few = max(5, count // 20)
                clock(200)
                clock_ns = (clock(1500) - clock_empty(1500)) / 1500
                empty[label](few)
                loop(few)
                nothing = empty[label](count)
                measured.ns[label].append((loop(count) - nothing) / count)
                measured.clock_ns[label].append(clock_ns)
                contender.reset()
            step()
    return measured


def cold(contenders: list[Contender], rounds: int, pairs: int, step: Step, seed: int = 0) -> tuple[Rounds, str]:
    """Nanoseconds per pair after the caches were emptied, one median per round; and how it was read."""
    tick, per_ns, source = tick_source()
    evict, filler = evictor()
    loops = {contender.label: cold_loop(contender, tick) for contender in contenders}
    nothing = cold_loop(None, tick)
    measured = Rounds({label: [] for label in loops})
    shuffled, order = list(contenders), random.Random(seed)
    with without_gc():
        for loop in (*loops.values(), nothing):
            loop(3, [], _no_eviction)
        for _ in range(rounds):
            order.shuffle(shuffled)
            baseline: list[int] = []
            nothing(pairs, baseline, evict)
            for contender in shuffled:
                ticks: list[int] = []
                loops[contender.label](pairs, ticks, evict)
                measured.ns[contender.label].append(float(np.median(ticks) - np.median(baseline)) / per_ns)
                contender.reset()
            step()
    return measured, f"caches emptied by reading {filler}, time read outside with {source}"


def _no_eviction() -> None:
    """Warm the loop's own code up."""


def readings(contenders: list[Contender], rounds: int, step: Step) -> dict[str, Spread]:
    """The reading of an empty region in ns: the median of each round."""
    measured: dict[str, list[float]] = {c.label: [] for c in contenders if c.reads is not None}
    loops = {c.label: warm_loop(c) for c in contenders if c.reads is not None}
    with without_gc():
        for _ in range(rounds):
            for contender in contenders:
                if contender.reads is None:
                    continue
                contender.reset()
                loops[contender.label](1000)
                measured[contender.label].append(float(np.median(contender.reads()[-900:])))
                contender.reset()
            step()
    return {label: Spread.of(values) for label, values in measured.items()}


def tail(contenders: list[Contender], pairs: int, step: Step) -> dict[str, dict[str, float]]:
    """Percentiles in ns over many pairs without a reset in between, garbage collection on.

    The turns are a twentieth of the pairs each, so that a moment of trouble is everybody's.
    """
    loops = {contender.label: tail_loop(contender) for contender in contenders}
    outs = {contender.label: array("q", bytes(8 * min(pairs, contender.tail_pairs))) for contender in contenders}
    for contender in contenders:
        contender.reset()
        loops[contender.label](0, min(100, len(outs[contender.label])), outs[contender.label])
    for turn in range(20):
        for contender in contenders:
            out = outs[contender.label]
            loops[contender.label](turn * len(out) // 20, (turn + 1) * len(out) // 20, out)
        step()
    result = {}
    for contender in contenders:
        contender.reset()
        durations = np.frombuffer(outs[contender.label], dtype=np.int64)
        p50, p999, p9999 = np.percentile(durations, (50, 99.9, 99.99))
        result[contender.label] = {
            "pairs": len(durations),
            "p50": float(p50),
            "p99.9": float(p999),
            "p99.99": float(p9999),
            "max": float(durations.max()),
        }
    return result


def bytes_kept(contenders: list[Contender], pairs: int, step: Step) -> dict[str, float]:
    """Bytes that are still allocated after many pairs, per pair, as ``tracemalloc`` counts them."""
    kept = {}
    for contender in contenders:
        loop = warm_loop(contender)
        count = min(pairs, contender.tail_pairs // 10)
        loop(2000)
        contender.reset()
        loop(10)
        gc.collect()
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        loop(count)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        contender.reset()
        kept[contender.label] = (after - before) / count
        step()
    return kept


def block_sizes(timer: Any, key: Any) -> dict[str, float]:
    """What this timer's own blocks weigh: intervals in a full one, bytes of it, bytes per interval."""
    for _ in range(5000):
        timer.start(key)
        timer.end(key)
    # The first blocks are smaller, for regions that are seldom used.
    block = max(timer.region(key)._intervals.kept()[0], key=len)
    intervals, size = len(block) // 16, sys.getsizeof(block)
    timer.reset()
    return {"intervals": intervals, "bytes": size, "bytes_per_interval": size / intervals}


def device_calls(package: Any, device: Any, regions: int = 2000) -> dict[str, float]:
    """Calls per region that reach the torch test device once its pools are filled, none of its work in flight."""
    timer, key = package.CPUGPUTimer(), package.TimeType.BATCH

    def run(count: int) -> None:
        for _ in range(count):
            timer.start(key, gpu=True)
            timer.end(key, gpu=True)

    run(500)
    device.reset_counters()
    run(regions)
    counts = device.counters()
    return {
        "records": counts.records / regions,
        "queries": counts.own_queries / regions,
        "times read": counts.elapsed_calls / regions,
        "stream look-ups": counts.stream_lookups / regions,
        "events made": counts.events_created / regions,
        "synchronizes": counts.synchronizes / regions,
    }
