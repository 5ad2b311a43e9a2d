"""Tests remedies of a run's findings by runs of the program: A with nothing changed, and one for each remedy, in turn.

A step of a run is its time from start to start over the last three quarters of the steps: what lies between two steps
counts, and the start of the program does not.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deep500_timing._base.settings import TRIED, TRY
from deep500_timing._base.sql import literal
from deep500_timing._views.findings import evidence_of, find
from deep500_timing._views.findings._machine import cause_of_waiting
from deep500_timing._views.findings._tries import Try, to_try
from deep500_timing.compare._ab import CommandFailedError, Variant, launch
from deep500_timing.compare._runs import NotComparableError, _steps_of
from deep500_timing.compare._statistics import ALPHA, FEWEST_PAIRS, paired, settled
from deep500_timing.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_LEFT_OUT = 0.25
"""The share of the steps that are the warm-up."""
_WITHIN, _Z = 0.03, 1.645
"""How well a run is to know the time of its step, as a share, and the normal quantile of the 90 % interval."""
_FEWEST = 8
"""Steps, or executions of several, that a run is judged by at least."""
_LEAST, _MOST, _LEAST_S, _MOST_S = 4 * _FEWEST, 200, 1.0, 60.0
"""The steps of a run, and how long they take, where no number is given."""


@dataclass(frozen=True)
class Tried:
    """The runs' answer on one remedy."""

    remedy: Try
    places: tuple[str, ...]
    """The lines of the program that set the parameter, with its value there: ``"train.py:41"``."""
    pairs: int
    change: float | None
    """The time of a step with it over that without, less 1; None if no run was had."""
    interval: tuple[float, float] | None
    """The 90 % interval of the change."""
    helps: bool
    hinders: bool = False
    """Whether a step is shown to be longer with it."""
    failed: str = ""
    """Why it is not known; empty if it is."""


@dataclass(frozen=True)
class Trial:
    """What :func:`try_all` found."""

    finding: str
    """The first finding of the program as it is; empty for none."""
    step_s: float
    steps: int
    tried: tuple[Tried, ...]
    left_out: tuple[Try, ...]
    """Remedies that change results, which were not asked for."""

    @property
    def helps(self) -> bool:
        return any(one.helps for one in self.tried)


def try_all(
    command: Sequence[str],
    folder: str,
    *,
    steps: int | None,
    pairs: int,
    also_changing: bool = False,
    on_run: Callable[[str], object] = lambda text: None,
) -> Trial:
    """Run a program, find what may help, and test each remedy by interleaved pairs of runs.

    Without a number of steps a first run of a few shows how many take a minute, at most 200; the run for the findings
    has these, and the others have :func:`steps_for`. A run that others on the machine disturb is made again, as often
    as ``pairs`` in all.

    All remedies together are claimed wrongly in 5 % of the programs at most: each has an equal part of the level
    (Bonferroni), and spends it over its looks. A remedy is decided after 3 pairs at the earliest.

    Raises:
        CommandFailedError: The program fails with nothing changed, or times nothing.
        NotComparableError: It makes too few steps.
    """
    session, each, repeats = uuid.uuid4().hex, steps or _LEAST, pairs

    def run(name: str, pair: int, remedy: Try | None) -> str:
        environment = {"PYTHONDONTWRITEBYTECODE": "1"}
        if remedy is not None:
            environment[TRY] = f"{remedy.parameter}={remedy.value}"
            if remedy.parameter == "num_threads":
                environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(remedy.value))
        variant = Variant(tuple(command), environment=environment, steps=max(each // _batches(remedy), 2 * _FEWEST))
        path = os.path.join(folder, f"{name}-{pair}")
        side = "as it is" if remedy is None else remedy.text
        on_run(f"{side}, run {pair + 1}")
        shutil.rmtree(path, ignore_errors=True)
        launch(variant, path, session=session, pair=pair, side=side)
        return path

    path = run("first", 0, None)
    if steps is None:
        with Run.open(path) as opened:
            each = max(each, min(int(_MOST_S / _steady(opened).mean()), _MOST))
        path = run("first", 0, None) if each > _LEAST else path
    with Run.open(path) as opened:
        evidence = evidence_of(opened)
        findings = find(evidence)
        remedies = to_try(findings, evidence)
        steady_s = _steady(opened)
    each = steps or steps_for(steady_s)
    left_out = tuple(one for one in remedies if one.changes_results and not also_changing)
    chosen = [one for one in remedies if one not in left_out]

    def measure(remedy: Try | None, pair: int) -> tuple[float, tuple[str, ...]]:
        nonlocal repeats
        name, again = "A" if remedy is None else f"B{chosen.index(remedy)}", repeats > 0
        while True:
            with Run.open(run(name, pair, remedy)) as opened:
                found = float(_steady(opened).mean()) / _batches(remedy), _places_of(opened, remedy)
                if not again or cause_of_waiting(evidence_of(opened)) not in ("cpu-contention", "steal"):
                    return found
            again, repeats = False, repeats - 1

    tried = decide(chosen, pairs, measure)
    return Trial(findings[0].text if findings else "", float(steady_s.mean()), each, tried, left_out)


def _batches(remedy: Try | None) -> int:
    """The batches of what counts as a step with a remedy."""
    return int(remedy.value) if remedy is not None and remedy.parameter == "steps_per_execution" else 1


def decide(
    remedies: Sequence[Try], pairs: int, measure: Callable[[Try | None, int], tuple[float, tuple[str, ...]]]
) -> tuple[Tried, ...]:
    """Test remedies by runs in turn; those that help come first.

    Args:
        remedies: What to test.
        pairs: The most runs of each.
        measure: Runs the program with a remedy, or with nothing changed; returns the time of a step, and the lines
            of the program that set the parameter.
    """
    logs: dict[Try, list[float]] = {one: [] for one in remedies}
    places: dict[Try, tuple[str, ...]] = {}
    failed: dict[Try, str] = {}
    open_ones = list(remedies)
    part = 1 / max(len(remedies), 1)
    for pair in range(pairs):
        if not open_ones:
            break
        order = [None, *open_ones]
        times: dict[Try | None, float] = {}
        for remedy in reversed(order) if pair % 2 else order:
            try:
                times[remedy], found = measure(remedy, pair)
                if remedy is not None:
                    places[remedy] = found
            except (CommandFailedError, NotComparableError) as error:
                if remedy is None:
                    raise
                said = " ".join(str(error).split())[:300]
                failed[remedy] = f"the program fails with it. {said}" if isinstance(error, CommandFailedError) else said
        for remedy in open_ones:
            if remedy in times:
                logs[remedy].append(math.log(times[remedy] / times[None]))
        open_ones = [one for one in open_ones if one not in failed and settled(logs[one], pairs, part) is None]
    tried = [_result(one, places.get(one, ()), logs[one], pairs, part, failed.get(one, "")) for one in remedies]
    return tuple(sorted(tried, key=lambda one: (not one.helps, one.change or 0.0)))


def _steady(run: Run) -> NDArray[np.float64]:
    # The seconds of each step behind the warm-up.
    durations = _steps_of(run)[3]
    steady = durations[int(_LEFT_OUT * len(durations)) :] / 1e9
    if len(steady) < _FEWEST:
        raise NotComparableError(
            f"The program made {len(durations)} steps: too few to try anything. Give a larger --steps, or let it train "
            "for longer."
        )
    return steady


def steps_for(steady_s: NDArray[np.float64]) -> int:
    """The steps of a run that knows the time of a step within 3 %, and takes a second, as far as a first run had them.

    Args:
        steady_s: The steps of the first run behind its warm-up, in seconds from start to start.
    """
    step_s = float(steady_s.mean())
    needed = max((_Z * float(steady_s.std()) / step_s / _WITHIN) ** 2, _LEAST_S / step_s)
    return max(math.ceil(min(needed, len(steady_s)) / (1 - _LEFT_OUT)), _LEAST)


def _places_of(run: Run, remedy: Try | None) -> tuple[str, ...]:
    # Each line of the program with the value that it passes itself.
    if remedy is None:
        return ()
    query = f"select text, more from events where what = {literal(TRIED)} order by time_ns"
    rows = run.sql(query).rows() if "events" in run.tables else ()
    if not rows:
        raise NotComparableError(f"nothing in the program calls {remedy.call}, or it has that value already.")
    places = ((row["text"], json.loads(row["more"]).get("before")) for row in rows if row["text"])
    return tuple(dict.fromkeys(place if before == "None" else f"{place} passes {before}" for place, before in places))


def _result(remedy: Try, places: tuple[str, ...], logs: Sequence[float], most: int, part: float, failed: str) -> Tried:
    if len(logs) < FEWEST_PAIRS or failed:
        return Tried(remedy, places, len(logs), None, None, False, failed=failed)
    shown = settled(logs, most, part)
    found = paired(logs) if shown is None else shown
    low, high = (math.expm1(end) for end in found.interval(ALPHA))
    verdict = (False, False) if shown is None else (found.log_ratio < 0, found.log_ratio > 0)
    return Tried(remedy, places, len(logs), math.expm1(found.log_ratio), (low, high), *verdict)
