"""How often a rank is called late where none is, and the right one where one is: `python -m benchmarks.stragglers`.

Every world has a seed, so the tables are the same on every machine. See `benchmarks/straggler_worlds.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from multiprocessing import get_context

import numpy as np

from benchmarks.straggler_worlds import LONG, NOISES, SHARES, operations_of, world
from deep500_timing._distributed.late import THRESHOLD, _evidence, judge

RANKS = (2, 4, 8, 64, 256)
WORLDS = {2: 500, 4: 500, 8: 500, 64: 120, 256: 30}
"""Worlds of a cell, by ranks."""
DELAYS = (0.01, 0.02, 0.05, 0.10)
Cell = tuple[str, int, float, str, bool, int, int]


def count(cell: Cell) -> Counter[str]:
    """The verdicts on the worlds of a cell: noise, ranks, delay, kind, operations alone, first seed, worlds."""
    noise, ranks, delay, kind, alone, first, worlds = cell
    found: Counter[str] = Counter(worlds=worlds)
    for seed in range(first, first + worlds):
        made = world(seed, noise, ranks, delay, kind, steps=1000 if kind == "now and then" else None)
        said = judge(operations_of(made.steps) if alone else made.steps)
        found["listed"] += any(rank in said.intermittent for rank in made.late)
        found["others listed"] += any(rank not in (*made.late, 0) for rank in said.intermittent)
        if not said.ranks:
            found["nobody"] += 1
            continue
        # In the worlds in which rank 0 evaluates, naming it would be true.
        right = set(said.ranks) == set(made.late) if made.late else kind == "evaluation" and said.ranks == (0,)
        found["right" if right else "wrong"] += 1
        if right and made.region is not None:
            found["cause" if said.region == made.region else "no cause" if said.region is None else "wrong cause"] += 1
    return found


def cells(share: float, sizes: tuple[int, ...], noises: tuple[str, ...], first: int = 0) -> list[Cell]:
    """All cells of the tables; ``share`` of the worlds."""
    found: list[Cell] = []
    for noise in noises:
        for ranks in sizes:
            worlds = max(round(WORLDS[ranks] * share), 1)
            found.append((noise, ranks, 0.0, "none", False, first, worlds))
            found += [(noise, ranks, delay, "late", False, first, worlds if delay == 0.05 else max(worlds // 4, 1))
                      for delay in DELAYS]  # fmt: skip
            found += [(noise, ranks, delay, kind, True, first, max(worlds // 2, 1))
                      for delay, kind in ((0.0, "none"), (0.05, "late"))]  # fmt: skip
            found.append((noise, ranks, 1.0, "evaluation", False, first, max(worlds // 4, 1)))
    for ranks in sizes:
        worlds = max(round(WORLDS[ranks] * share / 4), 1)
        if ranks > 8 and "ar5" in noises:
            found.append(("ar5", ranks, 0.05, "host late", False, first, worlds))
        if "ar5" in noises:
            found.append(("ar5", ranks, 0.30, "now and then", False, first, worlds))
    if "ar5" in noises:
        found += [("ar5", 16, delay, "host late", False, first, max(round(200 * share), 1)) for delay in (0.05, 0.2)]
        found += [("host", 16, 0.05, "host late", False, first, max(round(100 * share), 1))]
        found += [("lengths", 16, 0.0, "none", False, first, max(round(200 * share), 1))]
    return found


def oracle(ranks: int, spread: float, worlds: int = 1000, delay: float = 0.05) -> float:
    """The share of late ranks that a test finds which knows more than any can: a bound for the ones that do not.

    It knows the times without noise from step to step, the spread of the ranks, the delay, and the threshold that
    1 % of the worlds without a late rank exceed.
    """
    rng = np.random.default_rng([ranks, round(spread * 1000)])

    def largest(late: bool) -> tuple[float, bool]:
        own = SHARES * spread * rng.standard_normal((ranks, len(SHARES)))
        rank = int(rng.integers(ranks))
        own[rank, rng.integers(len(SHARES))] += delay * late
        evidence = _evidence(own, np.full(own.shape, 1e-30), SHARES, [delay], [spread], [0.0])
        by_rank = np.logaddexp.reduce(evidence, axis=1)
        return float(by_rank.max()), int(by_rank.argmax()) == rank

    bound = np.quantile([largest(False)[0] for _ in range(10 * worlds)], 0.99)
    return float(np.mean([found > bound and right for found, right in (largest(True) for _ in range(worlds))]))


def percent(found: Counter[str], name: str) -> str:
    """A share of the worlds."""
    return f"{100 * found[name] / max(found['worlds'], 1):.1f}"


def as_lines(results: dict[Cell, Counter[str]]) -> list[str]:
    """The tables in Markdown."""
    by = {cell[:5]: found for cell, found in results.items()}
    sizes = sorted({cell[1] for cell in by if cell[3] == "none" and cell[1] != 16})
    head = ["", "| noise | " + " | ".join(f"{ranks} ranks" for ranks in sizes) + " |", "|---|" + "---:|" * len(sizes)]
    total: Counter[str] = Counter()
    for found in results.values():
        total += found
    lines = [
        f"{total['worlds']} simulated worlds (threshold {THRESHOLD}); {', '.join(NOISES[noise] for noise in LONG)} "
        "have 1 000 steps, the others 300. Worlds of a cell: " + ", ".join(
            f"{by[next(c for c in by if c[1] == ranks and c[3] == 'none')]['worlds']} of {ranks} ranks"
            for ranks in sizes) + ". All figures are per cent of the worlds.",
    ]  # fmt: skip

    def table(title: str, text: object) -> None:
        lines.extend(["", f"## {title}", *head])
        for noise in dict.fromkeys(cell[0] for cell in by):
            row = [text(noise, ranks) for ranks in sizes]  # type: ignore[operator]
            lines.append(f"| {NOISES[noise]} | " + " | ".join(row) + " |")

    def named(delay: float, alone: bool) -> object:
        def text(noise: str, ranks: int) -> str:
            found = by.get((noise, ranks, delay, "late" if delay else "none", alone))
            if found is None:
                return ""
            if not delay:
                return percent(found, "wrong")
            return f"{percent(found, 'right')} ({percent(found, 'wrong')})"

        return text

    def causes(noise: str, ranks: int) -> str:
        found = by.get((noise, ranks, 0.05, "late", False))
        return "" if found is None else f"{percent(found, 'no cause')}, {percent(found, 'wrong cause')}"

    def evaluation(noise: str, ranks: int) -> str:
        found = by.get((noise, ranks, 1.0, "evaluation", False))
        return "" if found is None else percent(found, "wrong")

    table("False names: no rank is late", named(0.0, False))
    table("False names where rank 0 alone evaluates every 50 steps", evaluation)
    for delay in (0.05, 0.10, 0.02, 0.01):
        table(f"One rank late by {delay:.0%} of a step: the right rank (in brackets, others)", named(delay, False))
    table("One rank late by 5 %: rank without a cause, wrong cause", causes)
    table("Operations alone, no rank is late: false names", named(0.0, True))
    table("Operations alone, one rank late by 5 % of a step: the right rank (others)", named(0.05, True))
    lines += ["", "## One host late, and one rank late now and then", ""]
    lines += ["| world | right | others | listed as intermittent | another rank listed |", "|---|---:|---:|---:|---:|"]
    for (noise, ranks, delay, kind, alone), found in by.items():
        if kind in ("host late", "now and then") or ranks == 16:
            what = f"{NOISES[noise]}, {ranks} ranks, {kind}" + (f" by {delay:.0%}" if delay else "")
            lines.append(f"| {what} | {percent(found, 'right')} | {percent(found, 'wrong')} | "
                         f"{percent(found, 'listed')} | {percent(found, 'others listed')} |")  # fmt: skip
        del alone
    return lines


def main() -> None:
    """Simulate, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="share of the worlds of each cell")
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--noises", nargs="*", choices=list(NOISES), default=list(NOISES))
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--oracle", action="store_true", help="what a test finds that knows all but the late rank")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.oracle:
        for ranks in chosen.ranks:
            print(f"| {ranks} | " + " | ".join(f"{100 * oracle(ranks, spread):.0f}" for spread in (0.01, 0.03)) + " |")
        return
    begun = time.monotonic()
    wanted = cells(chosen.share, tuple(chosen.ranks), tuple(chosen.noises), chosen.first)
    with get_context("spawn").Pool(chosen.processes) as pool:
        results = dict(zip(wanted, pool.map(count, wanted, chunksize=1), strict=True))
    print("\n".join(as_lines(results)))
    print(f"{time.monotonic() - begun:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
