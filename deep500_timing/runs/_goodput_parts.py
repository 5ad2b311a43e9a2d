"""Divides the wall clock of each rank into labelled parts that do not overlap: the basis of goodput.

Each moment of a rank has the first label that applies: outside its processes, lost, a bucket of a region, start-up, a
step, or unknown. The parts are sorted boundaries with one label between two of them, so they add up by construction.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.arrays import Int64Array
from deep500_timing._base.names import BATCH, CPU
from deep500_timing._base.sql import array_of, literal
from deep500_timing.runs._format import IN_ORDER
from deep500_timing.runs._why import waiting_regions

LABELS = (
    "productive",
    "lost",
    "initialization",
    "startup_compilation",
    "restore",
    "data",
    "communication",
    "evaluation",
    "checkpoint",
    "recompilation",
    "absent",
    "unknown",
)
CODE = {name: number for number, name in enumerate(LABELS)}
BUCKETS = ("productive", "data", "communication", "evaluation", "checkpoint", "restore", "compilation")
_LAYERS = (*BUCKETS, "device_communication", "device", "process", "startup", "lost")
CODE_COMM = BUCKETS.index("communication")
_DEFAULTS = (
    (re.compile(r"^BATCH$"), "productive"),
    (re.compile(r"^IO$"), "data"),
    (re.compile(r"^COMM$"), "communication"),
    (
        re.compile(r"(restor|load|resum).*(checkpoint|ckpt)|(checkpoint|ckpt).*(restor|load|resum)", re.IGNORECASE),
        "restore",
    ),
    (re.compile(r"checkpoint|ckpt", re.IGNORECASE), "checkpoint"),
    (re.compile(r"\b(valid|eval|test|predict)", re.IGNORECASE), "evaluation"),
    (re.compile(r"\b(re)?compil", re.IGNORECASE), "compilation"),
)
_MILESTONES = {"checkpoint_saved": "checkpoint", "checkpoint_restored": "restore"}
_SECOND = 10**9
_ROWS = 1 << 21


def bucket_of(region: str, chosen: Mapping[str, str], waiting: set[str] | frozenset[str] = frozenset()) -> str | None:
    """The bucket of a region by the user's choice, else by its name; None for no bucket."""
    if region in chosen:
        return chosen[region]
    if region in waiting:
        return "communication"
    return next((bucket for pattern, bucket in _DEFAULTS if pattern.search(region)), None)


@dataclass
class Process:
    """One session of one rank, on the job's clock in Unix nanoseconds."""

    rank: int
    session: int
    begin_ns: int
    end_ns: int
    shift_ns: int
    """Job's clock minus the session's Unix time: the steps of the Unix clock in earlier sessions."""
    reason: str | None
    """Why its log ended; None if it was killed or is running."""
    submit_ns: int | None
    allocated_ns: int | None
    knows_start: bool
    world_size: int | None
    generation: int = 0
    thread: int = 0
    first_step: int | None = None
    """The number of its first step; None without steps, or if the numbers are not the program's."""
    starts_ns: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    ends_ns: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    numbers: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """Its finished steps in order of time."""
    unfinished: tuple[int, int] | None = None
    """Number and start of the step that the end of the process interrupted."""
    redone: int | None = None
    """Steps from this number on were computed again later."""

    @property
    def failed(self) -> bool:
        """Whether a kill, a signal or an exception ended it."""
        return self.reason not in IN_ORDER

    @property
    def is_lost(self) -> NDArray[np.bool_]:
        """For each of its steps whether it was computed again."""
        return np.zeros(len(self.numbers), bool) if self.redone is None else self.numbers >= self.redone


class RankParts(NamedTuple):
    """The parts of one rank: ``labels[i]`` applies from ``times_ns[i]`` to ``times_ns[i + 1]``."""

    rank: int
    times_ns: Int64Array
    labels: NDArray[np.int8]

    def at(self, times_ns: Int64Array) -> Int64Array:
        """Time of each label before given moments, shape ``(len(times_ns), len(LABELS))``."""
        place = np.clip(np.searchsorted(self.times_ns, times_ns, side="right") - 1, 0, len(self.labels) - 1)
        durations = np.diff(self.times_ns)
        found = np.empty((len(place), len(LABELS)), np.int64)
        for code in range(len(LABELS)):
            durations_of = np.where(self.labels == code, durations, 0)
            found[:, code] = (np.cumsum(durations_of) - durations_of)[place]
        found[np.arange(len(place)), self.labels[place]] += times_ns - self.times_ns[place]
        return found


def processes_of(run: Any, notes: list[str]) -> dict[int, list[Process]]:
    """The sessions of each rank in order, on one clock per rank."""
    files: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(run.table("logs").rows(), key=lambda row: (row["rank"], row["session"], row["segment"])):
        files[row["rank"], row["session"]].append(row)
    moments = _moments(run)
    by_rank: dict[int, list[Process]] = {}
    before: tuple[tuple[Any, ...], int] = ((), 0)
    """Host, process and start of the session before, and what its Unix clock was stepped by."""
    unplaced = overlapping = 0
    for (rank, session), rows in files.items():
        known = [row[name] for row in rows for name in ("first_unix_ns", "last_unix_ns", "flushed_unix_ns")]
        times = [time for time in (*known, *moments.get((rank, session), ())) if time is not None]
        if not times:
            unplaced += 1
            continue
        header: dict[str, Any] = next(filter(None, (json.loads(row["header"]) for row in rows)), {})
        job = header.get("job") or {}
        first_ns, end_ns = min(times), max(times)
        start: int | None = header.get("process_start_unix_ns")
        started = start is not None and start <= first_ns
        begin_ns, shift_ns = start if start is not None and started else first_ns, 0
        identity = header.get("host"), header.get("pid"), start
        earlier = by_rank.setdefault(rank, [])
        if earlier:
            previous = earlier[-1]
            shift_ns = previous.shift_ns - before[1] if before[0][:1] == identity[:1] else 0
            overlap_ns = previous.end_ns - first_ns - shift_ns
            overlapping += overlap_ns > _SECOND
            shift_ns += max(overlap_ns, 0)
            is_same = started and before[0] == identity
            begin_ns = previous.end_ns if is_same else max(begin_ns + shift_ns, previous.end_ns)
        before = identity, rows[-1]["clock_end_ns"] or 0
        submit, allocated = _ns(job.get("submit_unix_s")), _ns(job.get("start_unix_s"))
        end, world_size = rows[-1]["end"], rows[0]["world_size"]
        told = submit, allocated, started, world_size
        earlier.append(Process(rank, session, begin_ns, end_ns + shift_ns, shift_ns, end, *told))
    if unplaced:
        notes.append(f"{unplaced} damaged sessions have no time. Their time counts as down time.")
    if overlapping:
        notes.append(
            f"{overlapping} sessions begin before the session before them ends: a clock was set back, or two processes "
            "had one rank. They are counted one after the other."
        )
    return {rank: of for rank, of in by_rank.items() if of}


def set_generations(processes: list[Process]) -> int:
    """Number the starts of the job. A later generation begins when no process of an earlier one lives."""
    sessions: dict[int, list[int]] = defaultdict(list)
    for process in processes:
        sessions[process.rank].append(process.session)
    numbers = next(iter(sessions.values()))
    if all(of == numbers for of in sessions.values()) and (
        len(sessions) == 1 or all(process.world_size == len(sessions) for process in processes)
    ):
        # Every start had every rank, so no clock is needed to tell the starts apart.
        for process in processes:
            process.generation = numbers.index(process.session)
        return len(numbers)
    number, end_ns = 0, -(1 << 62)
    for process in sorted(processes, key=lambda process: process.begin_ns):
        number += process.begin_ns >= end_ns > -(1 << 62)
        end_ns = max(end_ns, process.end_ns)
        process.generation = number
    return number + 1


def set_steps(run: Any, by_rank: dict[int, list[Process]], notes: list[str]) -> bool:
    """Read the steps of every process, and which of them were computed again; returns whether that is known."""
    restored, saved = (
        _by_session(
            run.sql(
                f"select rank, session, {which}(step) as step, min(unix_ns) as unix_ns from milestones "
                f"where what = 'checkpoint_{what}' and step is not null and unix_ns is not null group by rank, session"
            ).arrow(),
            "step",
            "unix_ns",
        )
        for what, which in (("restored", "max"), ("saved", "min"))
    )
    marks = run.sql("select rank, session, step, unix_ns from marks where unix_ns is not null order by unix_ns").arrow()
    marked = _by_session(marks, "step", "unix_ns")
    batches = run.sql(
        "select rank, session, step, min(thread) as thread, min(unix_ns) as first, max(unix_ns + dur_ns) as last "
        f"from intervals where region = '{BATCH}' and device = '{CPU}' and step is not null and unix_ns is not null "
        "group by rank, session, step order by first"
    ).arrow()
    timed = _by_session(batches, "step", "first", "last", "thread")
    known = True
    for process in (process for of in by_rank.values() for process in of):
        key = process.rank, process.session
        numbers, times = marked.get(key, (process.numbers, process.starts_ns))
        times = times + process.shift_ns
        if key in timed:
            process.numbers, starts, ends, threads = timed[key]
            process.starts_ns, process.ends_ns = starts + process.shift_ns, ends + process.shift_ns
            process.thread = int(threads.min())
            later = np.flatnonzero(times >= process.ends_ns[-1])
            process.unfinished = (int(numbers[later[0]]), int(times[later[0]])) if len(later) else None
        elif len(times):
            process.numbers, process.starts_ns, process.ends_ns = numbers[:-1], times[:-1], times[1:]
            process.unfinished = int(numbers[-1]), int(times[-1])
        if len(process.numbers) and not len(times):
            known &= _renumber(process, restored.get(key), saved.get(key))
        elif len(times):
            process.first_step = int(process.numbers[0] if len(process.numbers) else numbers[0])
    _set_redone(by_rank)
    if not known:
        notes.append(
            "The program did not number its steps, so lost work is unknown and its steps count as productive. "
            "Call timer.step(n), or run.mark('checkpoint_restored', step=n) after each restart."
        )
    return known


def _renumber(process: Process, restored: list[Int64Array] | None, saved: list[Int64Array] | None) -> bool:
    # The log has counted the steps from 0. A checkpoint tells the program's number of one of them.
    if restored is not None:
        process.first_step = int(restored[0][0]) + 1
    elif not process.generation:
        process.first_step = int(process.numbers[0])
    else:
        return False
    shift = process.first_step - process.numbers[0]
    done = 0 if saved is None else int((process.ends_ns <= saved[1][0] + process.shift_ns).sum())
    if saved is not None and done:
        shift = saved[0][0] - process.numbers[done - 1]
    process.numbers = process.numbers + shift
    return True


def _set_redone(by_rank: dict[int, list[Process]]) -> None:
    # A step is lost if a later start of the job, or of its rank, began with it or with an earlier step.
    generations: dict[int, int] = {}
    for of in by_rank.values():
        for process in of:
            if process.first_step is not None:
                first = generations.get(process.generation, process.first_step)
                generations[process.generation] = min(first, process.first_step)
    for of in by_rank.values():
        for place, process in enumerate(of):
            later = [first for number, first in generations.items() if number > process.generation]
            later += [other.first_step for other in of[place + 1 :] if other.first_step is not None]
            process.redone = min(later, default=None)


def parts_of_ranks(
    run: Any, by_rank: dict[int, list[Process]], chosen: Mapping[str, str], span_ns: tuple[int, int], seen: set[str]
) -> Iterator[RankParts]:
    """Divide the span of the job for each rank."""
    waiting = waiting_regions(run)
    counts = run.sql("select region, device, count(*) as n from intervals group by region, device").rows()
    layers: dict[str, int] = {}
    for name in sorted({row["region"] for row in counts}):
        bucket = bucket_of(name, chosen, waiting)
        if bucket is not None and name != BATCH:
            layers[name] = _LAYERS.index(bucket)
            seen.add(bucket)
    on_device = any(row["device"] != CPU and layers.get(row["region"]) == CODE_COMM for row in counts)
    cases = " ".join(f"when {literal(name)} then {layer}" for name, layer in layers.items())
    layer = f"case region {cases} else -1 end"
    if on_device:
        comm, other = _LAYERS.index("device_communication"), _LAYERS.index("device")
        layer = f"case when device = '{CPU}' then {layer} when ({layer}) = {CODE_COMM} then {comm} else {other} end"
    devices = "" if on_device else f" and device = '{CPU}'"
    query = (
        f"select * from (select rank, session, thread, unix_ns, dur_ns, {layer} as layer from intervals where unix_ns "
        f"is not null and rank between {{low}} and {{high}}{devices}) as found where layer >= 0"
    )
    milestones = _milestones(run, seen)
    ranks = sorted(by_rank)
    wanted = sum(row["n"] for row in counts if row["region"] in layers or on_device)
    width = max(1, int(len(ranks) * _ROWS / max(wanted, 1)))
    for first in range(0, len(ranks), width):
        some = ranks[first : first + width]
        found: dict[tuple[int, int], list[Int64Array]] = {}
        if layers:
            table = run.sql(query.format(low=some[0], high=some[-1])).arrow()
            found = _by_session(table, "unix_ns", "dur_ns", "layer", "thread")
        for rank in some:
            yield _parts_of(by_rank[rank], found, milestones, span_ns)


def _parts_of(
    processes: list[Process],
    intervals: dict[tuple[int, int], list[Int64Array]],
    milestones: dict[tuple[int, int], list[Int64Array]],
    span_ns: tuple[int, int],
) -> RankParts:
    starts, ends, layers = [np.array([span_ns[0]])], [np.array([span_ns[1]])], [np.array([-1])]

    def add(layer: str | Int64Array, first: Any, last: Any, within: tuple[int, int] = span_ns) -> None:
        begins, stops = np.clip(np.atleast_1d(first), *within), np.clip(np.atleast_1d(last), *within)
        starts.append(begins)
        ends.append(stops)
        layers.append(np.full(len(begins), _LAYERS.index(layer)) if isinstance(layer, str) else layer)

    for process in processes:
        begin_ns, end_ns = within = process.begin_ns, process.end_ns
        key = process.rank, process.session
        add("process", begin_ns, end_ns)
        add("productive", process.starts_ns, process.ends_ns, within)
        known = [*process.starts_ns[:1].tolist(), *(() if process.unfinished is None else process.unfinished[1:])]
        add("startup", begin_ns, min(known, default=end_ns), within)
        for first, last in _runs_of(process):
            add("lost", first, last, within)
        if key in intervals:
            times, durations, layer, threads = intervals[key]
            is_device = layer >= _LAYERS.index("device_communication")
            is_main = is_device | (threads == process.thread)
            times = times[is_main] + process.shift_ns
            add(layer[is_main], times, times + durations[is_main], within)
        if key in milestones:
            times, durations, layer = milestones[key]
            add(layer, times + process.shift_ns - durations, times + process.shift_ns, within)
    return _sweep(processes[0].rank, *(np.concatenate(of) for of in (starts, ends, layers)))


def _runs_of(process: Process) -> list[tuple[int, int]]:
    # From the first of consecutive lost steps to the last one's end, with what lies between; the unfinished step too.
    is_lost, redone = process.is_lost, process.redone
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_lost, [False])).astype(np.int8)))
    found = [
        (int(process.starts_ns[first]), int(process.ends_ns[last - 1]))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]
    if redone is not None and process.failed:
        if len(is_lost) and is_lost[-1]:
            found[-1] = found[-1][0], process.end_ns
        elif process.unfinished is not None and process.unfinished[0] >= redone:
            found.append((process.unfinished[1], process.end_ns))
    return found


def _sweep(rank: int, starts: Int64Array, ends: Int64Array, layers: Int64Array) -> RankParts:
    kept = ends > starts
    kept[0] = True
    starts, ends, layers = starts[kept], ends[kept], layers[kept]
    times = np.concatenate((starts, ends))
    order = np.argsort(times, kind="stable")
    times = times[order]
    of_layer = np.concatenate((layers, layers))[order]
    change = np.where(order < len(starts), np.int32(1), np.int32(-1))
    inside = {
        name: np.cumsum(np.where(of_layer == number, change, 0), dtype=np.int32)[:-1] > 0
        for number, name in enumerate(_LAYERS)
    }
    exposed = inside["device_communication"] & ~inside["device"] & inside["productive"]
    conditions = (
        ("absent", ~inside["process"]),
        ("lost", inside["lost"]),
        ("restore", inside["restore"]),
        ("checkpoint", inside["checkpoint"]),
        ("evaluation", inside["evaluation"]),
        ("startup_compilation", inside["compilation"] & inside["startup"]),
        ("recompilation", inside["compilation"]),
        ("initialization", inside["startup"]),
        ("data", inside["data"]),
        ("communication", inside["communication"] | exposed),
        ("productive", inside["productive"]),
    )
    labels = np.full(len(times) - 1, CODE["unknown"], np.int8)
    for name, holds in reversed(conditions):
        labels[holds] = CODE[name]
    return RankParts(rank, times, labels)


def _milestones(run: Any, seen: set[str]) -> dict[tuple[int, int], list[Int64Array]]:
    names = ", ".join(map(literal, _MILESTONES))
    table = run.sql(
        "select rank, session, unix_ns, dur_ns, case when what = 'checkpoint_saved' then "
        f"{_LAYERS.index('checkpoint')} else {_LAYERS.index('restore')} end as layer from milestones "
        f"where what in ({names}) and unix_ns is not null and dur_ns is not null"
    ).arrow()
    seen.update(_LAYERS[layer] for layer in set(table["layer"].to_pylist()))
    return _by_session(table, "unix_ns", "dur_ns", "layer")


def _by_session(table: Any, *columns: str) -> dict[tuple[int, int], list[Int64Array]]:
    # The rows of each rank and session, as numpy arrays.
    ranks, sessions = (array_of(table[name]).astype(np.int64) for name in ("rank", "session"))
    if not len(ranks):
        return {}
    key = (ranks << 32) + sessions
    order = np.argsort(key, kind="stable")
    values = [array_of(table[name]).astype(np.int64)[order] for name in columns]
    key = key[order]
    edges = np.concatenate(([0], np.flatnonzero(np.diff(key)) + 1, [len(key)])).tolist()
    return {
        (int(key[first]) >> 32, int(key[first]) & 0xFFFFFFFF): [of[first:last] for of in values]
        for first, last in pairwise(edges)
    }


def _moments(run: Any) -> dict[tuple[int, int], tuple[int, int]]:
    # The first and last record of each session that is no interval.
    records = " union all ".join(
        f"select rank, session, unix_ns from {table} where unix_ns is not null"
        for table in ("marks", "samples", "milestones")
    )
    rows = run.sql(
        f"select rank, session, min(unix_ns) as first, max(unix_ns) as last from ({records}) as of_table "
        "group by rank, session"
    ).rows()
    return {(row["rank"], row["session"]): (row["first"], row["last"]) for row in rows}


def _ns(seconds: Any) -> int | None:
    return round(seconds * 1e9) if isinstance(seconds, (int, float)) else None
