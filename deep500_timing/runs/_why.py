"""Why one step took as long as it did."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from deep500_timing._base.require import require
from deep500_timing._summary.nesting import split_path
from deep500_timing._summary.text import format_time, safe_name

_LEAST_SHARE = 0.1
"""What explains less of the excess than this is not named."""
_MOST_CAUSES = 5
_WAITING = {"COMM"}
"""Regions in which a rank waits for the others, besides those that are named for a collective."""


@dataclass(frozen=True)
class Cause:
    """A region that took longer in the step than in those around it."""

    rank: int
    path: str
    """Its place in the tree; with ``rest`` what of it lies outside every region inside it."""
    rest: bool
    dur_ns: int
    """In the step."""
    typical_ns: int
    """The median of the neighbours."""
    is_waiting: bool
    """Whether it is communication, in which a rank waits for others."""
    steps: tuple[int, ...] = ()
    """The steps in which it took as long, this one among them; looked for where it is the cause."""

    @property
    def excess_ns(self) -> int:
        """How much longer than as a rule."""
        return self.dur_ns - self.typical_ns

    @property
    def name(self) -> str:
        """As a reader knows it."""
        name = safe_name(split_path(self.path)[-1])
        return f"the rest of {name}" if self.rest else name


@dataclass(frozen=True)
class Why:
    """The answer, as data; as a text it is sentences."""

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
    """What explains the excess on that rank, the largest first; none if there is no excess."""
    late: Cause | None = None
    """Of several ranks: what kept the one that the others waited for."""
    waited: int = 0
    """How many ranks waited for it."""

    def __str__(self) -> str:
        """A few lines."""
        lines = [
            f"Step {_number(self.step)} took {_time(self.dur_ns)}; its neighbours take {_time(self.typical_ns)} "
            f"(median of {self.neighbours})."
        ]
        if self.neighbours == 0:
            return f"Step {_number(self.step)} took {_time(self.dur_ns)}; there is no other step to compare it with."
        if not self.causes:
            lines.append("  It is not slower than they are.")
            return "\n".join(lines)
        on = f" on rank {self.rank}" if self.ranks > 1 else ""
        for place, cause in enumerate(self.causes):
            waiting = cause.is_waiting and self.late is not None and place == 0
            where = (
                f" on {self.waited} of {self.ranks} ranks: they waited for rank {self.late.rank}"
                if waiting and self.late
                else on
            )
            lines.append(f"  + {_time(cause.excess_ns)}  {cause.name}{where}")
        source = self.late or self.causes[0]
        if self.late is not None:
            lines.append(f"  on rank {source.rank}: {self._took(source)}{_recurrence(self.step, source.steps)}")
        else:
            lines.append(f"  {self._took(source)}{_recurrence(self.step, source.steps)}")
        explained = sum(cause.excess_ns for cause in self.causes)
        left = self.dur_ns - self.typical_ns - explained
        if abs(left) > _LEAST_SHARE * (self.dur_ns - self.typical_ns):
            lines.append(f"  everything else: {'+' if left > 0 else '-'} {_time(abs(left))}")
        return "\n".join(lines)

    @staticmethod
    def _took(cause: Cause) -> str:
        return f"{cause.name} took {_time(cause.dur_ns)} ({_time(cause.typical_ns)} as a rule)"


def why(run: Any, step: int, session: int | None, neighbours: int) -> Why:
    """Compare a step of a :class:`Run` with those around it. See :meth:`Run.why`."""
    nw = require("narwhals", extra="runs", caller="Run.why")
    frame = run.intervals().frame
    if session is None:
        found = frame.filter(nw.col("step") == step)
        sessions = found.select(nw.col("session").max()).collect("pyarrow").to_native().to_pylist()
        session = sessions[0]["session"] if sessions else None
    reach = max(neighbours // 2, 1)
    rows = _rows(run, step - reach, step + reach, session) if session is not None else []
    if session is None or not any(row["step"] == step for row in rows):
        raise LookupError(f"Asking why step {step} took so long: {_steps_there(run)}.")
    lengths = _lengths(rows)
    if step not in {at for _, at in lengths}:
        raise LookupError(
            f"Asking why step {step} took so long: no BATCH was timed in it, so its length is not known. Time each "
            "step as TimeType.BATCH."
        )
    ranks = sorted({rank for rank, _ in lengths})
    slowest: dict[int, int] = {}
    for (_, at), length in lengths.items():
        slowest[at] = max(slowest.get(at, 0), length)
    others = [length for at, length in slowest.items() if at != step]
    of_step = {rank: lengths[rank, step] for rank in ranks if (rank, step) in lengths}
    rank = min(of_step, key=lambda r: (-of_step[r], r))
    typical = int(median(others)) if others else 0
    result = Why(step, session, rank, of_step[rank], typical, len(others), len(ranks), ())
    excess = result.dur_ns - typical
    if not others or excess <= 0:
        return result
    causes = _causes(rows, step, ranks, _waiting_regions(run))
    own = [cause for cause in causes if cause.rank == rank and cause.excess_ns >= _LEAST_SHARE * excess]
    own = own[:_MOST_CAUSES]
    late, waited = _late_rank(causes, own, excess)
    source = late or (own[0] if own else None)
    if source is not None:
        source_with_steps = _with_steps(run, source, session, step)
        if late is not None:
            late = source_with_steps
        else:
            own[0] = source_with_steps
    return Why(step, session, rank, result.dur_ns, typical, len(others), len(ranks), tuple(own), late, waited)


def _rows(run: Any, first: int, last: int, session: int) -> list[dict[str, Any]]:
    nw = require("narwhals", extra="runs", caller="Run.why")
    frame = run.intervals(session=session, steps=(first, last)).frame.filter(nw.col("device") == "CPU")
    grouped = frame.group_by("rank", "path", "region", "step", "overlaps").agg(
        nw.col("dur_ns").sum().cast(nw.Int64).alias("total")
    )
    rows: list[dict[str, Any]] = grouped.collect("pyarrow").to_native().to_pylist()
    return rows


def _steps_there(run: Any) -> str:
    steps = run.steps().arrow()["step"].to_pylist()
    if not steps:
        return "the run has no steps; time each as TimeType.BATCH, or number them with timer.step(n)"
    return f"the run has no such step; it has steps from {min(steps)} to {max(steps)}"


def _lengths(rows: list[dict[str, Any]]) -> dict[tuple[int, int], int]:
    lengths: dict[tuple[int, int], int] = defaultdict(int)
    for row in rows:
        if row["region"] == "BATCH":
            lengths[row["rank"], row["step"]] += row["total"]
    return lengths


def _waiting_regions(run: Any) -> set[str]:
    named = run.table("collectives").frame.select("op").unique().collect("pyarrow").to_native().to_pylist()
    return _WAITING | {row["op"] for row in named}


def _causes(rows: list[dict[str, Any]], step: int, ranks: list[int], waiting: set[str]) -> list[Cause]:
    # What each region inside a BATCH took for itself, in each step of each rank.
    inside = [row for row in rows if "BATCH" in split_path(row["path"])]
    own: dict[tuple[int, str, int], int] = defaultdict(int)
    parents = {row["path"] for row in inside}
    with_children = {_parent(path) for path in parents}
    steps: dict[int, set[int]] = defaultdict(set)
    for row in inside:
        key = row["rank"], row["path"], row["step"]
        own[key] += row["total"]
        steps[row["rank"]].add(row["step"])
        above = _parent(row["path"])
        if above in parents and not row["overlaps"]:
            own[row["rank"], above, row["step"]] -= row["total"]
    by_region: dict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    for (rank, path, at), took in own.items():
        by_region[rank, path][at] = took
    causes = []
    for (rank, path), took_at in by_region.items():
        others = [took_at.get(at, 0) for at in steps[rank] if at != step]
        typical = int(median(others)) if others else 0
        name = split_path(path)[-1]
        causes.append(Cause(rank, path, path in with_children, took_at.get(step, 0), typical, name in waiting))
    return sorted(causes, key=lambda cause: (-cause.excess_ns, cause.rank, cause.path))


def _parent(path: str) -> str:
    names = split_path(path)[:-1]
    return "/".join(name.replace("\\", "\\\\").replace("/", "\\/") for name in names)


def _late_rank(causes: list[Cause], own: list[Cause], excess: int) -> tuple[Cause | None, int]:
    # The others wait in communication for the one that waits least, because something else took it longer.
    if not own or not own[0].is_waiting:
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
    if cause.rest:
        return cause
    nw = require("narwhals", extra="runs", caller="Run.why")
    threshold = cause.typical_ns + cause.excess_ns // 2
    frame = run.intervals(rank=cause.rank, session=session).frame
    frame = frame.filter((nw.col("path") == cause.path) & (nw.col("device") == "CPU") & ~nw.col("step").is_null())
    grouped = frame.group_by("step").agg(nw.col("dur_ns").sum().cast(nw.Int64).alias("total"))
    found = grouped.filter(nw.col("total") >= threshold).collect("pyarrow").to_native().to_pylist()
    steps = tuple(sorted({row["step"] for row in found} | {step}))
    return Cause(cause.rank, cause.path, cause.rest, cause.dur_ns, cause.typical_ns, cause.is_waiting, steps)


def _recurrence(step: int, steps: tuple[int, ...]) -> str:
    others = [other for other in steps if other != step]
    if not others:
        return ""
    gaps = {after - before for before, after in pairwise(steps)}
    nearest = sorted(sorted(others, key=lambda other: (abs(other - step), other))[:3])
    shown = ", ".join(map(_number, nearest))
    if len(gaps) == 1 and len(steps) >= 3:
        return f"; the same at {shown}: every {_number(gaps.pop())} steps"
    more = f" and {len(others) - len(nearest)} more" if len(others) > len(nearest) else ""
    return f"; the same at {shown}{more}"


def _number(value: int) -> str:
    return f"{value:,}".replace(",", " ") if abs(value) >= 10_000 else str(value)


def _time(nanoseconds: float) -> str:
    return format_time(nanoseconds / 1e9)
