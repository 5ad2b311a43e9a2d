"""Reduces a run to its comparable numbers: the time of the step, of each region, and the run's environment."""

from __future__ import annotations

import glob as _glob
import json
import math
import os
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.files import whole_file
from deep500_timing._base.names import BATCH, CPU
from deep500_timing._base.sql import array_of, literal
from deep500_timing._distributed.stragglers import places_in
from deep500_timing._views.about import about_run
from deep500_timing.runs import _checks as check
from deep500_timing.runs._compact import find_logs
from deep500_timing.runs._processor import ThreadTimes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from deep500_timing.runs import Run

FEWEST_STEPS = 20
"""A run with fewer steps has no steady state to compare."""
_BATCH = 5
"""Steps in a batch of MSER-5."""
_DISTURBED = 0.10
"""The share of waiting for a processor from which on a run is disturbed, as in its findings."""
_GAP_S = 600.0
"""Runs of one host and boot with less time between them are of one session."""
_CELLS = 1 << 20
"""Sums that are made at once, one for each rank, region and step."""
OPTIONS = "program or its options"
"""A fact of which a run holds no more than a hash."""


@dataclass(frozen=True)
class RunTimes:
    """One run, reduced to its comparable numbers."""

    name: str
    step_s: float
    """The median time from one step to the next, of the slowest rank of each step, after the warm-up."""
    regions: dict[str, float]
    """Path of each region that occurs in every other step at least, with the median of its seconds a step."""
    mean_s: float | None = None
    """The mean time from one step to the next over all steps: warm-up, compilation and pauses count."""
    steps: int = 0
    """How many steps the medians are of."""
    warm_up: int = 0
    """How many steps were left out before."""
    world_size: int | None = None
    start_unix_s: float | None = None
    end_unix_s: float | None = None
    facts: dict[str, str] = field(default_factory=dict)
    """The run's environment: versions, devices, host and so on."""
    program: str = ""
    machine: str = ""
    """Host and boot, which distinguish sessions; empty if unknown."""
    session: str = ""
    """The session that ``ab`` has given it."""
    pair: int | None = None
    """The number of the pair that ``ab`` has given it."""
    side: str = ""
    """The side that ``ab`` has given it: A or B."""
    load: float | None = None
    """The load average of the machine at the start, for each processor."""
    waited: float | None = None
    """The share of the time in which the thread of the steps waited for a processor; None if unknown."""
    cpu_s: float | None = None
    """The median time of a step that this thread ran on a processor, after the warm-up, of the rank with most."""
    problems: tuple[str, ...] = ()

    @property
    def times(self) -> dict[str, float]:
        """The step under the empty path, the mean of all steps, the processor time of the step, and the regions."""
        of_step = {STEP: self.step_s, MEAN: self.mean_s, CPU_TIME: self.cpu_s}
        return {path: seconds for path, seconds in of_step.items() if seconds is not None} | self.regions

    @property
    def is_disturbed(self) -> bool:
        """Whether its times are not the program's alone."""
        return self.waited is not None and self.waited >= _DISTURBED


STEP, MEAN, CPU_TIME = OF_STEP = "", "mean of all steps", "CPU time of the step"


class NotComparableError(ValueError):
    """The runs hold no answer; the text says why and what to do."""


def warm_up_of(durations: NDArray[np.float64]) -> int:
    """How many of the first steps are warm-up, by MSER-5 (White 1997): at most half.

    The rule takes the means of batches of five steps and leaves out the first ones so that the standard error of the
    mean of the others becomes smallest.
    """
    batches = len(durations) // _BATCH
    if batches < 4:
        return 0
    means = durations[: batches * _BATCH].reshape(batches, _BATCH).mean(axis=1)
    # Sums over the rest from each batch on, of values near 0 so that squares keep their digits.
    means = means - means[-1]
    left = np.arange(batches, 0, -1)
    sums, squares = np.cumsum(means[::-1])[::-1], np.cumsum(means[::-1] ** 2)[::-1]
    errors = (squares - sums**2 / left) / left**2
    return int(np.argmin(errors[: batches // 2 + 1])) * _BATCH


def read_run(run: Run, name: str = "") -> RunTimes:
    """Reduce a run to its times.

    Raises:
        NotComparableError: It has fewer than 20 steps.
    """
    # Two folders, as runs of one name lie in different folders.
    name = name or os.path.join(*os.path.abspath(run.folders[0]).split(os.sep)[-2:])
    about, problems = about_run(run), []
    logs = run.table("logs").rows()
    header = json.loads(min(logs, key=lambda log: (log["rank"], log["session"] or 0, log["segment"] or 0))["header"])
    session, sessions, numbers, durations = _steps_of(run)
    if len(durations) < FEWEST_STEPS:
        raise NotComparableError(
            f"The run {name!r} has {len(durations)} complete steps. A comparison requires {FEWEST_STEPS} steps or "
            "more: let it run longer."
        )
    if sessions > 1:
        problems.append(f"{name}: the run was started {sessions} times; start {session} counts.")
    if not about.ended:
        problems.append(f"{name}: the run was cut short; its times until then count.")
    warm_up = warm_up_of(durations)
    host = header.get("machine") or {}
    marks = header.get("measurement") or {}
    threads = list(_threads_of(run, session))
    return RunTimes(
        name,
        float(np.median(durations[warm_up:])) / 1e9,
        _regions_of(run, session, numbers[warm_up:]),
        mean_s=float(durations.mean()) / 1e9,
        steps=len(durations) - warm_up,
        warm_up=warm_up,
        world_size=max(about.world_size or 1, *(rank + 1 for rank in about.ranks)),
        start_unix_s=about.first_unix_s,
        end_unix_s=None if about.first_unix_s is None else about.first_unix_s + (about.wall_s or 0.0),
        facts=_facts_of(header, about.hosts),
        program=str(header.get("command_sha256", "")),
        machine=f"{header.get('host')} {host['boot_id']}" if host.get("boot_id") else "",
        session=str(marks.get("session", "")),
        pair=marks.get("pair"),
        side=str(marks.get("side", "")),
        load=host.get("load_per_cpu"),
        waited=max((times.whole.waited for times, _ in threads), default=None),
        cpu_s=max((_cpu_of(times, starts[warm_up:], session) for times, starts in threads), default=0.0) or None,
        problems=tuple(problems),
    )


def _threads_of(run: Run, session: int) -> Iterator[tuple[ThreadTimes, NDArray[np.int64]]]:
    """The facts of each thread that has steps, and when these begin, in ns."""
    table = run.sql(
        f"select rank, thread, array_agg(start_ns order by start_ns) as starts from intervals "
        f"where region = {literal(BATCH)} and device = {literal(CPU)} and session = {session} group by rank, thread"
    ).arrow()
    for rank, thread, starts in zip(*(table[name] for name in ("rank", "thread", "starts")), strict=True):
        if times := ThreadTimes(run, rank.as_py(), thread.as_py(), session):
            yield times, starts.values.to_numpy()


def _cpu_of(times: ThreadTimes, starts_ns: NDArray[np.int64], session: int) -> float:
    starts = starts_ns / 1e9
    ran, _ = times.between(np.full(len(starts) - 1, session), starts[:-1], starts[1:])
    known = ran[~np.isnan(ran)]
    return float(np.median(known)) if len(known) else 0.0


def _steps_of(run: Run) -> tuple[int, int, NDArray[np.int64], NDArray[np.float64]]:
    """The session with most steps, the number of sessions, and that session's steps with their durations in ns.

    A step lasts from start to start, so that what lies between two BATCHes counts, and as long as on its slowest rank.
    """
    table = run.steps().arrow()  # ordered by rank, session and start
    ranks, sessions, steps, starts = (array_of(table[name]) for name in ("rank", "session", "step", "start_ns"))
    if not len(steps):
        return 0, 0, np.zeros(0, dtype=np.int64), np.zeros(0)
    firsts = np.flatnonzero(np.append(True, (np.diff(ranks) != 0) | (np.diff(sessions) != 0)))
    counts = np.diff(np.append(firsts, len(ranks)))
    longest = int(sessions[firsts[counts == counts.max()]].min())
    chosen = sessions == longest
    ranks, steps, starts = ranks[chosen], steps[chosen], starts[chosen]
    followed = ranks[1:] == ranks[:-1]
    numbers, place = np.unique(steps[:-1][followed], return_inverse=True)
    durations = np.zeros(len(numbers))
    np.maximum.at(durations, place, np.diff(starts)[followed])
    return longest, len(np.unique(sessions[firsts])), numbers, durations


def _regions_of(run: Run, session: int, steps: NDArray[np.int64]) -> dict[str, float]:
    # The sum over a step, of the rank that took longest in that region; 0 without the region. A region that is in fewer
    # than half of the steps has the median 0, and is left out. Some steps at a time, as each has a cell for each rank
    # and region. The sums are made here: an engine keeps a group for each cell, at many times the cost.
    within = f"from intervals where session = {session}"
    paths, devices, ranks = (
        [row[name] for row in run.sql(f"select distinct {name} {within} order by {name}").rows()]
        for name in ("path", "device", "rank")
    )
    if not paths:
        return {}
    names = [path if device == CPU else f"{path} ({device})" for path in paths for device in devices]
    numbered = ", ".join(f"({literal(path)}, {at * len(devices)})" for at, path in enumerate(paths))
    cases = " ".join(f"when {literal(device)} then {at}" for at, device in enumerate(devices))
    parts = []
    for chosen in np.array_split(steps, min(len(ranks) * len(names) * len(steps) // _CELLS + 1, len(steps))):
        sums_ns = np.zeros((len(ranks), len(names), len(chosen)))
        rows = run.sql(
            f"select rank, place + case device {cases} end as place, step, dur_ns from intervals "
            f"join (values {numbered}) as n(its, place) on path = its "
            f"where session = {session} and step between {chosen[0]} and {chosen[-1]}"
        )
        for batch in rows.batches(_CELLS):
            rank, place, step, ns = (array_of(batch.column(name)) for name in ("rank", "place", "step", "dur_ns"))
            column, known = places_in(chosen, step)  # A rank's last step has no end, and is none of them.
            cells = (places_in(np.array(ranks), rank)[0] * len(names) + place) * len(chosen) + column
            sums_ns += np.bincount(cells, ns * known, sums_ns.size).reshape(sums_ns.shape)
        parts.append(sums_ns.max(axis=0))
    medians = np.median(np.concatenate(parts, axis=1), axis=1).tolist()
    return {name: ns / 1e9 for name, ns in sorted(zip(names, medians, strict=True)) if ns > 0}


def _facts_of(header: dict[str, Any], hosts: Sequence[str]) -> dict[str, str]:
    machine = header.get("machine") or {}
    facts: dict[str, Any] = {f"version of {name}": value for name, value in header.get("versions", {}).items()}
    facts |= {"world size": header.get("world_size") or 1, "host": ", ".join(hosts), "platform": header.get("platform")}
    facts["devices"] = ", ".join(header.get("devices", ())) or None
    facts |= {name.replace("_", " "): machine.get(name) for name in ("cpu", "cpus", "governor", "max_mhz")}
    facts |= {f"attribute {name}": value for name, value in (header.get("attributes") or {}).items()}
    facts[OPTIONS] = header.get("command_sha256", "")[:8]
    return {name: str(value) for name, value in facts.items() if value not in (None, "")}


# --- a side of a comparison ------------------------------------------------------------------------------------------


def read_side(side: Any) -> list[RunTimes]:
    """The runs of a side.

    Args:
        side: A run's folder, a pattern, a folder that holds runs, a baseline that :func:`write_baseline` has written, a
            :class:`~deep500_timing.runs.Run`, :class:`RunTimes`, or a list of these.

    Raises:
        FileNotFoundError: There is no run.
        NotComparableError: A run has too few steps, or a file is no baseline.
    """
    if isinstance(side, RunTimes):
        return [side]
    if isinstance(side, (str, os.PathLike)):
        return _read_path(os.fspath(side))
    if isinstance(side, (list, tuple)):
        return [times for one in side for times in read_side(one)]
    return [read_run(side)]


def _read_path(path: str) -> list[RunTimes]:
    from deep500_timing.runs import Run

    found: list[RunTimes] = []
    for leaf in (leaf for match in sorted({path, *_glob.glob(path)}) for leaf in _leaves(match)):
        if leaf.endswith(".json"):
            found += _read_json(leaf)
        else:
            with Run.open(leaf) as run:
                found.append(read_run(run))
    if not found:
        raise FileNotFoundError(f"Comparing {path!r}: there is no run. Name a run's folder, or quote a pattern.")
    return found


def _leaves(path: str) -> list[str]:
    # A file of JSON, a run's folder, or the contents of a folder: runs, else files of JSON.
    if path.endswith(".json") and os.path.exists(path):
        return [path]
    if not os.path.isdir(path):
        return []
    if find_logs(path):
        return [path]
    inside = sorted(os.path.join(path, name) for name in os.listdir(path))
    runs = [one for one in inside if os.path.isdir(one) and find_logs(one)]
    return runs or [one for one in inside if one.endswith(".json")]


def _read_json(path: str) -> list[RunTimes]:
    try:
        data = check.read_json(path)
    except ValueError as error:
        raise NotComparableError(f"{path}: {error}") from None
    if not isinstance(data, dict) or "deep500_timing_baseline" not in data:
        raise NotComparableError(f"{path}: it is no baseline of `compare`.")
    if (wrong := check.wrong_field(data, {"runs": check.of(list, check.has(**_RUN_TIMES))})) is not None:
        raise NotComparableError(f"{path}: {wrong}. Delete the file.")
    runs: list[dict[str, Any]] = [{name: run.get(name) for name in _RUN_TIMES} for run in data["runs"]]
    return [replace(RunTimes(**run), problems=tuple(run["problems"])) for run in runs]


def _time(value: Any) -> bool:
    # A logarithm is taken of it.
    return check.number(value) and value > 0


_RUN_TIMES = {
    **dict.fromkeys(("name", "program", "machine", "session", "side"), check.string),
    "step_s": _time,
    "mean_s": check.or_none(_time),
    "cpu_s": check.or_none(_time),
    "regions": check.of(dict, _time),
    **dict.fromkeys(("start_unix_s", "end_unix_s", "load", "waited", "pair"), check.or_none(check.number)),
    "steps": check.number,
    "warm_up": check.number,
    "world_size": check.or_none(check.integer(1, check.RANKS)),
    "facts": check.of(dict, check.string),
    "problems": check.of(list, check.string),
}
"""The fields of a run in a baseline."""


def write_baseline(folder: str, runs: Sequence[RunTimes]) -> str:
    """Add runs to a baseline: one small JSON file for each session, to be kept with the code."""
    os.makedirs(folder, exist_ok=True)
    path = os.path.join(folder, f"{int(max(run.end_unix_s or 0 for run in runs))}.json")
    with whole_file(path) as file:
        file.write(json.dumps({"deep500_timing_baseline": 1, "runs": [*map(asdict, runs)]}, indent=1).encode())
    return path


# --- sessions and pairs ----------------------------------------------------------------------------------------------


def sessions_of(runs: Iterable[RunTimes]) -> list[list[RunTimes]]:
    """The runs by session, in order of time.

    ``ab`` names the session of its runs. Other runs are of one session if host and boot are the same and less than ten
    minutes lie between one and the next. A run of an unknown machine is its own session.
    """
    sessions: list[list[RunTimes]] = []
    newest: dict[str, list[RunTimes]] = {}
    for number, run in enumerate(sorted(runs, key=lambda run: run.start_unix_s or 0.0)):
        key = run.session or run.machine or f"unknown {number}"
        session = newest.get(key, [])
        ends = max((one.end_unix_s or 0.0 for one in session), default=-math.inf)
        if not session or not (run.session or (run.start_unix_s or 0.0) - ends <= _GAP_S):
            session = newest[key] = []
            sessions.append(session)
        session.append(run)
    return sessions


def pairs_of(a: Sequence[RunTimes], b: Sequence[RunTimes]) -> list[tuple[RunTimes, RunTimes]] | None:
    """Neighbouring runs of A and B, if every run has a neighbour of the other side; else None."""
    if len(a) != len(b):
        return None
    of_a = {id(run) for run in a}
    pairs = []
    for session in sessions_of([*a, *b]):
        if len(session) % 2:
            return None
        if all(run.pair is not None for run in session):
            session = sorted(session, key=lambda run: (run.pair or 0, run.start_unix_s or 0.0))
        for first, second in zip(session[::2], session[1::2], strict=True):
            if (id(first) in of_a) == (id(second) in of_a):
                return None
            pairs.append((first, second) if id(first) in of_a else (second, first))
    return pairs


def common_paths(runs: Sequence[RunTimes]) -> list[str]:
    """The paths of the times that all runs have, in the order of the first run."""
    every = [run.times for run in runs]
    return [path for path in every[0] if all(path in times for times in every)]


def log_ratios(pairs: Iterable[tuple[RunTimes, RunTimes]], path: str) -> list[float]:
    """The logarithm of B / A of each pair, for a region or, under the empty path, the step."""
    return [math.log(b.times[path] / a.times[path]) for a, b in pairs]
