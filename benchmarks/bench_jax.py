"""Plain JAX: the cost of ``timed_step`` on the host, and its times next to those of independent clocks.

python benchmarks/bench_jax.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

import deep500_timing_jax as timer

STEPS = 4000


def overhead_us() -> float:
    """Microseconds that a timed step takes more than a plain one, by the fastest of interleaved rounds."""
    tmr = timer.CPUGPUTimer(keep_last=100)
    step = jax.jit(lambda x: x + 1)
    timed = timer.timed_step(step, tmr, every=0)
    step(1.0)

    def took(function: Callable[[float], object]) -> float:
        begin = time.perf_counter()
        for _ in range(STEPS):
            function(1.0)
        return (time.perf_counter() - begin) / STEPS * 1e6

    rounds = [(took(timed), took(step)) for _ in range(9)]
    return min(ours for ours, _ in rounds) - min(plain for _, plain in rounds)


def deviation() -> tuple[float, float]:
    """How far ``10 steps`` and the device's time of a region are from a clock that the steps read themselves."""
    ended = []

    def sleep(x: object) -> object:
        time.sleep(0.05)
        ended.append(time.perf_counter())
        return x

    step = jax.jit(lambda x: jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), x))
    tmr = timer.CPUGPUTimer()
    timed = timer.timed_step(step, tmr, every=10)
    x = step(jnp.zeros(())).block_until_ready()
    ended.clear()
    tmr.watch(x)
    with tmr.region("all", gpu=True):
        for _ in range(61):
            x = timed(x)
        tmr.watch(x)
    tmr.complete_all()
    ours = tmr.get_time("10 steps", gpu=True)
    # The wait of call 10 is for step 9, counted from 1.
    theirs = [ended[10 * n + 18] - ended[10 * n + 8] for n in range(len(ours))]
    whole = tmr.get_time("all", gpu=True)[0]
    steps = max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))
    return steps, abs(whole / (ended[-1] - ended[0] + 0.05) - 1)


if __name__ == "__main__":
    print(f"timed_step: {overhead_us():.1f} us a step")
    print("deviation of '10 steps' {:.2%}, of a region on the device {:.2%}".format(*deviation()))
