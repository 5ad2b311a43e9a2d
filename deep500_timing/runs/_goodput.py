"""Goodput: where the wall clock of the whole job went, restarts included. It adds up to 100 %."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deep500_timing._distributed.stragglers import find_stragglers
from deep500_timing._summary.text import UNKNOWN, format_time, lines_of
from deep500_timing.runs._goodput_parts import (
    BUCKETS,
    CODE,
    LABELS,
    Process,
    RankParts,
    parts_of_ranks,
    processes_of,
    set_generations,
    set_steps,
)

_DAY_S = 86400.0
_LEAST_FAILURES = 3
_MOST_CELLS = 30_000_000
"""Cells of ranks and steps that are held. Of longer runs several steps share a cell."""
_TITLES = {
    "productive": "productive steps",
    "communication": "exposed communication",
    "stragglers": "waiting for stragglers",
    "data": "waiting for data",
    "recompilation": "recompilation",
    "evaluation": "evaluation",
    "checkpoint": "saving checkpoints",
    "lost": "lost work",
    "startup": "start-up",
    "initialization": "imports and initialization",
    "startup_compilation": "compilation",
    "restore": "restoring checkpoints",
    "down": "down time between sessions",
    "queue": "queueing",
    "absent": "absent",
    "unknown": "unknown",
}
_STARTUP = ("initialization", "startup_compilation", "restore")
_ORDER = tuple(name for name in _TITLES if name not in (*_STARTUP, "absent"))
_NEEDS = {
    "data": "data",
    "communication": "communication",
    "stragglers": "communication",
    "evaluation": "evaluation",
    "checkpoint": "checkpoint",
    "recompilation": "compilation",
    "startup_compilation": "compilation",
    "restore": "restore",
}
"""The bucket of regions without which a part cannot be measured."""
_STEPS = ("productive", "communication", "stragglers")
_TRAINING = (*_STEPS, "data", "recompilation", "evaluation", "checkpoint")


@dataclass(frozen=True)
class Bucket:
    """A part of the wall clock."""

    name: str
    title: str
    seconds: float | None
    """None if the run has nothing that would show it; its time is then in another part."""
    share: float | None
    """Of the wall clock."""
    parts: tuple[Bucket, ...] = ()

    @property
    def halved_days(self) -> float | None:
        """Days that the job would be shorter if this part were halved; None for productive steps."""
        return None if self.seconds is None or self.name == "productive" else self.seconds / 2 / _DAY_S


@dataclass(frozen=True)
class Checkpoints:
    """How often to save, by Young (1974) and Daly (2006)."""

    saves: int
    save_s: float
    """Mean time that training waits for one."""
    interval_s: float | None
    """Median time between two; None with fewer than two in one session."""
    mtbf_s: float
    """Running time for each failure."""
    young_s: float
    """√(2 · save · MTBF)."""
    daly_s: float
    """Daly's higher-order estimate: the time of work between two saves."""


@dataclass(frozen=True)
class Goodput:
    """The account of a run. ``docs/goodput.md`` defines its parts."""

    wall_s: float
    """From the submission if known, else the first process start, to the last end."""
    buckets: tuple[Bucket, ...]
    """The job: in each step, the slowest rank decides."""
    ranks: dict[int, dict[str, float]]
    """Seconds of each part, by rank; each adds up to :attr:`wall_s`."""
    starts: int
    failures: int
    """Starts that ended by a kill, a signal or an exception and were followed by another."""
    kept_steps: int
    lost_steps: int | None
    """Steps that a later start computed again; None if steps are not numbered by the program."""
    mfu: float | None
    checkpoints: Checkpoints | None
    """None with fewer than three failures, or without saved checkpoints."""
    notes: tuple[str, ...]

    def seconds(self, *names: str) -> float:
        """Seconds of these parts together; 0 for parts that were not measured."""
        found = {part.name: part.seconds or 0.0 for bucket in self.buckets for part in (bucket, *bucket.parts)}
        return sum(found[name] for name in names)

    @property
    def goodput(self) -> float:
        """Steps that count, their communication included, of the wall clock without queueing: Google's definition."""
        return self.seconds(*_STEPS) / (self.wall_s - self.seconds("queue")) if self.wall_s else 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: running and neither starting nor lost, of the wall clock with queueing."""
        return self.seconds(*_TRAINING) / self.wall_s if self.wall_s else 0.0

    @property
    def mfu_goodput(self) -> float | None:
        """MFU × goodput: the share of the peak FLOP/s of the whole job that advanced training."""
        return None if self.mfu is None else self.mfu * self.goodput

    def __str__(self) -> str:
        return "\n".join(text_of(self))


def goodput_of(run: Any, *, buckets: Mapping[str, str] | None = None, mfu: float | None = None) -> Goodput:
    """Account for the wall clock of a run. See :meth:`deep500_timing.runs.Run.goodput`."""
    chosen = dict(buckets or {})
    for region, bucket in chosen.items():
        if bucket not in BUCKETS:
            raise ValueError(f"Goodput: the bucket {bucket!r} of {region!r} is unknown; use {', '.join(BUCKETS)}.")
    notes: list[str] = []
    by_rank = processes_of(run, notes)
    processes = [process for of in by_rank.values() for process in of]
    if not processes:
        raise LookupError("Goodput: the run has no session with a time. Its logs are empty or damaged.")
    starts = set_generations(processes)
    knows_lost = set_steps(run, by_rank, notes)
    submit_ns = min((of[0].submit_ns for of in by_rank.values() if of[0].submit_ns is not None), default=None)
    begin_ns, end_ns = min(of[0].begin_ns for of in by_rank.values()), max(of[-1].end_ns for of in by_rank.values())
    queue_ns = 0 if submit_ns is None else max(begin_ns - submit_ns, 0)
    seen: set[str] = set()
    job = _Job(by_rank, (begin_ns, end_ns), starts)
    for parts in parts_of_ranks(run, by_rank, chosen, (begin_ns, end_ns), seen):
        job.add(parts)
    totals = job.totals()
    totals["queue"] += queue_ns
    wall_s = (end_ns - begin_ns + queue_ns) / 1e9
    knows_queue = submit_ns is not None or any(process.allocated_ns is not None for process in processes)
    if not knows_queue:
        notes.append(
            "Queueing is unknown: it is outside the account, or in down time. Slurm tells it between restarts; set "
            "DEEP500_TIMING_SUBMIT_UNIX_S for the first start."
        )
    if not all(process.knows_start for process in processes):
        notes.append("Some processes do not tell when they started. Their start-up begins with their first record.")
    if not job.steps:
        notes.append("The run has no step: time BATCH, or call timer.step(n).")
    if run.sql("select 1 as n from events where what = 'removed' limit 1").rows():
        notes.append("keep_bytes has removed old files. What they showed is unknown here.")
    missing = {name for name, bucket in _NEEDS.items() if bucket not in seen}
    missing |= {"stragglers"} if len(by_rank) == 1 else set()
    if "stragglers" in missing and starts == 1 and (what_if := find_stragglers(run).what_if) is not None:
        waited_ns = min(round(what_if.all_alike_s * job.steps * 1e9), totals["productive"])
        totals["stragglers"] += waited_ns
        totals["productive"] -= waited_ns
        missing -= {"stragglers"}
        notes.append("Ranks wait for each other inside other regions, such as BACKWARD: as `stragglers` found it.")
    missing |= set() if knows_lost else {"lost"}
    missing |= set() if knows_queue else {"queue"}
    failures = len({process.generation for process in processes if process.failed and process.generation < starts - 1})
    lost = {(process.generation, n) for process in processes for n in process.numbers[process.is_lost].tolist()}
    return Goodput(
        wall_s,
        _tree(totals, wall_s, missing),
        {
            rank: {name: ns / 1e9 for name, ns in (of | {"queue": queue_ns}).items()}
            for rank, of in sorted(job.of_rank.items())
        },
        starts,
        failures,
        job.steps - len(lost),
        len(lost) if knows_lost else None,
        _mfu_of(run) if mfu is None else mfu,
        _checkpoints(run, by_rank, failures, job),
        tuple(notes),
    )


class _Job:
    """Adds up the parts of ranks for the job: window by window, those of the rank that the others wait for.

    A window lasts from the end of one step on all ranks to the end of the next. The rank that communicates least in it
    is the slowest, because it arrives last.
    """

    def __init__(self, by_rank: dict[int, list[Process]], span_ns: tuple[int, int], starts: int) -> None:
        self.by_rank = by_rank
        self.of_rank: dict[int, dict[str, int]] = {}
        self.steps = 0
        bounds = [np.array(span_ns[:1])]
        kinds: list[NDArray[np.int8]] = []
        for generation in range(starts):
            of = [process for all_ in by_rank.values() for process in all_ if process.generation == generation]
            numbers, place = np.unique(np.concatenate([process.numbers for process in of]), return_inverse=True)
            self.steps += len(numbers)
            latest = np.full(len(numbers), span_ns[0])
            np.maximum.at(latest, place, np.concatenate([process.ends_ns for process in of]))
            stride = max(-(-len(latest) * len(by_rank) * starts // _MOST_CELLS), 1)
            latest = np.sort(latest)[::-stride][::-1]
            begun = [int(process.starts_ns[0]) for process in of if len(process.starts_ns)]
            first = [min(max(begun), int(latest[0]))] if begun else []
            begin, end = min(process.begin_ns for process in of), max(process.end_ns for process in of)
            bounds += [np.array([begin, *first]), latest, np.array([end])]
            kinds.append(np.repeat(np.array([_GAP, _START, _STEP, _TAIL], np.int8), [1, len(first), len(latest), 1]))
        # Clocks of several hosts may disagree: a bound that goes back makes its window empty.
        self.bounds_ns = np.maximum.accumulate(np.concatenate(bounds))
        self.kinds = np.concatenate(kinds)
        self._best = np.full(len(self.kinds), math.inf)
        self._slowest = np.zeros((len(self.kinds), len(LABELS)), np.int64)
        self._sum = np.zeros_like(self._slowest)
        self._ranks_there = np.zeros(len(self.kinds), np.int64)
        self._communication = np.zeros((len(by_rank), len(self.kinds)), np.int64)

    def add(self, parts: RankParts) -> None:
        account: dict[str, int] = dict(zip(LABELS, parts.at(parts.times_ns[-1:])[0].tolist(), strict=True))
        found = np.diff(parts.at(self.bounds_ns), axis=0)
        # A rank is down while the job is, and absent while other ranks run.
        account["down"] = int(found[self.kinds == _GAP, CODE["absent"]].sum())
        account["absent"] -= account["down"]
        absent, communicates = found[:, CODE["absent"]], found[:, CODE["communication"]]
        is_there = absent < np.maximum(np.diff(self.bounds_ns), 1)
        self._communication[len(self.of_rank)] = communicates
        self.of_rank[parts.rank] = account
        self._ranks_there += is_there
        self._sum[is_there] += found[is_there]
        # Of a start, the rank whose first step is the last to begin; after the steps, the rank that ends last.
        score = (absent + communicates).astype(np.float64)
        is_start, is_tail = self.kinds == _START, self.kinds == _TAIL
        score[is_start] = -found[is_start][:, [CODE[name] for name in _STARTUP]].sum(axis=1)
        score[is_tail] = absent[is_tail]
        better = (score < self._best) & (is_there | (self.kinds == _GAP))
        self._best[better] = score[better]
        self._slowest[better] = found[better]

    def totals(self) -> dict[str, int]:
        """The account of the job in nanoseconds; call it once, after the last rank."""
        spans = np.diff(self.bounds_ns)
        taken = self._slowest
        taken[np.isinf(self._best)] = 0
        taken[:, CODE["unknown"]] += spans - taken.sum(axis=1)
        absent = taken[:, CODE["absent"]]
        of: dict[str, int] = dict(zip(LABELS, taken.sum(axis=0).tolist(), strict=True))
        is_gap = self.kinds == _GAP
        down, late = int(absent[is_gap].sum()), int(absent[self.kinds == _START].sum())
        # A rank that starts after the others delays them; elsewhere nothing says why it is not there.
        of["initialization"] += late
        of["unknown"] += of.pop("absent") - down - late
        of["queue"] = self._queued()
        of["down"] = down - of["queue"]
        of["stragglers"] = self._waited()
        of["productive"] -= of["stragglers"]
        self._split_ranks()
        return of

    def _waited(self) -> int:
        # What the slowest rank computes beyond the mean of the others, limited by how much longer these communicate.
        is_step = self.kinds == _STEP
        own = self._slowest[is_step]
        others = np.maximum(self._ranks_there[is_step] - 1, 1)
        longer = (self._sum[is_step] - own) / others[:, np.newaxis] - own
        computes = own[:, CODE["productive"]]
        found = np.minimum(np.minimum(-longer[:, CODE["productive"]], longer[:, CODE["communication"]]), computes)
        return int(np.maximum(found, 0).sum())

    def _split_ranks(self) -> None:
        # The shortest communication of a window is communication on every rank; the rest is waiting.
        is_step = self.kinds == _STEP
        least = self._slowest[is_step, CODE["communication"]]
        for account, communicates in zip(self.of_rank.values(), self._communication, strict=True):
            account["stragglers"] = int(np.maximum(communicates[is_step] - least, 0).sum())
            account["communication"] -= account["stragglers"]

    def _queued(self) -> int:
        # Of the down time before a start, what passed before its nodes were allocated.
        queued = 0
        for generation, gap in enumerate(np.flatnonzero(self.kinds == _GAP).tolist()):
            low, high = int(self.bounds_ns[gap]), int(self.bounds_ns[gap + 1])
            told = [
                process.allocated_ns + process.shift_ns
                for of in self.by_rank.values()
                for process in of
                if process.generation == generation and process.allocated_ns is not None
            ]
            queued += min(max(min(told) - low, 0), high - low) if told else 0
        return queued


_GAP, _START, _STEP, _TAIL = range(4)
"""Kinds of windows: before a start, up to its first step, a step, after its last step."""


def _tree(totals: dict[str, int], wall_s: float, missing: set[str]) -> tuple[Bucket, ...]:
    def bucket(name: str, parts: tuple[Bucket, ...] = ()) -> Bucket:
        ns = sum(totals[part.name] for part in parts) if parts else totals[name]
        if name in missing and not ns:
            return Bucket(name, _TITLES[name], None, None, parts)
        return Bucket(name, _TITLES[name], ns / 1e9, ns / 1e9 / wall_s if wall_s else 0.0, parts)

    startup = tuple(bucket(name) for name in _STARTUP)
    return tuple(bucket(name, startup if name == "startup" else ()) for name in _ORDER)


def _mfu_of(run: Any) -> float | None:
    # The median of the samples, if the program recorded its MFU.
    rows = run.sql("select value from samples where lower(metric) like '%mfu' and value is not null").rows()
    values = [row["value"] for row in rows]
    return float(np.median(values)) if values else None


def _checkpoints(run: Any, by_rank: dict[int, list[Process]], failures: int, job: _Job) -> Checkpoints | None:
    if failures < _LEAST_FAILURES:
        return None
    # Saves of the rank that spends most on them: others may only wait.
    spent = {rank: of["checkpoint"] / 1e9 for rank, of in job.of_rank.items()}
    rank = max(spent, key=lambda rank: (spent[rank], -rank))
    times: dict[int, list[int]] = {}
    for row in run.sql(
        "select session, max(unix_ns) as time from milestones where what = 'checkpoint_saved' "
        f"and rank = {int(rank)} and unix_ns is not null group by session, coalesce(step, unix_ns)"
    ).rows():
        times.setdefault(row["session"], []).append(row["time"])
    saves = sum(map(len, times.values()))
    if not saves or not spent[rank]:
        return None
    between = [later - earlier for of in times.values() for earlier, later in pairwise(sorted(of))]
    save_s = spent[rank] / saves
    running_s = sum(process.end_ns - process.begin_ns for process in by_rank[rank]) / 1e9
    young, daly = checkpoint_interval(save_s, running_s / failures)
    interval_s = float(np.median(between)) / 1e9 if between else None
    return Checkpoints(saves, save_s, interval_s, running_s / failures, young, daly)


def checkpoint_interval(save_s: float, mtbf_s: float) -> tuple[float, float]:
    """The best time between two checkpoints.

    Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974; J. T.
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006, equation 37.

    Args:
        save_s: Time that training waits for a checkpoint.
        mtbf_s: Mean time between failures.

    Returns:
        Young's estimate and Daly's, in seconds of work between two saves.
    """
    young = math.sqrt(2 * save_s * mtbf_s)
    if save_s >= 2 * mtbf_s:
        return young, mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young, young * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def text_of(account: Goodput) -> list[str]:
    together = ("together", format_time(account.wall_s), "100.00 %", "")
    rows = [("", "time", "share", "if halved"), *rows_of(account, "  "), together]
    return [sentence(account), "", *lines_of(rows, left=1), "", *advice(account), *account.notes]


def sentence(account: Goodput) -> str:
    said = f"Goodput {account.goodput:.1%}, ETTR {account.ettr:.1%}".replace("%", " %")
    if account.mfu_goodput is not None:
        said += f", MFU × goodput {100 * account.mfu_goodput:.1f} %"
    said += f": {account.kept_steps} steps count"
    lost = "an unknown number" if account.lost_steps is None else str(account.lost_steps)
    plural = "" if account.starts == 1 else "s"
    return f"{said}, {lost} were lost, in {format_time(account.wall_s)} with {account.starts} start{plural}."


def rows_of(account: Goodput, indent: str) -> list[tuple[str, str, str, str]]:
    """The parts of the wall clock: title, time, share, and what halving it gains."""
    rows = []
    for bucket in account.buckets:
        for part in (bucket, *(part for part in bucket.parts if part.seconds)):
            share = UNKNOWN if part.share is None else f"{100 * part.share:.2f} %"
            time = "not measured" if part.seconds is None else format_time(part.seconds)
            days = part.halved_days or 0.0
            gain = f"−{days:.2f} days" if days >= 0.1 else f"−{format_time(days * _DAY_S)}" if days else ""
            rows.append((("" if part is bucket else indent) + part.title, time, share, gain))
    return rows


def advice(account: Goodput) -> list[str]:
    """How often to save a checkpoint, as sentences; none if that is unknown."""
    found = account.checkpoints
    if found is None:
        return []
    now = "" if found.interval_s is None else f" It saves every {format_time(found.interval_s)}."
    return [
        f"Save a checkpoint every {format_time(found.daly_s)} (Daly; Young: {format_time(found.young_s)}): "
        f"a save takes {format_time(found.save_s)}, and one start fails every {format_time(found.mtbf_s)}.{now}"
    ]


def rank_lines(account: Goodput) -> list[str]:
    """The accounts of ranks as lines: a column for each part that some rank has."""
    names = [name for name in _TITLES if any(of.get(name) for of in account.ranks.values())]
    rows = [("rank", *(_TITLES[name] for name in names))]
    rows += [(str(rank), *(format_time(of[name]) for name in names)) for rank, of in account.ranks.items()]
    return lines_of(rows, left=0)
