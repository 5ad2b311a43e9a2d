"""How often a rank is called late: where none is, and where one is: `python -m benchmarks.stragglers`.

Worlds are simulated. In the first table operations are all that is seen: each rank comes to each at a time that is
drawn alike for all, every rank waits for the last one, and the transfer takes 1 ms. Then one rank, drawn too, comes
late by the transfer time. In the second table regions are seen as well, ranks differ by nature, and the cause is asked
for; see `benchmarks/straggler_worlds.py`. Every world has a seed of its own, so the tables are the same on every
machine.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks import straggler_worlds
from deep500_timing._distributed.late import LEAST_SHARE, judge
from deep500_timing._distributed.operation_stragglers import LEAST_OPERATIONS, LEVEL, find_late_rank

OPERATIONS = 1000
RANKS = (2, 4, 8, 16, 64)
KINDS = ("uniform", "exponential", "spikes", "autocorrelated")
LABELS = {
    "uniform": "uniform, 0 to 1 ms",
    "exponential": "exponential, mean 1 ms",
    "spikes": "2 % of 20 ms, else 0 to 0.1 ms",
    "autocorrelated": "normal, 0.69 ms, autocorrelated 0.9",
}


def arrivals(rng: Any, kind: str, operations: int, ranks: int) -> Any:
    """When each rank comes to each operation, in ms, of shape (operations, ranks)."""
    shape = (operations, ranks)
    if kind == "uniform":
        return rng.random(shape)
    if kind == "exponential":
        return rng.exponential(1.0, shape)
    if kind == "spikes":
        return np.where(rng.random(shape) < 0.02, 20.0, 0.1 * rng.random(shape))
    found = rng.normal(0.0, 0.3, shape)
    found[0] *= 1 / np.sqrt(1 - 0.9**2)
    for i in range(1, operations):
        found[i] += 0.9 * found[i - 1]
    return found


def world(seed: int, kind: str, operations: int, ranks: int, late_ms: float) -> tuple[Any, int]:
    """Durations in ns, of shape (operations, ranks), and which rank is late by ``late_ms``."""
    rng = np.random.default_rng([seed, KINDS.index(kind), ranks])
    came = arrivals(rng, kind, operations, ranks)
    late = int(rng.integers(ranks))
    came[:, late] += late_ms
    return (came.max(axis=1, keepdims=True) - came + 1.0) * 1e6, late


def row(kind: str, ranks: int, *, worlds: int = 1000, operations: int = OPERATIONS) -> dict[str, float]:
    """Shares of the worlds.

    Returns:
        ``false``: some rank was named though none is late; ``right``, ``wrong``: where one is late by the transfer
        time, it was named, or another one was.
    """
    none = [find_late_rank(world(seed, kind, operations, ranks, 0.0)[0]).rank for seed in range(worlds)]
    found = [world(seed, kind, operations, ranks, 1.0) for seed in range(worlds)]
    named = [(find_late_rank(durations).rank, late) for durations, late in found]
    return {
        "false": sum(rank is not None for rank in none) / worlds,
        "right": sum(rank == late for rank, late in named) / worlds,
        "wrong": sum(rank not in (None, late) for rank, late in named) / worlds,
    }


def as_lines(*, worlds: int = 1000, operations: int = OPERATIONS) -> list[str]:
    """The table in Markdown."""
    lines = [
        f"How often a rank is called late, of {worlds} simulated worlds a cell, each of {operations} operations with a "
        f"transfer of 1 ms (level {LEVEL}, at least {LEAST_OPERATIONS} independent operations). First: none is late "
        "and one was named. Second: one is late by 1 ms and was named; in brackets, another one was.",
        "",
        "| arrivals | " + " | ".join(f"{ranks} ranks" for ranks in RANKS) + " |",
        "|---|" + "---:|" * len(RANKS),
    ]
    for kind in KINDS:
        cells = []
        for ranks in RANKS:
            found = row(kind, ranks, worlds=worlds, operations=operations)
            cells.append(f"{found['false']:.1%}, {found['right']:.1%} ({found['wrong']:.1%})")
        lines.append(f"| {LABELS[kind]} | " + " | ".join(cells) + " |")
    return [*lines, ""]


TRAININGS = (8, 64, 512)
DELAYS = (0.10, 0.05)


def training_row(ranks: int, delay: float, *, worlds: int = 1000) -> dict[str, float]:
    """Shares of the worlds, by the seeds from 0.

    Returns:
        ``rank``: the late rank was named and no other; ``cause``: and where it is late as well; ``wrong``: another
        one was named, or nobody is late and one was named; ``where``: the late rank was named and a wrong cause.
    """
    counts = dict.fromkeys(("rank", "cause", "wrong", "where"), 0)
    for seed in range(worlds):
        steps, late, place = straggler_worlds.world(seed, ranks, delay)
        found = judge(steps)
        right = bool(delay) and found.ranks == (late,)
        counts["rank"] += right
        counts["cause"] += right and found.region == place
        counts["wrong"] += bool(found.ranks) and not right
        counts["where"] += right and found.region not in (place, None)
    return {name: count / worlds for name, count in counts.items()}


def training_lines(*, worlds: int = 1000, rows: tuple[int, ...] = TRAININGS) -> list[str]:
    """The table of trainings in Markdown."""
    lines = [
        f"A training of {straggler_worlds.STEPS} steps, {worlds} worlds a cell (seeds 0 to {worlds - 1}): one rank is "
        "late in IO, FORWARD, BACKWARD, COMM or outside of all regions, drawn alike. Ranks differ by 1 % in each "
        "region, own times are autocorrelated with a spread of 3 % and spikes, "
        "see `benchmarks/straggler_worlds.py`. Named: the late rank and no other. Cause: and the region as well. "
        f"Lateness below {LEAST_SHARE:.0%} of a step is never called late. For a table beyond the seeds that the rule "
        "was tried on while it was made, the first 500 of 8 ranks may be left out.",
        "",
        "| ranks | false alarms | delay | named | and the cause | a wrong rank | a wrong cause |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in rows:
        false = training_row(ranks, 0.0, worlds=worlds)["wrong"]
        for delay in DELAYS:
            found = training_row(ranks, delay, worlds=worlds)
            lines.append(
                f"| {ranks} | {false:.1%} | {delay:.0%} of a step | {found['rank']:.1%} | {found['cause']:.1%} | "
                f"{found['wrong']:.1%} | {found['where']:.1%} |"
            )
    return [*lines, ""]


def main() -> None:
    """Simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=1000, help="worlds in each cell, twice")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--only", choices=["operations", "trainings"], help="one of the two tables")
    parser.add_argument("--ranks", type=int, nargs="*", default=TRAININGS, help="sizes of the trainings")
    chosen = parser.parse_args()
    if chosen.only != "trainings":
        print("\n".join(as_lines(worlds=chosen.worlds, operations=chosen.operations)))
    if chosen.only != "operations":
        print("\n".join(training_lines(worlds=chosen.worlds, rows=tuple(chosen.ranks))))


if __name__ == "__main__":
    main()
