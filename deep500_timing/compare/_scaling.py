"""Runs of several world sizes: the efficiency, and which region takes the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_time, lines_of, safe_name
from deep500_timing.compare._runs import NotComparableError
from deep500_timing.compare._text import percent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deep500_timing.compare._runs import RunTimes

_BAR = 30
_SAMPLES = "attribute samples_per_step"
"""The attribute of a run that says how many samples a step of all ranks processes."""


@dataclass(frozen=True)
class WorldSize:
    """The runs of one world size, against those of the smallest."""

    ranks: int
    step_s: float
    rate: float
    """Samples a second where the runs say how many a step has; else rank-steps a second."""
    efficiency: float
    """Rate over the rate of the smallest world size, for each rank."""
    lost_s: float
    """Seconds a step beyond those at the efficiency 1."""
    region: str | None
    """The region that grew most, in seconds a step."""
    region_share: float | None
    """Its growth over ``lost_s``."""


def scaling(sides: Sequence[Sequence[RunTimes]]) -> list[WorldSize]:
    """Compare runs of different world sizes.

    A rank has the same work in each run (weak scaling), unless the attribute ``samples_per_step`` says otherwise.
    """
    by_size: dict[int, list[RunTimes]] = {}
    for run in (run for side in sides for run in side):
        if run.step_s is None or run.world_size is None:
            raise NotComparableError(f"{run.name}: a scaling experiment requires runs with steps and a world size.")
        by_size.setdefault(run.world_size, []).append(run)
    if len(by_size) < 2:
        raise NotComparableError(
            f"All runs have the world size {next(iter(by_size))}. Name two sides; quote a pattern for several runs."
        )
    first = by_size[min(by_size)]
    base_s, base_ranks, base_samples = _middle(first, ""), min(by_size), _samples(first)
    found = []
    for ranks, runs in sorted(by_size.items()):
        step_s, samples = _middle(runs, ""), _samples(runs)
        known = base_samples is not None and samples is not None
        per_step = samples if known and samples else float(ranks)
        base_per_step = base_samples if known and base_samples else float(base_ranks)
        rate = per_step / step_s
        efficiency = rate / (ranks / base_ranks * base_per_step / base_s)
        work = (per_step / ranks) / (base_per_step / base_ranks)
        lost = step_s * (1 - efficiency)
        common = set(first[0].regions).intersection(*(run.regions for run in first))
        present = set(runs[0].regions).intersection(*(run.regions for run in runs))
        grown = {
            path: _middle(runs, path) - (_middle(first, path) * work if path in common else 0.0)
            for path in present
            if not any(other.startswith(path + "/") for other in present)
        }
        region = max(grown, key=lambda path: grown[path], default=None)
        if region is not None and (lost <= 0 or grown[region] <= 0):
            region = None
        share = None if region is None else grown[region] / lost
        found.append(WorldSize(ranks, step_s, rate, efficiency, lost, region, share))
    return found


def _middle(runs: Sequence[RunTimes], path: str) -> float:
    return math.exp(math.fsum(math.log(run.times[path]) for run in runs) / len(runs))


def _samples(runs: Sequence[RunTimes]) -> float | None:
    texts = {run.facts.get(_SAMPLES) for run in runs}
    try:
        return float(next(iter(texts)) or "") if len(texts) == 1 else None
    except ValueError:
        return None


def draw_scaling(found: Sequence[WorldSize]) -> str:
    """A sentence, a table and a chart for the terminal."""
    base, last = found[0], found[-1]
    text = f"From {base.ranks} to {last.ranks} ranks the efficiency is {percent(last.efficiency, sign=False)}."
    if last.region is not None:
        text += f" {safe_name(last.region)} takes {percent(last.region_share, sign=False)} of the loss"
        text += f" ({format_time(last.lost_s)} a step)."
    rows = [("ranks", "step", "efficiency", "", "lost a step", "most in")]
    for one in found:
        bar = "█" * round(_BAR * min(one.efficiency, 1.0))
        lost = format_time(one.lost_s) if one is not base else ""
        row = (str(one.ranks), format_time(one.step_s), percent(one.efficiency, sign=False), bar.ljust(_BAR), lost)
        rows.append((*row, safe_name(one.region or "")))
    note = "A rank has the same work in each run, unless the attribute samples_per_step says otherwise."
    return "\n".join([text, "", *lines_of(rows, left=1), "", note])
