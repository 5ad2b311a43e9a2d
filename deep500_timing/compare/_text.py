"""A comparison in words: for the terminal, and for the summary of a GitHub job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from deep500_timing._summary.text import format_time, lines_of, safe_name, shorten, width_of
from deep500_timing.compare._statistics import pairs_needed, smallest_effect

if TYPE_CHECKING:
    from deep500_timing.compare._compare import Comparison, Effect, Floor
    from deep500_timing.compare._runs import RunTimes

_MOST_REGIONS = 12
_PATH_WIDTH = 40
_VALUE_WIDTH = 32
_EXAMPLE_EFFECT = 0.05
_HIDDEN = 0.05
"""The difference of two changes from which on the second is named."""


def percent(share: float | None, *, sign: bool = True) -> str:
    """A change in per cent, such as ``"+4.9 %"``."""
    return "" if share is None else f"{100 * share:{'+' if sign else ''}.1f} %"


def began(run: RunTimes) -> str:
    return "" if run.start_unix_s is None else f"{datetime.fromtimestamp(run.start_unix_s, UTC):%Y-%m-%d %H:%M:%S}"


def interval_text(effect: Effect) -> str:
    return "" if effect.interval is None else f"{percent(effect.interval[0])} to {percent(effect.interval[1])}"


def effect_name(effect: Effect) -> str:
    """The region's path, or ``step``."""
    return safe_name(effect.path) if effect.path else "step"


def headline(found: Comparison) -> str:
    step = found.step
    if not found.is_tested:
        if found.method == "not comparable":
            return found.reason + "."
        return f"B / A is {percent(step.change)}, within this run only.{_of_all_steps(found)} {found.reason}."
    change = f"{percent(step.change)} (90 % interval {interval_text(step)})"
    of_all = _of_all_steps(found)
    if step.verdict not in ("slower", "faster"):
        return f"No difference is shown{' in the median step' if of_all else ''}: B / A is {change}.{of_all}"
    text = f"{'The median step of B' if of_all else 'B'} is {step.verdict}: {change}.{of_all}"
    if found.explains is not None:
        part = found.explains
        text += (
            f" {effect_name(part)} explains {percent(part.share, sign=False)} of it: "
            f"{format_time(part.a_s)} to {format_time(part.b_s)} a step."
        )
    return text


def _of_all_steps(found: Comparison) -> str:
    # The median step hides compilation, a warm-up and pauses in which the sides differ.
    step, mean, on_cpu = found.step, found.mean, ""
    if found.cpu is not None:
        times = f"{format_time(found.cpu.a_s)} to {format_time(found.cpu.b_s)}"
        test = "" if found.cpu.interval is None else f", 90 % interval {interval_text(found.cpu)}"
        on_cpu = f" In CPU time of the thread that trains B / A is {percent(found.cpu.change)} ({times} a step{test})."
    if mean is None or abs(mean.change - step.change) < _HIDDEN:
        return on_cpu
    said = f"B / A is {percent(mean.change)}"
    if found.is_tested:
        if mean.verdict in (step.verdict, "no difference shown"):
            return on_cpu
        said = f"B is {mean.verdict}: {percent(mean.change)} (90 % interval {interval_text(mean)})"
    times = f"{format_time(mean.a_s)} to {format_time(mean.b_s)} a step on average"
    return f" Over all steps, with warm-up, compilation and pauses, {said}, {times}.{on_cpu}"


def _differences(found: Comparison) -> list[str]:
    """What else differs, a line for each fact."""
    lines = [
        f"  {safe_name(fact)}: {shorten(safe_name(a), _VALUE_WIDTH)} | {shorten(safe_name(b), _VALUE_WIDTH)}"
        for fact, a, b in found.differences
    ]
    return ["Also different (A | B):", *lines] if lines else ["Versions, hardware and settings are the same."]


def table_of(found: Comparison) -> list[tuple[str, ...]]:
    """The step and the longest regions, a heading first."""
    effects = [*filter(None, (found.step, found.mean, found.cpu)), *found.regions[:_MOST_REGIONS]]
    rows: list[tuple[str, ...]] = [("region", "A", "B", "B / A", "90 % interval", "of the change", "verdict")]
    for one in effects:
        of_change = "" if one.share is None or not found.is_tested else percent(one.share, sign=False)
        times = format_time(one.a_s), format_time(one.b_s)
        verdict = one.verdict if one.verdict in ("slower", "faster") else ""
        rows.append(
            (
                shorten(effect_name(one), _PATH_WIDTH),
                *times,
                percent(one.change),
                interval_text(one),
                of_change,
                verdict,
            )
        )
    return rows


def _fitted(rows: list[tuple[str, ...]], width: int | None) -> list[str]:
    """The lines of a table of :func:`table_of`; in a narrow terminal without a column and with shorter names."""
    lines = lines_of(rows, left=1)
    if width is None or max(map(width_of, lines)) <= width:
        return lines
    rows = [(*row[:5], row[6]) for row in rows]
    room = width - max(map(width_of, lines_of([("", *row[1:]) for row in rows], left=1)))
    return lines_of([(shorten(row[0], max(room, 8)), *row[1:]) for row in rows], left=1)


def draw(found: Comparison, *, width: int | None = None) -> str:
    """A comparison as text of at most ``width`` columns; None for lines without a limit."""
    lines = [*_differences(found), *(f"Warning: {warning}" for warning in found.warnings), "", headline(found), ""]
    if found.method == "not comparable":
        return "\n".join(lines[:-1])
    lines += _fitted(table_of(found), width)
    if len(found.regions) > _MOST_REGIONS:
        lines.append(f"and {len(found.regions) - _MOST_REGIONS} more regions (--json lists all)")
    for side, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            lines.append(f"Only in {side}: {', '.join(safe_name(path) for path in only[:_MOST_REGIONS])}")
    lines += ["", *_notes(found)]
    return "\n".join(lines).rstrip()


def _notes(found: Comparison) -> list[str]:
    """How the answer was found."""
    runs = [*found.runs_a, *found.runs_b]
    lines = []
    if found.is_tested:
        lines.append(f"Method: {found.reason}. The unit is the run: the median step after the warm-up (MSER-5).")
        lines.append(
            '"Slower" is wrong in 5 % of comparisons at most, for the step and, by Holm\'s correction over '
            f"{len(found.regions)} regions, for all regions together. Steps and regions are of their slowest rank."
        )
    lines.append(
        f"Steps per run: {min(run.steps for run in runs)} to {max(run.steps for run in runs)}, "
        f"{max(run.warm_up for run in runs)} left out as warm-up at most."
    )
    if found.spread is not None:
        lines.append(_sensitivity(found, _EXAMPLE_EFFECT))
    return lines


def _sensitivity(found: Comparison, effect: float) -> str:
    assert found.spread is not None
    extra_df = found.spread.df - (found.pairs - 1)
    seen = math.expm1(smallest_effect(found.spread, found.pairs, extra_df))
    needed = pairs_needed(math.log1p(effect), found.spread, extra_df)
    return (
        f"At this noise {found.pairs} pairs find a slowdown of {percent(seen, sign=False)} in 95 % of the experiments; "
        f"for {100 * effect:.3g} % it takes {needed or 'over 1000'} pairs."
    )


def conditions(found: Comparison) -> list[str]:
    """What else differs, the warnings, and how the answer was found."""
    return [*_differences(found), *found.warnings, *_notes(found)]


def markdown(found: Comparison, gate: str = "") -> str:
    """The comparison and the verdict of the gate for the summary of a GitHub job."""

    def cell(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("`", "\\`")

    table = [[cell(text) for text in row] for row in table_of(found)]
    rule = ["---"] + ["---:"] * (len(table[0]) - 1)
    rows = "\n".join(f"| {' | '.join(row)} |" for row in [table[0], rule, *table[1:]])
    verdict = f"**{cell(gate.splitlines()[0])}**\n\n" if gate else ""
    about = "\n".join(f"- {cell(line.strip())}" for line in conditions(found))
    return f"### Comparison of training runs\n\n{verdict}{cell(headline(found))}\n\n{rows}\n\n{about}\n"


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
    if found.method == "paired" and floor is None:
        return GateResult(
            False,
            "Gate: no verdict, for this machine is not qualified.\nMeasure its noise first: "
            f"`deep500-timing ab --same -n 10 -- COMMAND`.\n{headline(found)}",
        )
    if not found.slower or found.step.change < fail_on:
        advice = "" if found.spread is None else "\n" + _sensitivity(found, fail_on)
        return GateResult(False, f"Gate: passed; no slowdown of {limit} or more is shown.{advice}")
    last_a, last_b = found.runs_a[-1].name, found.runs_b[-1].name
    return GateResult(
        True,
        f"Gate: FAILED. The limit is {limit}; found: step {percent(found.step.change)}.\n{headline(found)}\n"
        f"Last runs: {last_a} and {last_b}.\n"
        "Repeat with more pairs (-n) if you doubt it, or accept it by --update-baseline.",
    )
