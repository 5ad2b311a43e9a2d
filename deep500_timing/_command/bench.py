"""``deep500-timing bench``: the cost of timing on this machine."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from deep500_timing._command._app import click

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 7
_CALLS = 2_000


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead.")
def bench(as_json: bool) -> None:
    """Measure the cost of timing an empty region, compared with two reads of the clock.

    Takes about a second. Each figure is the minimum of several rounds, since other processes use the machine too.
    """
    from deep500_timing._command._output import print_json
    from deep500_timing._recording.recorder import COMPILED
    from deep500_timing._summary.text import lines_of

    costs = {name: _cost_ns(loop) for name, loop in _loops().items()}
    if as_json:
        print_json({"compiled": COMPILED, "ns": costs})
        return
    base = costs["two clock reads"]
    rows = [("what", "cost", "clock pairs")]
    rows += [(name, f"{cost:.0f} ns", f"{cost / base:.2f} ×") for name, cost in costs.items()]
    form = "compiled" if COMPILED else "plain Python"
    click.echo(f"The hot path is {form}.\n")
    for line in lines_of(rows, left=1):
        click.echo(line)


def _loops() -> dict[str, Callable[[int], None]]:
    from deep500_timing.timer import Timer

    now = time.perf_counter_ns
    # Bounded, so that the memory of the measurement itself does not grow.
    kept, bounded, off = Timer(), Timer(keep_last=1000), Timer(enabled=False)
    handle = kept.region("with")

    def clock(count: int) -> None:
        for _ in range(count):
            now()
            now()

    def started(tmr: Timer, gpu: bool = False) -> Callable[[int], None]:
        start, end = tmr.start, tmr.end

        def loop(count: int) -> None:
            if gpu:
                for _ in range(count):
                    start("region", gpu=True)
                    end("region", gpu=True)
            else:
                for _ in range(count):
                    start("region")
                    end("region")

        return loop

    def held(count: int) -> None:
        for _ in range(count):
            with handle:
                pass

    return {
        "two clock reads": clock,
        "start and end": started(kept),
        "with, the region kept": held,
        "start and end, keep_last=1000": started(bounded),
        "start and end, gpu=True without a device": started(Timer(), gpu=True),
        "start and end, enabled=False": started(off),
    }


def _cost_ns(loop: Callable[[int], None]) -> float:
    # Other processes make a round longer, never shorter.
    least = float("inf")
    for _ in range(_ROUNDS):
        began = time.perf_counter_ns()
        loop(_CALLS)
        least = min(least, (time.perf_counter_ns() - began) / _CALLS)
    return least
