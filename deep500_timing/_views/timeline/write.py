"""Writes a run as a timeline: its processes, threads, devices, steps, collectives and samples as tracks.

A few queries serve all ranks. Intervals are read as a sorted stream, so that memory does not grow with the run.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from functools import cache
from itertools import count, groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base.files import whole_file
from deep500_timing._base.names import CPU
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.clocks import clocks_of
from deep500_timing._summary.text import format_time, safe_name
from deep500_timing._views.timeline._writer import Lanes, Trace, TraceWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from os import PathLike

    from deep500_timing._distributed.clocks import ClockFit
    from deep500_timing.runs import Run

    Row = dict[str, Any]
    Key = tuple[int, int]
    """Rank and session."""
    ByKey = dict[Key, list[Row]]

_PER_REGION = ("memory.",)
"""Metrics of the whole process that are read at the ends of regions: one track for all regions."""
_TOGETHER = 4096
"""Intervals that are converted together."""
_OWN_TRACKS = ("intervals", "collectives", "open", "flushes")
_SESSIONS = """
select rank, session, max_by(host, segment) as host, max_by(pid, segment) as pid,
    max_by(unix_offset_ns, segment) as unix_offset_ns,
    min(first_unix_ns) as first_unix_ns, max(last_unix_ns) as last_unix_ns
from logs group by rank, session order by rank, session"""
_INTERVALS = """
with part as (select * from intervals where {where}),
launched as (select distinct rank, session, thread, region, host_start_ns from part where host_start_ns is not null)
select i.rank, i.session, i.thread, i.device, i.region, i.step, i.start_ns, i.dur_ns,
    coalesce(i.host_start_ns, l.host_start_ns) as host_start_ns
from part i left join launched l on i.device = 'CPU' and i.rank = l.rank and i.session = l.session
    and i.thread = l.thread and i.region = l.region and i.start_ns = l.host_start_ns
order by i.rank, i.session, i.start_ns, i.device, i.dur_ns desc, i.depth"""


def write_timeline(
    run: Run,
    path: str | PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    profiles: Sequence[str | PathLike[str]] = (),
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    """Write a run as a timeline in Chrome's trace format, for https://ui.perfetto.dev and other viewers.

    A process has tracks for its steps, threads, device work, events, collectives and declared tables with a start and a
    length, and a counter for each metric. Arrows lead from launches to device work. Times are Unix time if known.

    Args:
        run: The run.
        path: The file. It is written completely or not at all.
        steps: Of these steps only, the first and the last.
        ranks: Of these ranks only.
        profiles: Traces of ``torch.profiler`` to add on the same clock.
        on_progress: Called with the number of finished processes and the number of all.

    Raises:
        LookupError: The run has no such rank, or none of the steps.
        OSError: The file cannot be written, or a trace cannot be read.
        ValueError: The clock of a trace is unknown.
    """
    traces = [Trace(profile) for profile in profiles]
    places = places_of(run, ranks)
    starts = [*(place.first_ns() for place in places.values()), *(trace.first_time_ns() for trace in traces)]
    with whole_file(os.fspath(path)) as file:
        writer = TraceWriter(file, min((start for start in starts if start), default=0))
        numbers = count(1)
        _say_what_is_not_compared(run, places)
        tables = _Tables(run, steps, ranks)
        intervals = tables.intervals()
        key, rows = next(intervals, (None, iter(())))
        for done, (own, place) in enumerate(places.items()):
            on_progress(done, len(places))
            session = _Session(tables, writer, own, place)
            if key != own:
                session.add(iter(()), numbers)
                continue
            session.add(rows, numbers)
            key, rows = next(intervals, (None, iter(())))
        on_progress(len(places), len(places))
        for trace in traces:
            trace.add(writer, numbers)
        writer.close()


class Place(NamedTuple):
    """Converts times of one rank's clock to Unix time of the reference clock."""

    log: Row
    offset_ns: int
    fit: ClockFit | None = None
    compared: bool = True

    def __call__(self, times_ns: Iterable[int]) -> list[int]:
        if self.fit is None:
            return [time + self.offset_ns for time in times_ns]
        placed: list[int] = (self.fit.on_reference(list(times_ns)) + self.offset_ns).tolist()
        return placed

    @property
    def within_s(self) -> float:
        """How exact it is, at most."""
        if self.fit is None:
            return 0.0
        ends = [time for time in (self.log["first_unix_ns"], self.log["last_unix_ns"]) if time is not None]
        at = self.fit.at_ns
        times = [*at, *(sum(both) // 2 for both in pairwise(at))]  # It is largest at a comparison or between two.
        times += [time - (self.log["unix_offset_ns"] or 0) for time in ends]
        return float(self.fit.uncertainty_ns(times).max()) / 1e9

    def first_ns(self) -> int | None:
        """When the session began; None if unknown."""
        first = self.log["first_unix_ns"]
        return None if first is None else self([first - (self.log["unix_offset_ns"] or 0)])[0]


def places_of(run: Run, ranks: Sequence[int] | None) -> dict[Key, Place]:
    """The conversion of each rank and session, in their order."""
    logs = {(log["rank"], log["session"]): log for log in run.sql(_SESSIONS).rows()}
    there = {rank for rank, _ in logs}
    for rank in ranks or ():
        if rank not in there:
            has = f"rank {min(there)}" if len(there) == 1 else f"ranks {min(there)} to {max(there)}"
            raise LookupError(f"Showing rank {rank}: the run has {has}.")
    shown = {key: log for key, log in logs.items() if ranks is None or key[0] in ranks}
    clocks = cache(lambda session: clocks_of(run, session=session))
    # One host has one Unix time.
    several = len({log["host"] for log in shown.values()}) > 1
    places = {}
    for key, log in shown.items():
        places[key] = Place(log, log["unix_offset_ns"] or 0)
        if not several:
            continue
        reference = logs[clocks(key[1]).reference, key[1]]
        fit = clocks(key[1]).fits.get(key[0])
        if log["host"] == reference["host"]:
            continue
        if fit is None or reference["unix_offset_ns"] is None:
            places[key] = Place(log, log["unix_offset_ns"] or 0, compared=False)
        else:
            places[key] = Place(log, reference["unix_offset_ns"], fit)
    return places


def _say_what_is_not_compared(run: Run, places: dict[Key, Place]) -> None:
    apart = sorted({rank for (rank, _), place in places.items() if not place.compared})
    if apart:
        shown = ", ".join(map(str, apart[:8])) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
        warn_once(
            f"The clock of rank {shown} was not compared with that of the first rank, which is on another host. The "
            "timeline uses each host's Unix time; ranks may be shifted by the difference of the hosts' clocks. Call "
            "deep500_timing.ranks.keep_clocks on every rank of the next run.",
            key=f"clocks {run.folders[0]} {shown}",
        )


class _Tables:
    """The tables of a run, each read by one query for all ranks, by rank and session."""

    def __init__(self, run: Run, steps: tuple[int, int] | None, ranks: Sequence[int] | None) -> None:
        self._run = run
        self._ranks = "true" if ranks is None else f"rank in ({', '.join(map(str, ranks)) or 'null'})"
        self._where = self._ranks + ("" if steps is None else f" and step between {steps[0]} and {steps[1]}")
        self.threads = self._read("threads")
        self.tracks = self._read(f"(select distinct rank, session, thread, device from intervals where {self._where})")
        self.steps = self._read_steps(steps)
        self._reach: str | None = None
        if steps is not None:
            reach = (
                (*key, min(row["start_ns"] for row in of), max(row["start_ns"] + row["dur_ns"] for row in of))
                for key, of in self.steps.items()
            )
            self._reach = ", ".join(map(str, reach)) or "(-1, -1, 0, 0)"
        self.events = self._within("events", "time_ns", "time_ns")
        self.samples = self._within("samples", "time_ns", "time_ns")
        named = ("start_ns", "start_ns + coalesce(dur_ns, 0)")
        self.collectives = self._within("collectives", *named)
        self.others = {
            name: self._within(name, *named)
            for name in sorted(run.tables)
            if name not in _OWN_TRACKS and {"start_ns", "dur_ns", "rank", "session"} <= set(run.table(name).columns)
        }

    def intervals(self) -> Iterator[tuple[Key, Iterator[Row]]]:
        """The intervals of each rank and session, sorted by start, as a stream."""
        found = self._run.sql(_INTERVALS.format(where=self._where))
        rows = (row for batch in found.batches() for row in batch.to_pylist())
        return groupby(rows, key=lambda row: (row["rank"], row["session"]))

    def _within(self, table: str, begin: str, end: str) -> ByKey:
        # The rows that touch the range of their own rank's and session's steps.
        if self._reach is None:
            return self._read(table)
        values = f"(values {self._reach}) as r(of_rank, of_session, low, high)"
        on = f"rank = of_rank and session = of_session and {begin} <= high and {end} >= low"
        return self._read(f"(select t.* from {table} t join {values} on {on})")

    def _read(self, table: str) -> ByKey:
        found: ByKey = defaultdict(list)
        for row in self._run.sql(f"select * from {table} where {self._ranks}").rows():
            found[row["rank"], row["session"]].append(row)
        return found

    def _read_steps(self, steps: tuple[int, int] | None) -> ByKey:
        there = self._run.steps().arrow().select(["rank", "session", "step", "start_ns", "dur_ns"])
        numbers = there["step"].to_pylist()
        first, last = steps or (-math.inf, math.inf)
        if steps is not None and not any(first <= step <= last for step in numbers):
            asked = f"step {first}" if first == last else f"steps {first} to {last}"
            has = f"steps from {min(numbers)} to {max(numbers)}" if numbers else "no steps"
            raise LookupError(f"Showing {asked}: the run has {has}.")
        found: ByKey = defaultdict(list)
        for row in there.to_pylist():
            if row["dur_ns"] is not None and first <= row["step"] <= last:
                found[row["rank"], row["session"]].append(row | {"name": f"step {row['step']}"})
        return found


class _Session:
    """One session of one rank: a process of the timeline."""

    def __init__(self, tables: _Tables, writer: TraceWriter, key: Key, place: Place) -> None:
        self._tables, self._writer, self._key, self._place = tables, writer, key, place
        rank, session = key
        host, pid = place.log["host"], place.log["pid"]
        parts = (
            f"rank {rank}",
            f"session {session}" if session else "",
            safe_name(host) if host else "",
            "" if pid is None else f"pid {pid}",
            f"clock ± {format_time(place.within_s)}" if place.fit else "" if place.compared else "clock not compared",
        )
        self._process = writer.process(" · ".join(filter(None, parts)))

    def add(self, intervals: Iterator[Row], numbers: Iterator[int]) -> None:
        """Write the tracks in the order in which they are shown."""
        tables, key = self._tables, self._key
        self._add_rows("steps", tables.steps[key], "name", ())
        self._add_intervals(intervals, numbers)
        events = Lanes(self._writer, self._process, "events")
        for row, at in self._placed(tables.events[key], "time_ns"):
            events.instant(at, safe_name(row["what"] or "event"), {"text": safe_name(row["text"] or "")})
        by_group: dict[str, list[Row]] = defaultdict(list)
        for row in tables.collectives[key]:
            by_group[row["group"] or ""].append(row)
        for group, rows in sorted(by_group.items()):
            what = "collectives" + (f" · {safe_name(group)}" if group else "")
            self._add_rows(what, rows, "op", ("bytes", "sequence"))
        for name, table in tables.others.items():
            if rows := table[key]:
                texts = [column for column, value in rows[0].items() if isinstance(value, str)]
                known = {"rank", "session", "start_ns", "dur_ns", "unix_ns", *texts[:1]}
                columns = [column for column in rows[0] if column not in known]
                self._add_rows(safe_name(name), rows, texts[0] if texts else "", columns)
        for row, at in self._placed(tables.samples[key], "time_ns"):
            name = safe_name(row["metric"] or "sample")
            if row["region"] and not name.startswith(_PER_REGION):
                name += f" · {safe_name(row['region'])}"
            if row["value"] is not None and math.isfinite(row["value"]):
                self._writer.value(self._process, name, at, row["value"])

    def _add_intervals(self, intervals: Iterator[Row], numbers: Iterator[int]) -> None:
        names = {row["thread"]: row["name"] for row in self._tables.threads[self._key]}
        tracks: dict[tuple[int, str], Lanes] = {}
        found = {(row["thread"], row["device"]) for row in self._tables.tracks[self._key]}
        # The main thread first, and the device below the thread that launches its work.
        for thread, device in sorted(found, key=lambda of: (of[0], of[1] != CPU, of[1])):
            name = safe_name(names.get(thread) or f"thread {thread}")
            name = name if device == CPU else f"{device} · {name}"
            tracks[thread, device] = Lanes(self._writer, self._process, name)
        arrows: dict[tuple[int, str, int], int] = {}
        while rows := [row for row, _ in zip(intervals, range(_TOGETHER), strict=False)]:
            for row, begin in zip(rows, self._place(row["start_ns"] for row in rows), strict=True):
                arrow = "", 0
                if row["host_start_ns"] is not None:
                    # The host's and the device's interval share a number; either may come first.
                    launch = row["thread"], row["region"], row["host_start_ns"]
                    number = arrows.pop(launch, 0)
                    if not number:
                        number = arrows[launch] = next(numbers)
                    arrow = "s" if row["device"] == CPU else "f", number
                args = {} if row["step"] is None else {"step": row["step"]}
                lanes = tracks[row["thread"], row["device"]]
                lanes.slice(begin, begin + row["dur_ns"], safe_name(row["region"]), args, arrow)

    def _add_rows(self, what: str, rows: list[Row], named_by: str, columns: Sequence[str]) -> None:
        lanes = Lanes(self._writer, self._process, what)
        rows = sorted((row for row in rows if row["dur_ns"] is not None), key=lambda row: -row["dur_ns"])
        for row, start in self._placed(rows, "start_ns"):
            args = {name: row[name] for name in columns if _can_be_shown(row[name])}
            lanes.slice(start, start + row["dur_ns"], safe_name(str(row.get(named_by) or what)), args)

    def _placed(self, rows: list[Row], column: str) -> Iterable[tuple[Row, int]]:
        rows = sorted(rows, key=lambda row: row[column])
        return zip(rows, self._place(row[column] for row in rows), strict=True)


def _can_be_shown(value: Any) -> bool:
    # An unknown size of a collective is -1 in a log; JSON has no NaN.
    return isinstance(value, (str, int, float)) and value != -1 and (isinstance(value, str) or math.isfinite(value))
