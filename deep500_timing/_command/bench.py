"""``deep500-timing bench``: the cost of timing on this machine."""

from __future__ import annotations

import time
import timeit

from deep500_timing._command._app import click

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

    costs = _costs_ns()
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


def _costs_ns() -> dict[str, float]:
    from deep500_timing.timer import Timer

    # Bounded, so that the memory of the measurement itself does not grow.
    kept, bounded, off = Timer(), Timer(keep_last=1000), Timer(enabled=False)
    pair = 'start("region"); end("region")'
    measured = {
        "two clock reads": ("now(); now()", {"now": time.perf_counter_ns}),
        "start and end": (pair, {"start": kept.start, "end": kept.end}),
        "with, the region kept": ("with region: pass", {"region": kept.region("with")}),
        "start and end, keep_last=1000": (pair, {"start": bounded.start, "end": bounded.end}),
        "start and end, gpu=True without a device": (
            'start("region", gpu=True); end("region", gpu=True)',
            {"start": kept.start, "end": kept.end},
        ),
        "start and end, enabled=False": (pair, {"start": off.start, "end": off.end}),
    }
    # Other processes make a round longer, never shorter.
    return {
        name: 1e9 * min(timeit.repeat(code, repeat=_ROUNDS, number=_CALLS, globals=names)) / _CALLS
        for name, (code, names) in measured.items()
    }
