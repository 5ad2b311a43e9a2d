"""Simulated runs in which nothing is wrong, of 20 kinds. `benchmarks.findings` counts those with a finding.

The real log writes them on a clock that moves only when told. A step has four regions whose times are log-normal, with
neighbours that depend on each other; several ranks wait for each other in a collective. Every run has a seed, so the
count is the same on every machine. The rules were made with other seeds than those of the table.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from deep500_timing import Timer
from deep500_timing._views.findings import find
from deep500_timing.runs import Run, RunLog
from deep500_timing.testing import ManualClock

PARTS = {"IO": 0.8, "FORWARD": 22.0, "BACKWARD": 44.0, "optimizer": 5.0}
STEP = sum(PARTS.values())
"""Milliseconds."""
SPREAD = 0.03
BETWEEN_RANKS = 0.005
KINDS = (
    "independent steps",
    "dependent steps",
    "heavy tails",
    "slow wave",
    "random walk",
    "faster second half",
    "evaluation every eighth",
    "checkpoints outside the steps",
    "checkpoints in the steps",
    "two outliers",
    "accumulation of 4",
    "bucketed lengths",
    "lengths by rank",
    "slow start",
    "short",
    "resumed",
    "tiny steps",
    "memory levels off",
    "memory saw",
    "slow first step of an epoch",
)


def noise(rng: Any, steps: int, phi: float = 0.9, spread: float = SPREAD, *, heavy: bool = False) -> Any:
    """Factors around 1, shape ``(steps,)``."""
    draws = rng.standard_t(3, steps) / np.sqrt(3) if heavy else rng.normal(size=steps)
    series, level = np.empty(steps), rng.normal()
    for step in range(steps):
        level = phi * level + np.sqrt(1 - phi**2) * draws[step]
        series[step] = level
    return np.exp(spread * np.clip(series, -12, 12))


class Healthy:
    """One run: the times of its parts in ms, and what else its kind has."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = np.random.default_rng(seed)
        self.kind = KINDS[seed % len(KINDS)]
        self.ranks, self.steps = int(rng.choice([1, 2, 4])), int(rng.choice([200, 400]))
        if self.kind == "lengths by rank":
            self.ranks = max(self.ranks, 2)
        if self.kind == "short":
            self.steps = int(rng.integers(12, 60))
        if self.kind == "tiny steps":
            self.steps, self.ranks = 1500, 1
        phi = {"independent steps": 0.0, "dependent steps": 0.95}.get(self.kind, 0.9)
        shape = (self.ranks, self.steps)
        self.parts = {
            name: took
            * np.array([noise(rng, self.steps, phi, heavy=self.kind == "heavy tails") for _ in range(self.ranks)])
            * np.exp(BETWEEN_RANKS * rng.normal(size=(self.ranks, 1)))
            for name, took in PARTS.items()
        }
        self.epochs, self.sessions = 4, 1
        self.inside: dict[int, float] = {}
        self.after: dict[int, tuple[str, float]] = {}
        self.memory = 2e9 + np.cumsum(rng.normal(0, 2e5, self.steps)) * 0.2 + rng.normal(0, 3e6, self.steps)
        for part in self.parts.values():
            part[:, 0] *= 1.5
        self._vary(shape)

    def _vary(self, shape: tuple[int, int]) -> None:
        rng, parts, steps, kind = self.rng, self.parts, self.steps, self.kind
        compute = (parts["FORWARD"], parts["BACKWARD"])
        at = np.arange(steps)
        factor: Any = 1.0
        if kind == "heavy tails":
            for rank in range(self.ranks):
                for step in np.flatnonzero(rng.random(steps) < 0.02).tolist():
                    parts[str(rng.choice(list(PARTS)))][rank, step] *= rng.uniform(1.5, 3.5)
        elif kind == "slow wave":
            factor = 1 + 0.03 * np.sin(np.linspace(0, 2 * np.pi * rng.uniform(1, 3), steps) + rng.uniform(0, 6))
        elif kind == "random walk":
            factor = np.exp(np.cumsum(rng.normal(0, 0.0012, steps)))
        elif kind == "faster second half":
            factor = np.where(at >= steps * rng.uniform(0.3, 0.7), 0.7, 1.0)
        elif kind == "bucketed lengths":
            factor = rng.choice([0.5, 0.75, 1.0, 1.5, 2.0], steps)
        elif kind == "lengths by rank":
            factor = np.exp(0.1 * rng.normal(size=shape))
        elif kind == "slow start":
            factor = np.where(at < 5, 3.0, 1.0)
        elif kind == "evaluation every eighth":
            each = 0.1 * STEP * steps / 8
            self.after = {int(step): ("VALIDATION", each) for step in range(steps // 8 - 1, steps, steps // 8)}
        elif kind == "checkpoints outside the steps":
            self.after = dict.fromkeys(range(49, steps, 50), ("checkpoint", 60.0))
        elif kind == "checkpoints in the steps":
            self.inside = dict.fromkeys(range(99, steps, 100), 1.5 * STEP)
        elif kind == "two outliers":
            parts["BACKWARD"][:, rng.choice(steps, 2, replace=False)] += 10 * STEP * steps / 800
        elif kind == "accumulation of 4":
            parts["optimizer"] *= np.where(at % 4 == 3, 6.0, 0.01)
        elif kind == "resumed":
            self.sessions = 2
        elif kind == "tiny steps":
            for part in parts.values():
                part /= 200
            parts["IO"] *= 2
        elif kind == "memory levels off":
            self.memory = 4e9 + 6e8 * (1 - np.exp(-at / (steps * 0.08))) + rng.normal(0, 4e6, steps)
        elif kind == "memory saw":
            self.memory = 4e9 + 4e8 * ((at % 67) / 67) + rng.normal(0, 4e6, steps)
        elif kind == "slow first step of an epoch":
            parts["IO"][:, :: steps // 4] += 150
        for part in compute:
            part *= factor

    def write(self, folder: Path) -> None:
        """Write it by the real log."""
        own = sum(self.parts.values()) + 0.2
        for step, took in self.inside.items():
            own[:, step] += took
        waits = own.max(axis=0) - own + 1.2
        for rank in range(self.ranks):
            each = self.steps // self.sessions
            for session in range(self.sessions):
                self._session(folder, rank, range(session * each, (session + 1) * each), waits)

    def _session(self, folder: Path, rank: int, steps: range, waits: Any) -> None:
        clock = ManualClock()
        timer = Timer(clock=clock)
        in_epoch: dict[int, list[int]] = defaultdict(list)
        for step in steps:
            in_epoch[step * self.epochs // self.steps].append(step)
        # The age of this process is no part of the run.
        process_start = mock.patch("deep500_timing.runs._header._process_start_unix_ns", return_value=None)
        with process_start, RunLog(folder, timer, rank=rank, flush_s=None) as log:
            for of in in_epoch.values():
                with timer.region("EPOCH"):
                    for step in of:
                        self._step(timer, log, clock, rank, step, waits)
                        log.sample("process.rss_bytes", float(self.memory[step]))

    def _step(self, timer: Any, log: Any, clock: Any, rank: int, step: int, waits: Any) -> None:
        def spend(name: str, milliseconds: float) -> None:
            with timer.region(name):
                clock.advance_ns(int(milliseconds * 1e6))

        with timer.region("BATCH"):
            for name, part in self.parts.items():
                spend(name, part[rank, step])
            if step in self.inside:
                spend("checkpoint", self.inside[step])
            clock.advance_ns(int(0.003 * sum(part[rank, step] for part in self.parts.values()) * 1e6))
            if self.ranks > 1:
                start = clock.now_ns()
                spend("COMM", waits[rank, step])
                log.collective("all_reduce", start, clock.now_ns(), sequence=step, nbytes=1 << 24)
        if step in self.after:
            spend(*self.after[step])


def count(seeds: range, *, progress: bool = False) -> tuple[Counter[str], list[tuple[int, str, str]]]:
    """Findings by rule, and for each run with one its seed, its kind and the sentence."""
    by_rule: Counter[str] = Counter()
    said = []
    for place, seed in enumerate(seeds):
        folder = Path(tempfile.mkdtemp(prefix="healthy-"))
        made = Healthy(seed)
        try:
            made.write(folder / "run")
            with Run.open(folder / "run") as run:
                found = find(run)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for finding in found:
            by_rule[finding.rule] += 1
            said.append((seed, made.kind, finding.text))
            print(seed, made.kind, made.ranks, finding.text, file=sys.stderr)
        if progress and place % 20 == 19:
            print(f"{place + 1} of {len(seeds)}: {len({seed for seed, *_ in said})} with a finding", file=sys.stderr)
    return by_rule, said
