"""``python -m benchmarks.bench_before_after --before REF``: what has become more than 10 % slower since a commit.

The hot path, and the prices of making timers, of reading and of reporting (``prices.py``). Both packages are built in
the same way, by today's compiler, into a temporary folder. Each round starts one process of either, in an order drawn
again, so that both meet the same machine; a process measures its statements in short turns and keeps the quickest turn
of each, which what else the machine does reaches least.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import click

ROOT = Path(__file__).parents[1]
CLOCK = "two clock reads"
STATEMENTS = {
    CLOCK: "clock(); clock()",
    "start/end": "tmr.start(key); tmr.end(key)",
    "start/end, string key": "tmr.start(name); tmr.end(name)",
    "with region": "with tmr.region(key): pass",
    "handle start/end": "handle.start(); handle.end()",
    "with handle": "with handle: pass",
    "iterate": "for _ in tmr.iterate(items, key): pass",
    "start/end, disabled": "off.start(key); off.end(key)",
    "with region, disabled": "with off.region(key): pass",
    "iterate, disabled": "for _ in off.iterate(items, key): pass",
    "start/end, keep_last=1000": "few.start(key); few.end(key)",
    "gpu=True on ManualDeviceClock": "dev.start(key, gpu=True); dev.end(key, gpu=True)",
}
_LOOP = """
def loop(n, {names}):
    start = clock()
    for _ in {over}:
        {statement}
    return (clock() - start) / n
"""
_PAIRS = 2000
REFERENCE = "numpy.sort of 10⁶ numbers"
_SLOWER = 1.1


def measure(turns: int) -> dict[str, float]:
    """Nanoseconds of each statement in this process, with whichever package it imports; the loop is taken off."""
    import deep500_timing
    from deep500_timing import Timer, TimeType
    from deep500_timing.testing import ManualDeviceClock

    wanted = os.environ["PYTHONPATH"]
    if not (deep500_timing.compiled and Path(deep500_timing.__file__).is_relative_to(wanted)):
        raise click.ClickException(f"{deep500_timing.__file__} is not the compiled package in {wanted}.")
    tmr, off, few = Timer(), Timer(enabled=False), Timer(keep_last=1000)
    dev = Timer(ManualDeviceClock())
    names: dict[str, Any] = {
        "clock": perf_counter_ns,
        "tmr": tmr,
        "off": off,
        "few": few,
        "dev": dev,
        "key": TimeType.BATCH,
        "name": "some region",
        "handle": tmr.region(TimeType.FORWARD),
        "items": range(_PAIRS),
    }
    loops = {label: _loop(statement, names) for label, statement in {"": "pass", **STATEMENTS}.items()}
    quickest = dict.fromkeys(loops, float("inf"))
    for turn in range(turns + 1):
        for label, loop in loops.items():
            pairs = _PAIRS // 10 if "gpu" in label and turn else _PAIRS
            taken = loop(pairs)
            if turn:  # The first warms it up.
                quickest[label] = min(quickest[label], taken)
        for timer in (tmr, few, dev):
            timer.reset()
    return {label: quickest[label] - quickest[""] for label in STATEMENTS}


def _loop(statement: str, names: dict[str, Any]) -> Any:
    over = "range(n)"
    if statement.startswith("for _ in "):
        over, statement = statement.removeprefix("for _ in ").removesuffix(": pass"), "pass"
    source = _LOOP.format(names=", ".join(f"{name}={name}" for name in names), over=over, statement=statement)
    space = dict(names)
    exec(compile(source, f"<{statement}>", "exec"), space)  # nothing is called in between
    return space["loop"]


def build(ref: str | None, folder: Path) -> Path:
    """The package as it was at a commit, or as it lies in the tree, compiled and unpacked.

    Raises:
        click.ClickException: Git does not know the commit, or it cannot be built.
    """
    source, place = folder / "source", folder / "package"
    place.mkdir(parents=True)
    if ref is None:
        source = ROOT
    else:
        source.mkdir()
        archive = _run(["git", "-C", str(ROOT), "archive", ref])
        _run(["tar", "-x", "-C", str(source)], given=archive)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    how = ["install", "--no-build-isolation", "--no-deps", "--target", str(place), str(source)]
    _run(pip + how, DEEP500_TIMING_BUILD="compiled")
    return place


def _run(command: list[str], given: bytes | None = None, **environment: str) -> bytes:
    done = subprocess.run(command, input=given, capture_output=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout


def race(places: dict[str, Path], rounds: int, command: list[str], seed: int = 0) -> dict[str, dict[str, list[float]]]:
    """What a program that prints numbers by name says of either side, one value a round."""
    found: dict[str, dict[str, list[float]]] = {side: {} for side in places}
    order, sides = random.Random(seed), list(places)
    for _ in range(rounds):
        order.shuffle(sides)
        for side in sides:
            # Run as a file, so that the tree is not in its path.
            said = _run([sys.executable, *command], PYTHONPATH=str(places[side]))
            for label, taken in json.loads(said).items():
                found[side].setdefault(label, []).append(taken)
    return found


def table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown: the median of the rounds, and of each round's ratio of now to before with its quartiles."""
    from benchmarks._summary import Spread, ratio

    lines = [
        "|  | before, ns | now, ns | now ÷ before | now ÷ two clock reads |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for label in STATEMENTS:
        before, now = found["before"][label], found["now"][label]
        change, to_clock = ratio(now, before), ratio(now, found["now"][CLOCK])
        lines.append(
            f"| {label}<br>`{STATEMENTS[label]}` | {Spread.of(before).median:.1f} | {Spread.of(now).median:.1f} "
            f"| {change.median:.3f} ({change.low:.3f}…{change.high:.3f}) | {to_clock.median:.3f} |"
        )
    return lines


def prices_table(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """Markdown: the least of the rounds in thousandths of the reference. A side that does not have it has a dash."""
    lines = ["|  | before | now | now ÷ before |", "| --- | ---: | ---: | ---: |"]
    for label in found["now"] | found["before"]:
        before, now = (min(found[side].get(label, [float("nan")])) * 1e3 for side in ("before", "now"))
        cells = ["–" if math.isnan(value) else f"{value:.2f}" for value in (before, now, now / before)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


def slower(found: dict[str, dict[str, list[float]]]) -> list[str]:
    """A line for each row that is more than 10 % slower now, by the least of its rounds."""
    lines = []
    for label, now in found["now"].items():
        before = found["before"].get(label)
        if before and min(now) > _SLOWER * min(before):
            lines.append(f"SLOWER: {label}: {min(now) / min(before):.2f} × of before")
    return lines


@click.command()
@click.option("--before", "ref", help="The commit to compare the tree with.")
@click.option("--rounds", default=10, show_default=True, help="Processes of either side.")
@click.option("--turns", default=100, show_default=True, help="Turns of each statement in a process.")
@click.option("--prices", "price_rounds", default=3, show_default=True, help="The same, of what is not the hot path.")
@click.option("--measure", "measured", type=int, hidden=True, help="Be one such process, of so many turns.")
def main(ref: str | None, rounds: int, turns: int, price_rounds: int, measured: int | None) -> None:
    """Race the tree against an earlier commit."""
    if measured is not None:
        click.echo(json.dumps(measure(measured)))
        return
    if not ref:
        raise click.UsageError("Say what to compare with: --before REF, for example --before HEAD~10.")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deep500-timing-before-")))
        places = {"before": build(ref, folder / "before"), "now": build(None, folder / "now")}
        hot = race(places, rounds, [__file__, "--measure", str(turns)])
        prices = race(places, price_rounds, [str(Path(__file__).with_name("prices.py")), "--json"])
        lines = [*table(hot), "", f"Processor time in thousandths of {REFERENCE}:", "", *prices_table(prices), ""]
        click.echo("\n".join([*lines, *(slower(hot) + slower(prices) or ["No row is more than 10 % slower."])]))


if __name__ == "__main__":
    main()
