"""Compares two sides: picks the test that the runs allow, applies it to step and regions, lists other differences."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from deep500_timing._base.files import whole_file
from deep500_timing._base.names import BATCH
from deep500_timing._base.settings import setting
from deep500_timing._summary.nesting import split_path
from deep500_timing.compare._runs import (
    CPU_TIME,
    MEAN,
    OF_STEP,
    STEP,
    NotComparableError,
    RunTimes,
    common_paths,
    log_ratios,
    pairs_of,
    read_side,
    sessions_of,
)
from deep500_timing.compare._statistics import (
    ALPHA,
    FEWEST_PAIRS,
    Estimate,
    Spread,
    across_sessions,
    holm,
    mean_and_spread,
    paired,
    pool,
    welch,
)
from deep500_timing.runs import _checks as check

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pairs = Sequence[tuple[RunTimes, RunTimes]]

Method = Literal["paired", "one session", "across sessions", "within this run only", "not comparable"]
_FEWEST_SESSIONS = 3
_EXPLAINS = 0.6
"""The least share of the step's change that explains it."""


@dataclass(frozen=True)
class Effect:
    """How the time of the step, or of one region, differs between A and B."""

    path: str
    """The region's path; empty for the step."""
    a_s: float
    """Seconds a step on side A: the geometric mean of the runs' medians."""
    b_s: float
    change: float
    """B / A - 1."""
    interval: tuple[float, float] | None
    """The 90 % interval of the change; None where the runs allow none."""
    slower_p: float | None
    """The p-value of "slower"; of regions, adjusted for their number."""
    faster_p: float | None
    verdict: Literal["slower", "faster", "no difference shown", "not tested"]
    share: float | None = None
    """The region's part in the change of the step: seconds over seconds."""


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` found."""

    method: Method
    reason: str
    step: Effect
    regions: tuple[Effect, ...]
    """Of the regions that both sides have, the longest first."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    explains: Effect | None
    """The region that explains most of the step's change, if the step has changed."""
    differences: tuple[tuple[str, str, str], ...]
    """What else differs between the sides: a fact, its values on A, on B."""
    warnings: tuple[str, ...]
    runs_a: tuple[RunTimes, ...]
    runs_b: tuple[RunTimes, ...]
    pairs: int = 0
    spread: Spread | None = None
    """The variance between pairs of the step, the noise floor included."""
    mean: Effect | None = None
    """Of the mean of all steps, where warm-up, compilation and pauses count."""
    cpu: Effect | None = None
    """Of the processor time of a step on the thread that trains, where a run was disturbed: it holds no waiting for a
    processor."""

    @property
    def is_tested(self) -> bool:
        return self.method in ("paired", "one session", "across sessions")

    @property
    def slower(self) -> bool:
        """Whether the step of B is slower."""
        return self.step.verdict == "slower"


def compare(
    runs_a: Any, runs_b: Any, *, history: Any = None, floor: Floor | None = None, level: float = ALPHA
) -> Comparison:
    """Compare two sides of runs: is B slower than A, by how much, and in which region?

    Args:
        runs_a: The baseline: a run's folder, a pattern, a folder of runs, a :class:`~deep500_timing.runs.Run`, or a
            list of these.
        runs_b: The runs to judge.
        history: Further runs of A's program from other sessions. They show how much sessions differ.
        floor: The machine's noise floor, from ``deep500-timing ab --same``.
        level: The false alarms that "slower" may give; ``ab`` passes the level of its look.

    Raises:
        FileNotFoundError: A side names no run.
        NotComparableError: A run is too short, or both sides are the same runs.
    """
    a, b = read_side(runs_a), read_side(runs_b)
    past = [] if history is None else read_side(history)
    known = {(run.name, run.start_unix_s) for run in a}
    same = next((run.name for run in b if (run.name, run.start_unix_s) in known), None)
    if same is not None and a[0].start_unix_s is not None:
        raise NotComparableError(f"The run {same!r} is on both sides. Name different runs.")
    present_a, present_b = common_paths(a), common_paths(b)
    is_noisy = any(run.is_disturbed for run in (*a, *b))
    paths = [path for path in present_a if path in present_b and (path != CPU_TIME or is_noisy)]
    past = [run for run in past if (run.name, run.start_unix_s) not in known]
    pairs = pairs_of(a, b) or []
    method, reason, estimate = _choose(a, b, past, pairs, floor)
    estimates = {} if estimate is None else {path: found for path in paths if (found := estimate(path)) is not None}
    effects = _effects(a, b, paths, estimates, level)
    step, mean, cpu = effects.pop(STEP), effects.pop(MEAN, None), effects.pop(CPU_TIME, None)
    regions = tuple(sorted(effects.values(), key=lambda one: -one.a_s))
    if step.b_s != step.a_s:
        regions = tuple(replace(one, share=(one.b_s - one.a_s) / (step.b_s - step.a_s)) for one in regions)
    spread = None
    if method == "paired":
        spread = pool(mean_and_spread(log_ratios(pairs, STEP))[1], floor.spread if floor else None)
    return Comparison(
        method,
        reason,
        step,
        regions,
        only_a=tuple(path for path in present_a if path not in (*OF_STEP, *present_b)),
        only_b=tuple(path for path in present_b if path not in (*OF_STEP, *present_a)),
        explains=_explain(step, regions),
        differences=_what_differs([*a, *past], b),
        warnings=_warnings([*a, *b]),
        runs_a=tuple(a),
        runs_b=tuple(b),
        pairs=len(pairs) if method == "paired" else 0,
        spread=spread,
        mean=mean,
        cpu=cpu,
    )


def _logs(runs: Sequence[RunTimes], path: str) -> list[float]:
    return [math.log(run.times[path]) for run in runs if path in run.times]


def _choose(
    a: list[RunTimes], b: list[RunTimes], past: list[RunTimes], pairs: Pairs, floor: Floor | None
) -> tuple[Method, str, Callable[[str], Estimate | None] | None]:
    """The test that the runs allow, the reason, and the estimate of a path by it; None if there is no test."""
    if len(pairs) >= FEWEST_PAIRS:
        reason = f"{len(pairs)} interleaved pairs, paired t test on logarithms"
        reason += ", with the machine's noise floor" if floor else ""
        spreads = floor.spreads if floor else {}
        return "paired", reason, lambda path: paired(log_ratios(pairs, path), spreads.get(path))
    sessions = sessions_of([*a, *b])
    if len(sessions) == 1:
        if min(len(a), len(b)) < FEWEST_PAIRS:
            few = "One run a side" if len(a) == len(b) == 1 else f"{len(a)} and {len(b)} runs"
            reason = f"{few}: how much runs differ is unknown. `ab` makes {FEWEST_PAIRS} pairs or more"
            return "within this run only", reason, None
        reason = "runs of one session that are not interleaved, Welch's t test on logarithms. A drift of the machine "
        reason += "would look like an effect"
        return "one session", reason, lambda path: welch(_logs(a, path), _logs(b, path))
    sides = [sessions_of([*a, *past]), sessions_of(b)]
    mixed = len(sessions) < len(sessions_of(a)) + len(sessions_of(b))
    if max(map(len, sides)) >= _FEWEST_SESSIONS and not mixed:

        def of_sessions(path: str) -> Estimate | None:
            logs = [[found for session in side if (found := _logs(session, path))] for side in sides]
            return across_sessions(logs[0], logs[1]) if max(map(len, logs)) >= _FEWEST_SESSIONS else None

        reason = f"{len(sides[0])} sessions against {len(sides[1])}, t test with the session as the unit"
        return "across sessions", reason, of_sessions
    if len(a) == len(b) == 1:
        reason = "One run a side, of different sessions: how much runs and sessions differ is unknown"
        return "within this run only", reason, None
    return (
        "not comparable",
        "not comparable: different sessions. Sessions differ by an unknown amount, which more runs do not average out. "
        f"Interleave the runs with `deep500-timing ab`, or give the runs of {_FEWEST_SESSIONS} or more sessions of A "
        "by --history",
        None,
    )


def _effects(
    a: list[RunTimes], b: list[RunTimes], paths: list[str], estimates: dict[str, Estimate], level: float
) -> dict[str, Effect]:
    slower = {path: found.slower_p for path, found in estimates.items()}
    faster = {path: found.faster_p for path, found in estimates.items()}
    tested = [path for path in estimates if path not in OF_STEP]
    for p_values in (slower, faster):
        p_values |= dict(zip(tested, holm([p_values[path] for path in tested]), strict=True))
    effects = {}
    for path in paths:
        log_a, log_b = (math.fsum(_logs(side, path)) / len(side) for side in (a, b))
        times = math.exp(log_a), math.exp(log_b)
        if path not in estimates:
            effects[path] = Effect(path, *times, math.expm1(log_b - log_a), None, None, None, "not tested")
            continue
        # Each look of `ab` has its own level for the step. The regions are judged once, after the last look. The mean
        # and the processor time are further answers to the same question, so they need more evidence.
        allowed = level if path == STEP else ALPHA / 5 if path in OF_STEP else ALPHA
        is_slower, is_faster = slower[path] <= allowed, faster[path] <= allowed
        low, high = estimates[path].interval()
        effects[path] = Effect(
            path,
            *times,
            math.expm1(estimates[path].log_ratio),
            (math.expm1(low), math.expm1(high)),
            slower[path],
            faster[path],
            "slower" if is_slower else "faster" if is_faster else "no difference shown",
        )
    return effects


def _explain(step: Effect, regions: Sequence[Effect]) -> Effect | None:
    """The innermost region that explains most of the step's change. BATCH is the step, and explains nothing."""
    if step.verdict not in ("slower", "faster"):
        return None
    explaining = [one for one in regions if one.verdict == step.verdict and (one.share or 0.0) >= _EXPLAINS]
    found = max(explaining, key=lambda one: (len(split_path(one.path)), one.share), default=None)
    return None if found is None or split_path(found.path)[-1] == BATCH else found


def _what_differs(a: Sequence[RunTimes], b: Sequence[RunTimes]) -> tuple[tuple[str, str, str], ...]:
    found = []
    for fact in dict.fromkeys(fact for run in (*a, *b) for fact in run.facts):
        on_a, on_b = ({run.facts.get(fact, "unknown") for run in side} for side in (a, b))
        if on_a != on_b:
            found.append((fact, ", ".join(sorted(on_a)), ", ".join(sorted(on_b))))
    return tuple(found)


_BUSY = 0.5
"""Load average for each processor at the start of a run from which on a machine is called busy."""


def _warnings(runs: Sequence[RunTimes]) -> tuple[str, ...]:
    warnings = [problem for run in runs for problem in run.problems]
    disturbed = [run for run in runs if run.is_disturbed]
    if disturbed:
        waits = ", ".join(f"{run.name} {100 * (run.waited or 0.0):.0f} %" for run in disturbed)
        warnings.insert(
            0, f"The machine was busy: the training thread waited for a processor for so much of the time: {waits}."
        )
    loads = [run.load for run in runs if run.load is not None and run.waited is None]
    if loads and max(loads) >= _BUSY:
        warnings.append(
            f"Other programs used the machine: the load average at the start of a run was {min(loads):.1f} to "
            f"{max(loads):.1f} for each processor."
        )
    return tuple(dict.fromkeys(warnings))


_MACHINE_FACTS = ("cpu", "cpus", "devices")


@dataclass(frozen=True)
class Floor:
    """The variance of the pairs of one program on one machine."""

    machine: str
    """The processor, the number of processors and the devices. A host's name may change, as in hosted CI."""
    program: str
    spreads: dict[str, Spread]
    """For the step (empty path) and each region."""
    waited: float | None = None
    """The most that a training thread of these runs waited for a processor, as a share of the time."""

    @property
    def spread(self) -> Spread:
        return self.spreads[STEP]


def machine_of(run: RunTimes) -> str:
    """The hardware that a noise floor is valid for."""
    return " | ".join(f"{fact} {run.facts.get(fact, 'none')}" for fact in _MACHINE_FACTS)


def floor_of(pairs: Sequence[tuple[RunTimes, RunTimes]]) -> Floor:
    """The noise floor of at least three pairs of runs without a difference."""
    first = pairs[0][0]
    paths = common_paths([run for pair in pairs for run in pair])
    spreads = {path: mean_and_spread(log_ratios(pairs, path))[1] for path in sorted(paths)}
    waits = [run.waited for pair in pairs for run in pair if run.waited is not None]
    return Floor(machine_of(first), first.program, spreads, max(waits, default=None))


def floor_file(path: str | None = None) -> str:
    """The file of noise floors: as given, as the environment says, or in the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return path or setting("noise_floor") or os.path.join(state, "deep500-timing", "noise-floor.json")


def store_floor(floor: Floor, path: str | None = None) -> str:
    """Write a floor into the file, in place of that of the same machine and program. Returns the file's path."""
    file = floor_file(path)
    others = [one for one in _floors(file) if (one.machine, one.program) != (floor.machine, floor.program)]
    rows = [
        {"machine": one.machine, "program": one.program, "waited": one.waited}
        | {"spreads": {path: [spread.variance, spread.df] for path, spread in one.spreads.items()}}
        for one in (*others, floor)
    ]
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    with whole_file(file) as out:
        out.write(json.dumps(rows, indent=1).encode())
    return file


def find_floor(run: RunTimes, path: str | None = None) -> Floor | None:
    """The floor of the machine and the program of a run of side A; None if ``ab --same`` has measured none."""
    wanted = machine_of(run), run.program
    return next((one for one in _floors(floor_file(path)) if (one.machine, one.program) == wanted), None)


def _is_spread(pair: Any) -> bool:
    return check.of(list, check.number)(pair) and len(pair) == 2 and pair[0] >= 0 and pair[1] > 0


_FLOOR = check.has(
    machine=check.string,
    program=check.string,
    waited=check.or_none(check.number),
    spreads=lambda spreads: check.of(dict, _is_spread)(spreads) and STEP in spreads,
)


def _floors(file: str) -> list[Floor]:
    try:
        rows = check.read_json(file)
        if not check.of(list, _FLOOR)(rows):
            raise ValueError("a floor is not as it was written")
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{file}: the noise floors cannot be read: {error}. Delete the file.") from None
    return [
        Floor(
            row["machine"],
            row["program"],
            {path: Spread(*of) for path, of in row["spreads"].items()},
            row.get("waited"),
        )
        for row in rows
    ]
