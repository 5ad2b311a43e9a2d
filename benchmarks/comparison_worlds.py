"""False alarms and power of ``ab`` in simulated worlds, step by step and run by run. Writes ``COMPARISON.md``.

Run it with ``python -m benchmarks.comparison_worlds > benchmarks/COMPARISON.md``. A run has 300 steps with a spread of
3 %, AR(1) or heavy tails (Student t3, and 2 % of the steps take 3 times as long). Its level differs from run to run,
from session to session, and drifts over the session. Each world's noise floor is measured by ``ab --same -n 10`` in a
session of its own. The functions that decide are those of the product.
"""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import numpy as np
from scipy.signal import lfilter

from deep500_timing.compare import _statistics as st
from deep500_timing.compare._runs import warm_up_of

STEPS, PAIRS, FLOOR_PAIRS = 300, 5, 10
SEED = 35


class World(NamedTuple):
    """The common part of an experiment's runs."""

    name: str
    run: float = 0.01
    session: float = 0.0
    drift: float = 0.0
    phi: float = 0.5
    heavy: bool = False
    quiet_floor: float = 1.0
    """How loud the machine was when the floor was measured, as a share of now."""


WORLDS = (
    World("runs 0.5 %", run=0.005),
    World("runs 1 %"),
    World("runs 2 %", run=0.02),
    World("runs 1 %, sessions 0.5 %", session=0.005),
    World("runs 0.5 %, sessions 1 %", run=0.005, session=0.01),
    World("runs 1 %, sessions 1 %, drift 2 %", session=0.01, drift=0.02),
    World("runs 0.5 %, sessions 1 %, drift 2 %", run=0.005, session=0.01, drift=0.02),
    World("runs 1 %, AR 0.9", phi=0.9),
    World("runs 1 %, AR 0.5, heavy tails", heavy=True),
    World("runs 2 %, AR 0.9, heavy tails", run=0.02, phi=0.9, heavy=True),
    World("runs 1 %, floor from a machine half as noisy", quiet_floor=0.5),
)


def differences(world: World, count: int, pairs: int, rng: np.random.Generator, louder: float = 1.0) -> np.ndarray:
    """Log medians of interleaved runs, B minus A, shape ``(count, pairs)``, without an effect."""
    runs = 2 * pairs
    level = rng.normal(0, world.session * louder, (count, 1)) + rng.normal(0, world.run * louder, (count, runs))
    level += world.drift * np.linspace(0, 1, runs)
    medians = np.empty((count, runs))
    for one in range(count):
        shocks = rng.standard_t(3, (runs, STEPS)) / math.sqrt(3) if world.heavy else rng.normal(0, 1, (runs, STEPS))
        noise = lfilter([math.sqrt(1 - world.phi**2)], [1, -world.phi], shocks, axis=1)
        steps = np.exp(0.03 * noise)
        if world.heavy:
            steps[rng.random((runs, STEPS)) < 0.02] *= 3
        steps[:, :10] *= np.linspace(4, 1, 10)
        medians[one] = [np.median(row[warm_up_of(row) :]) for row in steps]
    logs = np.log(medians) + level
    first, second = logs[:, ::2], logs[:, 1::2]
    turned = np.arange(pairs) % 2 == 1  # A B, B A, A B, ...
    return np.where(turned, first - second, second - first)


def experiment(found: np.ndarray, floor: st.Spread | None) -> tuple[bool, int]:
    """Whether ``ab`` says "slower", and after how many pairs it ends."""
    for pairs in range(st.FEWEST_PAIRS, PAIRS + 1):
        estimate, level = st.paired(found[:pairs].tolist(), floor), st.level_of_look(pairs, PAIRS)
        if estimate.slower_p <= level:
            return True, pairs
        if estimate.faster_p <= level:
            return False, pairs
    return False, PAIRS


def row(world: World, count: int) -> list[str]:
    """A line of the table."""
    rng = np.random.default_rng([SEED, WORLDS.index(world)])
    own = differences(world, count, PAIRS, rng)
    of_floor = differences(world, count, FLOOR_PAIRS, rng, world.quiet_floor)
    floors = [st.mean_and_spread(one.tolist())[1] for one in of_floor]
    cells = [world.name]
    for with_floor in (False, True):
        shares, lengths = [], []
        for effect in (0.0, math.log(1.05), math.log(1.2)):
            ends = [
                experiment(one + effect, floor if with_floor else None) for one, floor in zip(own, floors, strict=True)
            ]
            shares.append(np.mean([slower for slower, _ in ends]))
            lengths.append(np.median([pairs for _, pairs in ends]))
        cells += [f"{100 * shares[0]:.1f} %", f"{100 * shares[1]:.1f} %", f"{lengths[2]:.0f}"]
    return cells


def across(count: int) -> list[list[str]]:
    """Runs of other days, judged by the variance between sessions: 5 sessions of 3 runs against one session."""
    rng = np.random.default_rng(SEED)
    lines = []
    for run, session in ((0.01, 0.0), (0.01, 0.01), (0.005, 0.01), (0.02, 0.005)):
        cells = [f"runs {100 * run:g} %, sessions {100 * session:g} %"]
        for history, runs in ((3, 3), (5, 3), (10, 5)):
            alarms = 0
            for _ in range(count):
                a = rng.normal(0, session, (history, 1)) + rng.normal(0, run, (history, runs))
                b = rng.normal(0, session, (1, 1)) + rng.normal(0, run, (1, runs))
                alarms += st.across_sessions(a.tolist(), b.tolist()).slower_p <= st.ALPHA
            cells.append(f"{100 * alarms / count:.1f} %")
        lines.append(cells)
    return lines


def _table(heading: list[str], rows: list[list[str]]) -> str:
    lines = [heading, ["---", *["---:"] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Print the page."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    rows = [row(world, count) for world in WORLDS]
    error = 100 * math.sqrt(0.05 * 0.95 / count)
    levels = ", ".join(f"{st.level_of_look(pairs, PAIRS):g}" for pairs in (3, 4, 5))
    print(f"""# How often `ab` is wrong

Made by `python -m benchmarks.comparison_worlds {count} > benchmarks/COMPARISON.md`, seed {SEED}, {count} experiments a
world (standard error of 5 %: {error:.2f} points). Five pairs at most, looks after 3, 4 and 5 pairs at the
one-sided levels {levels}. A run has {STEPS} steps with a spread of 3 % and a warm-up of 10 slow ones, which
MSER-5 leaves out. "Floor": the variance is pooled with that of `ab --same -n {FLOOR_PAIRS}`, unless an F test at
{100 * st._NOISIER:g} % says that the experiment is noisier.
""")
    heading = [
        "world",
        "false alarms",
        "5 % found",
        "pairs for 20 %",
        "floor: false alarms",
        "5 % found",
        "pairs for 20 %",
    ]
    print(_table(heading, rows))
    print("""
Runs of different sessions, with the session as the unit: false alarms with so many sessions of history, each of so many
runs, against one new session.
""")
    print(_table(["world", "3 of 3 runs", "5 of 3 runs", "10 of 5 runs"], across(count)))


if __name__ == "__main__":
    main()
