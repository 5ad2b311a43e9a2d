"""How often something is found where nothing is wrong: `python -m benchmarks.healthy_runs` writes it to FINDINGS.md.

Runs are made up and written by the real log: steps of five regions whose times are log-normal or have heavy tails, with
neighbours that depend on each other, 2 % of the steps up to 3.5 times as long, one rank or several that wait for each
other in a collective, memory that wanders. Every run has a seed of its own, so the table is the same on every machine.
The seeds from 0 on were looked at while the rules were made, those from 60 000 on were not: the table is of them.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from deep500_timing import Timer
from deep500_timing._views.findings import find
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

PARTS = {"IO": 1.5, "FORWARD": 30.0, "BACKWARD": 60.0, "optimizer": 6.0}
"""Milliseconds."""
KINDS = ("white", "autocorrelated 0.5", "autocorrelated 0.9", "heavy tail", "heavy tail, autocorrelated 0.9")
SPREAD = 0.03
BETWEEN_RANKS = 0.01
SLOW_SHARE = 0.02
"""Of the steps of a rank, those in which one region takes up to 3.5 times as long, where tails are heavy."""


def noise(rng: Any, kind: str, steps: int) -> Any:
    """Factors around 1, for one region on one rank."""
    draws = rng.standard_t(3, steps) / np.sqrt(3) if kind.startswith("heavy") else rng.normal(size=steps)
    phi = float(kind.rpartition(" ")[2]) if "autocorrelated" in kind else 0.0
    series = np.empty(steps)
    level = rng.normal()
    for step in range(steps):
        level = phi * level + np.sqrt(1 - phi**2) * draws[step]
        series[step] = level
    return np.exp(SPREAD * np.clip(series, -12, 12))


def write(folder: Path, seed: int, *, steps: int = 300) -> str:
    """Write one healthy run; returns its kind."""
    rng = np.random.default_rng(seed)
    kind, ranks = KINDS[seed % len(KINDS)], (1, 2, 4)[seed % 3]
    factors = {
        (name, rank): noise(rng, kind, steps) * np.exp(BETWEEN_RANKS * rng.normal())
        for name in PARTS
        for rank in range(ranks)
    }
    if kind.startswith("heavy"):
        for rank in range(ranks):
            for step in np.flatnonzero(rng.random(steps) < SLOW_SHARE).tolist():
                factors[str(rng.choice(list(PARTS))), rank][step] *= rng.uniform(1.5, 3.5)
    took = {key: PARTS[key[0]] * 1e6 * values for key, values in factors.items()}
    arrive = np.array([sum(took[name, rank] for name in PARTS) for rank in range(ranks)])
    waits = arrive.max(axis=0) - arrive + 1.5e6
    for rank in range(ranks):
        clock = ManualClock()
        timer = Timer(clock=clock)
        memory = 2e9 + np.cumsum(rng.normal(0, 2e5, steps)) * 0.2 + rng.normal(0, 3e6, steps)
        with RunLog(folder, timer, rank=rank, flush_s=None) as log, timer.region("EPOCH"):
            for step in range(steps):
                with timer.region("BATCH"):
                    for name in PARTS:
                        with timer.region(name):
                            clock.advance_ns(int(took[name, rank][step] * (3 if step == 0 else 1)))
                    if ranks > 1:
                        start = clock.now_ns()
                        with timer.region("COMM"):
                            clock.advance_ns(int(waits[rank, step]))
                        log.collective("all_reduce", start, clock.now_ns(), sequence=step, nbytes=1 << 22)
                log.sample("process.rss_bytes", float(memory[step]))
    return kind


def count(seeds: range, *, steps: int = 300, progress: bool = False) -> tuple[Counter[str], list[tuple[int, str, str]]]:
    """Findings by rule, and for each run with one its seed, its kind and what was said."""
    by_rule: Counter[str] = Counter()
    said = []
    for place, seed in enumerate(seeds):
        folder = Path(tempfile.mkdtemp(prefix="healthy-"))
        try:
            kind = write(folder / "run", seed, steps=steps)
            with Run.open(folder / "run") as run:
                found = find(run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for finding in found:
            by_rule[finding.rule] += 1
            said.append((seed, kind, finding.text))
        if progress and place % 10 == 9:
            print(f"{place + 1} of {len(seeds)}: {len({seed for seed, *_ in said})} with a finding", file=sys.stderr)
    return by_rule, said


def main() -> None:
    """Count, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--first", type=int, default=60_000, help="The first run's seed.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("FINDINGS.md"))
    arguments = parser.parse_args()
    by_rule, said = count(range(arguments.first, arguments.first + arguments.runs), progress=True)
    wrong = len({seed for seed, *_ in said})
    lines = [
        "# Findings where nothing is wrong",
        "",
        "Written by `python -m benchmarks.healthy_runs`, whose first lines say how the runs are made. At most 1 % was",
        "aimed at.",
        "",
        f"Seeds {arguments.first} to {arguments.first + arguments.runs - 1}.",
        "",
        f"**{wrong} of {arguments.runs} healthy runs ({wrong / arguments.runs:.1%}) have a finding.**",
        "",
    ]
    lines += [f"- run {seed} ({kind}): {text}" for seed, kind, text in said]
    lines += [f"- {rule}: {number}" for rule, number in by_rule.most_common()]
    arguments.output.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
