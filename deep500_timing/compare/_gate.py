"""The gate: whether a comparison may fail a build."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep500_timing.compare._statistics import FEWEST_PAIRS, pairs_needed, smallest_effect
from deep500_timing.compare._text import headline, name_of, percent

if TYPE_CHECKING:
    from deep500_timing.compare._compare import Comparison
    from deep500_timing.compare._floor import Floor


@dataclass(frozen=True)
class GateResult:
    """The verdict of the gate."""

    failed: bool
    text: str


def gate(found: Comparison, fail_on: float, floor: Floor | None) -> GateResult:
    """Judge a comparison against a limit.

    The build fails if the step is slower by a significant effect, and the effect is at least the limit. Runs that are
    not interleaved, nor of enough sessions, never fail it; nor does a machine without a noise floor.
    """
    limit = percent(fail_on, sign=False)
    if found.method not in ("paired", "across sessions"):
        return GateResult(
            False,
            f"Gate: no verdict. {found.reason}.\n"
            f"`deep500-timing ab -n 5 --fail-on {100 * fail_on:g}% -- A --- B` interleaves the runs.",
        )
    if found.method == "paired" and (floor is None or floor.spread is None):
        return GateResult(
            False,
            "Gate: no verdict, for this machine is not qualified.\nMeasure its noise first: "
            f"`deep500-timing ab --same -n 10 -- COMMAND`.\n{headline(found)}",
        )
    effects = found.regions if found.step is None else (found.step,)
    slow = [one for one in effects if one.verdict == "slower" and one.change >= fail_on]
    advice = _advice(found, fail_on, floor)
    if not slow:
        return GateResult(False, f"Gate: passed; no slowdown of {limit} or more is shown.{advice}")
    names = ", ".join(f"{name_of(one)} {percent(one.change)}" for one in slow[:3])
    lines = [f"Gate: FAILED. The limit is {limit}; found: {names}.", headline(found)]
    regions = [one for one in found.regions if one.verdict == "slower" and one.share is not None]
    if found.step is not None and regions:
        worst = sorted(regions, key=lambda one: -(one.share or 0))[:3]
        lines.append("Slower regions: " + ", ".join(f"{name_of(one)} {percent(one.change)}" for one in worst) + ".")
    if found.differences:
        lines.append("Also different: " + ", ".join(fact for fact, _, _ in found.differences[:5]) + ".")
    lines += [f"Warning: {warning}" for warning in found.warnings[:2]]
    folders = found.runs_a[-1].name, found.runs_b[-1].name
    lines.append(f"Method: {found.reason}. Last runs: {folders[0]} and {folders[1]}.")
    lines.append("Repeat with more pairs (-n) if you doubt it, or accept it by --update-baseline.")
    return GateResult(True, "\n".join(lines))


def _advice(found: Comparison, fail_on: float, floor: Floor | None) -> str:
    if found.spread is None or not found.pairs:
        return ""
    extra = None if floor is None else floor.spread
    if math.expm1(smallest_effect(found.spread, max(found.pairs, FEWEST_PAIRS), floor=extra)) <= fail_on:
        return ""
    needed = pairs_needed(math.log1p(fail_on), found.spread, floor=extra)
    count = f"{needed} pairs" if needed else "more than 1000 pairs"
    return f"\nThese {found.pairs} pairs may miss {percent(fail_on, sign=False)}: at this noise it takes {count} (-n)."
