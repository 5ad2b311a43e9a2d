"""Compares two sides: picks the test that the runs allow, applies it to step and regions, lists other differences."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from deep500_timing._base.names import BATCH
from deep500_timing._base.settings import setting
from deep500_timing._summary.nesting import split_path
from deep500_timing.compare._runs import (
    MEAN,
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


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
    step: Effect | None
    """None for runs without steps, as those of pytest-benchmark."""
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

    @property
    def is_tested(self) -> bool:
        return self.method in ("paired", "one session", "across sessions")

    @property
    def slower(self) -> bool:
        """Whether B is slower: the step, or any region where there is no step."""
        effects = self.regions if self.step is None else (self.step,)
        return any(effect.verdict == "slower" for effect in effects)


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
    if {run.step_s is None for run in (*a, *b)} == {True, False}:
        raise NotComparableError(
            "One side has the steps of a training, the other has benchmarks. Compare like to like."
        )
    present_a, present_b = common_paths(a), common_paths(b)
    paths = [path for path in present_a if path in present_b]
    if not paths:
        raise NotComparableError(
            "The two sides have no region in common: they are different programs. Compare runs of one program."
        )
    past = [run for run in past if (run.name, run.start_unix_s) not in known]
    method, reason, estimate_of = _choose(a, b, past, floor)
    step, mean, regions = _effects(a, b, paths, estimate_of, level)
    pairs = pairs_of(a, b) if method == "paired" else None
    spread = None
    if pairs and step is not None:
        _, own = mean_and_spread(log_ratios(pairs, STEP))
        spread = pool(own, floor.spread if floor else None)
    return Comparison(
        method,
        reason,
        step,
        regions,
        only_a=tuple(path for path in present_a if path not in (MEAN, *present_b)),
        only_b=tuple(path for path in present_b if path not in (MEAN, *present_a)),
        explains=_explain(step, regions),
        differences=_what_differs([*a, *past], b),
        warnings=_warnings(a, b, step),
        runs_a=tuple(a),
        runs_b=tuple(b),
        pairs=len(pairs or ()),
        spread=spread,
        mean=mean,
    )


def _logs(runs: Iterable[RunTimes], path: str) -> list[float]:
    return [math.log(run.times[path]) for run in runs if path in run.times]


def _choose(
    a: list[RunTimes], b: list[RunTimes], past: list[RunTimes], floor: Floor | None
) -> tuple[Method, str, Callable[[str], Estimate] | None]:
    # The test that the runs allow: a function from a path to its estimate, or None.
    pairs = pairs_of(a, b)
    if pairs is not None and len(pairs) >= FEWEST_PAIRS:

        def of_pairs(path: str) -> Estimate:
            spread = None if floor is None else floor.spreads.get(path)
            return paired(log_ratios(pairs, path), spread)

        own = f"{len(pairs)} interleaved pairs, paired t test on logarithms"
        return "paired", own + (", with the machine's noise floor" if floor else ""), of_pairs
    sessions = sessions_of([*a, *b])
    if len(sessions) == 1:
        if min(len(a), len(b)) < FEWEST_PAIRS:
            few = "One run a side" if len(a) == len(b) == 1 else f"{len(a)} and {len(b)} runs"
            return (
                "within this run only",
                f"{few}: how much runs differ is unknown. `ab` makes {FEWEST_PAIRS} pairs or more",
                None,
            )
        text = "runs of one session that are not interleaved, Welch's t test on logarithms. A drift of the machine "
        text += "would look like an effect"
        return "one session", text, lambda path: welch(_logs(a, path), _logs(b, path))
    sides = [sessions_of([*a, *past]), sessions_of(b)]
    ids = [{id(run) for session in side for run in session} for side in sides]
    mixed = any({id(run) for run in session} & ids[0] and {id(run) for run in session} & ids[1] for session in sessions)
    if max(map(len, sides)) >= _FEWEST_SESSIONS and not mixed:

        def of_sessions(path: str) -> Estimate:
            logs = [[found for session in side if (found := _logs(session, path))] for side in sides]
            if max(map(len, logs)) < _FEWEST_SESSIONS:
                raise LookupError(path)
            return across_sessions(logs[0], logs[1])

        count = f"{len(sides[0])} sessions against {len(sides[1])}"
        return "across sessions", f"{count}, t test with the session as the unit", of_sessions
    if len(a) == len(b) == 1:
        return (
            "within this run only",
            "One run a side, of different sessions: how much runs and sessions differ is unknown",
            None,
        )
    return (
        "not comparable",
        "not comparable: different sessions. Sessions differ by an unknown amount, which more runs do not average out. "
        f"Interleave the runs with `deep500-timing ab`, or give the runs of {_FEWEST_SESSIONS} or more sessions of A "
        "by --history",
        None,
    )


def _effects(
    a: list[RunTimes], b: list[RunTimes], paths: list[str], estimate_of: Callable[[str], Estimate] | None, level: float
) -> tuple[Effect | None, Effect | None, tuple[Effect, ...]]:
    estimates: dict[str, Estimate] = {}
    for path in paths:
        try:
            if estimate_of is not None:
                estimates[path] = estimate_of(path)
        except LookupError:
            continue
    alone = [path for path in (STEP, MEAN) if path in paths]
    tested = [path for path in paths if path not in alone and path in estimates]
    slower = dict(zip(tested, holm([estimates[path].slower_p for path in tested]), strict=True))
    faster = dict(zip(tested, holm([estimates[path].faster_p for path in tested]), strict=True))
    for path in estimates.keys() & {*alone}:
        slower[path], faster[path] = estimates[path].slower_p, estimates[path].faster_p

    def effect(path: str) -> Effect:
        log_a, log_b = _logs(a, path), _logs(b, path)
        mean_a, mean_b = math.fsum(log_a) / len(log_a), math.fsum(log_b) / len(log_b)
        found = estimates.get(path)
        change = math.expm1(mean_b - mean_a if found is None else found.log_ratio)
        times = math.exp(mean_a), math.exp(mean_b)
        if found is None:
            return Effect(path, *times, change, None, None, None, "not tested")
        # Each look of `ab` has its own level for the step. The regions are judged once, after the last look. The mean
        # is a second answer to the same question, so it needs more evidence.
        allowed = {STEP: level, MEAN: ALPHA / 5}.get(path, ALPHA)
        low, high = found.interval()
        verdict: Any = "no difference shown"
        if slower[path] <= allowed:
            verdict = "slower"
        elif faster[path] <= allowed:
            verdict = "faster"
        interval = (math.expm1(low), math.expm1(high))
        return Effect(path, *times, change, interval, slower[path], faster[path], verdict)

    step, mean = (effect(path) if path in alone else None for path in (STEP, MEAN))
    regions = [effect(path) for path in paths if path not in alone]
    if step is not None and step.b_s != step.a_s:
        regions = [replace(one, share=(one.b_s - one.a_s) / (step.b_s - step.a_s)) for one in regions]
    return step, mean, tuple(sorted(regions, key=lambda one: -one.a_s))


def _explain(step: Effect | None, regions: Sequence[Effect]) -> Effect | None:
    """The innermost region that explains most of the step's change. BATCH is the step, and explains nothing."""
    if step is None or step.verdict not in ("slower", "faster"):
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


def _warnings(a: Sequence[RunTimes], b: Sequence[RunTimes], step: Effect | None) -> tuple[str, ...]:
    warnings = [problem for run in (*a, *b) for problem in run.problems]
    loads = [run.load for run in (*a, *b) if run.load is not None]
    if loads and max(loads) >= _BUSY:
        warnings.append(
            f"Other programs used the machine: the load average at the start of a run was {min(loads):.1f} to "
            f"{max(loads):.1f} for each processor."
        )
    if a[0].program and b[0].program and a[0].program != b[0].program:
        warnings.append("The command lines differ: the programs may do different work.")
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

    @property
    def spread(self) -> Spread | None:
        return self.spreads.get(STEP)


def machine_of(run: RunTimes) -> str:
    """The hardware that a noise floor is valid for."""
    return " | ".join(f"{fact} {run.facts.get(fact, 'none')}" for fact in _MACHINE_FACTS)


def floor_of(pairs: Sequence[tuple[RunTimes, RunTimes]]) -> Floor:
    """The noise floor of at least three pairs of runs without a difference."""
    first = pairs[0][0]
    paths = common_paths([run for pair in pairs for run in pair])
    spreads = {path: mean_and_spread(log_ratios(pairs, path))[1] for path in sorted(paths)}
    return Floor(machine_of(first), first.program, spreads)


def floor_file(path: str | None = None) -> str:
    """The file of noise floors: as given, as the environment says, or in the user's folder for state."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return path or setting("noise_floor") or os.path.join(state, "deep500-timing", "noise-floor.json")


def store_floor(floor: Floor, path: str | None = None) -> str:
    """Write a floor into the file, in place of that of the same machine and program. Returns the file's path."""
    from deep500_timing._base.files import whole_file

    file = floor_file(path)
    kept = [row for row in _rows(file) if (row["machine"], row["program"]) != (floor.machine, floor.program)]
    spreads = {name: [spread.variance, spread.df] for name, spread in floor.spreads.items()}
    kept.append({"machine": floor.machine, "program": floor.program, "spreads": spreads})
    os.makedirs(os.path.dirname(os.path.abspath(file)), exist_ok=True)
    with whole_file(file) as out:
        out.write(json.dumps(kept, indent=1).encode())
    return file


def find_floor(run: RunTimes, path: str | None = None) -> Floor | None:
    """The floor of the machine and the program of a run of side A; None if ``ab --same`` has measured none."""
    for row in _rows(floor_file(path)):
        if (row["machine"], row["program"]) == (machine_of(run), run.program):
            spreads = {name: Spread(float(v), int(df)) for name, (v, df) in row["spreads"].items()}
            return Floor(row["machine"], row["program"], spreads)
    return None


def _rows(file: str) -> list[dict]:  # type: ignore[type-arg]
    try:
        with open(file, encoding="utf-8") as text:
            rows = json.load(text)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise ValueError(f"{file}: the noise floors cannot be read: {error}. Delete the file.") from None
    return list(rows)
