"""Why one step took as long as it did: what steps are made of, and what takes longer in one of them."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from deep500_timing._base.names import BATCH, COMM, CPU
from deep500_timing._base.sql import literal
from deep500_timing._summary.nesting import path_text, split_path
from deep500_timing._summary.text import format_time, safe_name
from deep500_timing.runs import _checks as check
from deep500_timing.runs._processor import ThreadTimes, machine_of
from deep500_timing.runs._stacks import places_of, said_of, samples_in

_LEAST_SHARE = 0.1
"""Share of the excess below which a cause is not named."""
_MOST_CAUSES = 5
_MOST_READ = 100_000
"""Steps times ranks that are read: of many ranks there are fewer neighbours."""
_LEAST_REACH = 5
_STACKS_LEAST = 5
"""Sampled stacks of a step below which no line is named."""
_MOST_NAMED = 8
"""Other steps of one number that are named."""
_TRACES = "slow_steps"
_MOST_OPERATORS = 5
BETWEEN = ""
"""The path of the time between a BATCH and the one before it that no region covers."""


class Parts(NamedTuple):
    """Times in ns. A step lasts from the end of the BATCH before it to the end of its BATCH."""

    lengths: dict[tuple[int, int], int]
    """By rank and step."""
    own: dict[tuple[int, str], dict[int, int]]
    """By rank and path, then by step: the region's time without the regions inside it."""
    parents: set[str]
    """Paths that hold other regions: their own time is their rest."""


def parts_of(run: Any, steps: Iterable[int], session: int) -> Parts:
    """Read the parts of some steps on all ranks.

    A region between two BATCHes belongs to the step after it. The first step of a rank has nothing before it.
    """
    wanted = set(steps)
    of_session = f"session = {int(session)} and device = '{CPU}'"
    around = _listed({step + shift for step in wanted for shift in (-1, 0)})
    batches = run.sql(
        "select rank, thread, path, step, min(start_ns) as first, max(start_ns + dur_ns) as last, "
        f"cast(sum(dur_ns) as bigint) as total from intervals where {of_session} and region = '{BATCH}' "
        f"and step in ({around}) group by rank, thread, path, step"
    ).rows()
    totals: dict[str, int] = defaultdict(int)
    for row in batches:
        totals[row["path"]] += row["total"]
    if not totals:
        return Parts({}, {}, set())
    main = max(totals, key=lambda path: (totals[path], path))
    batches = [row for row in batches if row["path"] == main]
    inside = run.sql(
        "select rank, path, step, cast(sum(dur_ns - overlap_ns) as bigint) as total from intervals "
        f"where {of_session} and step in ({_listed(wanted)}) "
        f"and substr(path, 1, {len(main) + 1}) = {literal(main + '/')} group by rank, path, step"
    ).rows()
    own: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    parents = set()
    for row in inside:
        above = _above(row["path"])
        parents.add(above)
        own[row["rank"], row["path"]][row["step"]] += row["total"]
        own[row["rank"], above][row["step"]] -= row["total"]
    at = {(row["rank"], row["step"]): row for row in batches}
    lengths: dict[tuple[int, int], int] = {}
    gaps: dict[tuple[int, int], int] = {}
    for (rank, step), row in at.items():
        if step not in wanted:
            continue
        own[rank, main][step] += row["total"]
        before = at.get((rank, step - 1))
        gaps[rank, step] = max(row["first"] - before["last"], 0) if before is not None else 0
        lengths[rank, step] = row["last"] - row["first"] + gaps[rank, step]
        # Micro-batches of one step lie apart: the time between them is in no region either.
        own[rank, BETWEEN][step] += gaps[rank, step] + row["last"] - row["first"] - row["total"]
    for rank, step, path, took in _between(run, of_session, around, main, batches, gaps):
        own[rank, path][step] += took
        own[rank, BETWEEN][step] -= took
    return Parts(lengths, {key: dict(of) for key, of in own.items()}, parents)


def _between(
    run: Any, of_session: str, around: str, main: str, batches: list[dict[str, Any]], gaps: dict[tuple[int, int], int]
) -> Iterable[tuple[int, int, str, int]]:
    # The outermost regions that lie between two BATCHes of a rank, on the BATCHes' thread.
    names = split_path(main)
    above = [path_text(names[:depth]) for depth in range(len(names))]
    rows = run.sql(
        "select rank, thread, path, start_ns, dur_ns from intervals "
        f"where {of_session} and step in ({around}) and depth < {len(names)} "
        f"and path not in ({', '.join(map(literal, [main, *above]))})"
    ).rows()
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row in batches:
        starts[row["rank"], row["thread"]].append((row["first"], row["step"]))
    ordered = {key: sorted(of) for key, of in starts.items()}
    for row in rows:
        following = ordered.get((row["rank"], row["thread"]))
        if following is None or _above(row["path"]) not in above:
            continue
        place = int(np.searchsorted([start for start, _ in following], row["start_ns"]))
        if place < len(following):
            start, step = following[place]
            gap = gaps.get((row["rank"], step), 0)
            if start - gap <= row["start_ns"]:
                yield row["rank"], step, row["path"], min(row["dur_ns"], gap)


@cache  # Of each region in each step of each rank, but there are few paths.
def _above(path: str) -> str:
    return path_text(split_path(path)[:-1])


def waiting_regions(run: Any) -> set[str]:
    """The regions in which ranks wait for each other: communication, and operations recorded as such."""
    return {COMM} | {row["op"] for row in run.sql("select distinct op from collectives").rows() if row["op"]}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(int(number)) for number in sorted(numbers)) or "null"


@dataclass(frozen=True)
class Cause:
    """A region that took longer in the step than in those around it."""

    rank: int
    path: str
    """Its path; with ``rest``, the part outside all regions inside it. Empty for the time between the steps."""
    rest: bool
    dur_ns: int
    typical_ns: int
    """The median of the neighbours."""
    is_waiting: bool
    """Whether it is communication, in which a rank waits for others."""
    steps: tuple[int, ...] = ()
    """The steps in which it took as long, this one included; filled in for the main cause."""

    @property
    def excess_ns(self) -> int:
        """The excess over the median."""
        return self.dur_ns - self.typical_ns

    @property
    def name(self) -> str:
        """The name for a sentence."""
        if self.path == BETWEEN:
            return "the time between the steps"
        name = safe_name(split_path(self.path)[-1])
        return f"the rest of {name}" if self.rest else name


class SlowStep(NamedTuple):
    """The trace of a slow step."""

    file: str
    """In the run's folder."""
    length_s: float
    in_operators_s: float
    """The time in operators on the CPU."""
    operators: list[tuple[str, float, int]]
    """The name, the time without the operators that it calls (s) and the calls of those with most of it. Kernels of a
    device are among them."""

    def __str__(self) -> str:
        said = [f"{safe_name(name)} {format_time(self_s)} ({calls} ×)" for name, self_s, calls in self.operators]
        outside = format_time(max(self.length_s - self.in_operators_s, 0.0))
        return f"{safe_name(self.file)}: {', '.join(said)}; {outside} of {format_time(self.length_s)} in no operator"


@dataclass(frozen=True)
class Why:
    """The answer as data; its text is sentences."""

    step: int
    session: int
    rank: int
    """The rank on which the step took longest; of several the smallest."""
    dur_ns: int
    typical_ns: int
    """The median of the neighbours, each by its slowest rank."""
    neighbours: int
    ranks: int
    causes: tuple[Cause, ...]
    """The causes on that rank, the largest first; none without an excess."""
    late: Cause | None = None
    """The cause on the rank that the others waited for."""
    waited: int = 0
    lines: str = ""
    """The lines of the program that the main cause's time goes to in its steps; empty without sampled stacks."""
    waited_s: float | None = None
    """How long the rank's thread waited for a processor; None if unknown."""
    neighbours_use: str = ""
    """What other processes used meanwhile."""
    trace: SlowStep | None = None
    """The trace that ``trace_slow_steps`` kept of the step, on the rank of the main cause."""
    label: int | None = None
    """The program's number of the step; None if it is the same."""
    namesakes: tuple[int, ...] = ()
    """The other steps to which the program has given the number."""

    def __str__(self) -> str:
        name = "" if self.label is None else f" (number {_number(self.label)} of the program)"
        took = f"Step {_number(self.step)}{name} took {_time(self.dur_ns)}"
        if self.namesakes:
            others = ", ".join(map(_number, self.namesakes[:_MOST_NAMED]))
            others += ", ..." if len(self.namesakes) > _MOST_NAMED else ""
            count = len(self.namesakes) + 1
            took = f"{count} steps have that number (the others are {others}); this is the slowest.\n{took}"
        if self.neighbours == 0:
            return f"{took}; there is no other step to compare it with."
        lines = [f"{took}; its neighbours take {_time(self.typical_ns)} (median of {self.neighbours})."]
        if self.waited_s is not None and self.waited_s * 1e9 >= _LEAST_SHARE * self.dur_ns:
            others = f" ({self.neighbours_use})" if self.neighbours_use else ""
            lines.append(f"  {format_time(self.waited_s)} of it the thread waited for a processor{others}")
        if not self.causes:
            return "\n".join([*lines, "  It is not slower than they are."])
        for place, cause in enumerate(self.causes):
            where = f" on rank {self.rank}" if self.ranks > 1 else ""
            if self.late is not None and cause.is_waiting and place == 0:
                where = f" on {self.waited} of {self.ranks} ranks: they waited for rank {self.late.rank}"
            lines.append(f"  + {_time(cause.excess_ns)}  {cause.name}{where}")
        source = self.late or self.causes[0]
        there = "" if self.late is None else f"on rank {source.rank}: "
        times = f"{_time(source.dur_ns)} ({_time(source.typical_ns)} as a rule)"
        lines.append(f"  {there}{source.name} took {times}{_recurrence(self.step, source.steps)}")
        if self.lines:
            lines.append(f"  {self.lines}")
        if self.trace is not None:
            lines.append(f"  {self.trace}")
        explained = sum(cause.excess_ns for cause in self.causes)
        left = self.dur_ns - self.typical_ns - explained
        if abs(left) > _LEAST_SHARE * (self.dur_ns - self.typical_ns):
            lines.append(f"  everything else: {'+' if left > 0 else '-'} {_time(abs(left))}")
        return "\n".join(lines)


def why(run: Any, step: int | None, session: int | None, neighbours: int) -> Why:
    if step is None:
        step, session = _slowest(run, session)
        namesakes: list[int] = []
    else:
        step, session, *namesakes = _meant(run, int(step), session)
    ranks_there = run.sql("select count(distinct rank) as n from logs").rows()[0]["n"]
    reach = max(min(neighbours // 2, max(_MOST_READ // ranks_there // 2, _LEAST_REACH)), 1)
    parts = parts_of(run, range(step - reach, step + reach + 1), session)
    of_step = {rank: length for (rank, at), length in parts.lengths.items() if at == step}
    if not of_step:
        there = run.sql(f"select count(*) as n from intervals where step = {int(step)} and session = {session}").rows()
        no_batch = "no BATCH was timed in it, so its length is not known. Time each step as TimeType.BATCH"
        raise LookupError(f"Asking why step {step} took so long: {no_batch if there[0]['n'] else _steps_there(run)}.")
    ranks = {rank for rank, _ in parts.lengths}
    slowest: dict[int, int] = {}
    for (_, at), length in parts.lengths.items():
        slowest[at] = max(slowest.get(at, 0), length)
    others = [length for at, length in slowest.items() if at != step]
    rank = min(of_step, key=lambda r: (-of_step[r], r))
    typical = int(median(others)) if others else 0
    labels = run.sql(f"select min(label) as label from labels where step = {step} and session = {session}").rows()
    result = Why(
        step, session, rank, of_step[rank], typical, len(others), len(ranks), (),
        label=labels[0]["label"], namesakes=tuple(namesakes),
    )  # fmt: skip
    excess = result.dur_ns - typical
    result = _with_waiting(run, result)
    if not others or excess <= 0:
        return result
    causes = _causes(parts, step, waiting_regions(run))
    own = [one for one in causes if one.rank == rank and one.excess_ns >= _LEAST_SHARE * excess][:_MOST_CAUSES]
    if not own:
        return replace(result, trace=_trace_of(run, step, rank, session))
    late, waited = _late_rank(causes, own, excess)
    main = _with_steps(run, late or own[0], session, step)
    if late is None:
        own[0] = main
    else:
        late = main
    lines = ""
    # No line is why the thread had no processor.
    if main.path != BETWEEN and (result.waited_s or 0.0) * 1e9 < excess / 2:
        samples = samples_in(run, main.path, rank=main.rank, session=session, steps=main.steps or (step,))
        lines = said_of(places_of(samples, _STACKS_LEAST))
    trace = _trace_of(run, step, main.rank, session)
    return replace(result, causes=tuple(own), late=late, waited=waited, lines=lines, trace=trace)


def _with_waiting(run: Any, found: Why) -> Why:
    of_step = f"rank = {found.rank} and session = {found.session} and step = {found.step}"
    rows = run.sql(
        f"select thread, max(start_ns + dur_ns) as last from intervals where region = '{BATCH}' and device = '{CPU}' "
        f"and {of_step} group by thread order by sum(dur_ns) desc, thread limit 1"
    ).rows()
    span = rows[0]["last"] - found.dur_ns, rows[0]["last"]
    parts = ThreadTimes(run, found.rank, rows[0]["thread"], found.session).parts(found.session, *span)
    if parts is None:
        return found
    machine = machine_of(run, found.rank, span, found.session)
    return replace(found, waited_s=parts.waited_s, neighbours_use=machine.neighbours())


def _slowest(run: Any, session: int | None) -> tuple[int, int]:
    # The longest BATCH after the first of each session, which pays for the start; or the longest pause before one.
    only = "" if session is None else f"and session = {int(session)} "
    rows = run.sql(
        "with batches as (select rank, session, step, path, min(start_ns) as first, max(start_ns + dur_ns) as last "
        f"from intervals where region = '{BATCH}' and device = '{CPU}' and step is not null {only}"
        "group by rank, session, step, path), spans as (select session, step, last - coalesce(lag(last) over "
        "(partition by rank, session, path order by first), first) as length, "
        "row_number() over (partition by rank, session, path order by first) as number from batches) "
        "select session, step, length from spans order by case when number > 1 then 0 else 1 end, "
        "length desc, step limit 1"
    ).rows()
    if not rows:
        raise LookupError(f"Asking why the slowest step took so long: {_steps_there(run)}.")
    return rows[0]["step"], rows[0]["session"]


def _meant(run: Any, number: int, session: int | None) -> list[int]:
    # The step that a number means, its session, and the others that it might mean. The program's number comes first.
    only = "" if session is None else f" and session = {int(session)}"
    found = run.sql(
        f"with named as (select distinct session, step from labels where label = {number}{only} union "
        f"select distinct session, step from intervals where step = {number}{only} and (session, step) not in "
        "(select session, step from labels)), newest as (select * from named where session = "
        "(select max(session) from named)) "
        "select n.session, n.step, max(i.dur_ns) as dur_ns from newest n left join intervals i on "
        "i.session = n.session and i.step = n.step and i.region = 'BATCH' and i.device = 'CPU' "
        "group by n.session, n.step order by dur_ns desc nulls last, n.step"
    ).rows()
    if not found:  # it may be the number of a step that the program has given another
        found = run.sql(
            f"select max(session) as session, {number} as step from intervals where step = {number}{only} "
            "having count(*) > 0"
        ).rows()
    if not found:
        raise LookupError(f"Asking why step {number} took so long: {_steps_there(run)}.")
    return [found[0]["step"], found[0]["session"], *sorted(row["step"] for row in found[1:])]


def _steps_there(run: Any) -> str:
    steps = run.steps().arrow()["step"].to_pylist()
    if not steps:
        return "the run has no steps; time each as TimeType.BATCH, or number them with timer.step(n)"
    return f"the run has no such step; it has steps from {min(steps)} to {max(steps)}"


def _causes(parts: Parts, step: int, waiting: set[str]) -> list[Cause]:
    steps: dict[int, list[int]] = defaultdict(list)
    for rank, at in parts.lengths:
        steps[rank].append(at)
    causes = []
    for (rank, path), took_at in parts.own.items():
        others = [took_at.get(at, 0) for at in steps[rank] if at != step]
        typical = int(median(others)) if others else 0
        name = split_path(path)[-1] if path else BETWEEN
        is_rest = path in parts.parents or path == BETWEEN
        causes.append(Cause(rank, path, is_rest, took_at.get(step, 0), typical, name in waiting))
    return sorted(causes, key=lambda cause: (-cause.excess_ns, cause.rank, cause.path))


def _late_rank(causes: list[Cause], own: list[Cause], excess: int) -> tuple[Cause | None, int]:
    # The late rank waits least in communication, and another region took it longer.
    if not own[0].is_waiting:
        return None, 0
    busy = [cause for cause in causes if not cause.is_waiting and cause.excess_ns >= _LEAST_SHARE * excess]
    waits: dict[int, int] = defaultdict(int)
    for cause in causes:
        if cause.is_waiting:
            waits[cause.rank] += cause.excess_ns
    for cause in busy:
        if waits[cause.rank] < excess / 2:
            return cause, sum(wait >= excess / 2 for wait in waits.values())
    return None, 0


def _with_steps(run: Any, cause: Cause, session: int, step: int) -> Cause:
    threshold = cause.typical_ns + cause.excess_ns // 2
    of_rank = f"rank = {cause.rank} and session = {session} and device = '{CPU}' and step is not null"
    if cause.path == BETWEEN:
        found = run.sql(
            "with batches as (select step, min(start_ns) as first, max(start_ns + dur_ns) as last from intervals "
            f"where {of_rank} and region = '{BATCH}' group by step), gaps as (select step, first - lag(last) over "
            f"(order by first) as gap from batches) select step from gaps where gap >= {threshold}"
        ).rows()
    elif cause.rest:
        return cause
    else:
        found = run.sql(
            f"select step from intervals where {of_rank} and path = {literal(cause.path)} "
            f"group by step having sum(dur_ns) >= {threshold}"
        ).rows()
    return replace(cause, steps=tuple(sorted({row["step"] for row in found} | {step})))


def _trace_of(run: Any, step: int, rank: int, session: int) -> SlowStep | None:
    """The trace that was kept of a step; None without one, or if its file cannot be read."""
    if _TRACES not in run.tables:
        return None
    # A trace lasts from one optimizer's step to the next, and may begin in the BATCH before.
    of = f"where rank = {int(rank)} and session = {int(session)}"
    rows = run.sql(
        "with batch as (select min(start_ns) as first, max(start_ns + dur_ns) as last from intervals "
        f"{of} and step = {int(step)} and region = '{BATCH}' and device = '{CPU}') "
        f"select file, dur_ns from {_TRACES}, batch {of} "
        "and 2 * (least(last, start_ns + dur_ns) - greatest(first, start_ns)) > dur_ns"
    ).rows()
    for folder, row in ((folder, row) for row in rows for folder in run.folders):
        name = os.path.basename(row["file"] or "")
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            trace = check.read_json(os.path.join(folder, _TRACES, name))
            return _slow_step(os.path.join(_TRACES, name), row["dur_ns"] / 1e9, trace["traceEvents"])
    return None


_IS_EVENT = check.has(name=check.string, ts=check.number, dur=check.number)


def _slow_step(name: str, length_s: float, events: list[dict[str, Any]]) -> SlowStep:
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    in_operators_us = 0.0
    events = [event for event in events if _IS_EVENT(event)]
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    around: dict[Any, list[tuple[float, str]]] = defaultdict(list)
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        above = around[event["tid"]]
        while above and above[-1][0] <= event["ts"]:
            above.pop()
        if above:
            found[above[-1][1]][0] -= event["dur"]
        else:
            in_operators_us += event["dur"]
        above.append((event["ts"] + event["dur"], event["name"]))
    for event in [*operators, *(event for event in events if event.get("cat") in ("kernel", "gpu_memcpy"))]:
        found[event["name"]][0] += event["dur"]
        found[event["name"]][1] += 1
    ordered = sorted(((of, us / 1e6, int(calls)) for of, (us, calls) in found.items()), key=lambda one: -one[1])
    return SlowStep(name, length_s, in_operators_us / 1e6, ordered[:_MOST_OPERATORS])


def _recurrence(step: int, steps: tuple[int, ...]) -> str:
    others = [other for other in steps if other != step]
    if not others:
        return ""
    gaps = {after - before for before, after in pairwise(steps)}
    nearest = sorted(sorted(others, key=lambda other: (abs(other - step), other))[:3])
    shown = ", ".join(map(_number, nearest))
    if len(gaps) == 1 and len(steps) >= 3 and gaps != {1}:
        return f"; the same at {shown}: every {_number(gaps.pop())} steps"
    more = f" and {len(others) - len(nearest)} more" if len(others) > len(nearest) else ""
    return f"; the same at {shown}{more}"


def _number(value: int) -> str:
    return f"{value:,}".replace(",", " ") if abs(value) >= 10_000 else str(value)


def _time(nanoseconds: float) -> str:
    return format_time(nanoseconds / 1e9)
