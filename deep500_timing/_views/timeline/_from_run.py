"""A run's processes, threads, devices, steps, collectives and samples as tracks.

A few queries serve all ranks. Intervals are read as a sorted stream, so that memory does not grow with the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from functools import cache
from itertools import count, groupby
from typing import TYPE_CHECKING, Any

from deep500_timing._base.names import CPU
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.clocks import clocks_of
from deep500_timing._summary.text import safe_name
from deep500_timing._views.timeline._formats import Lanes, Slice, Writer, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deep500_timing.runs import Run

    Rows = list[dict[str, Any]]
    Key = tuple[int, int]
    """Rank and session."""
    from collections.abc import Iterable

    from deep500_timing._distributed.clocks import ClockFit, Clocks


NOT_COMPARED = "clock not compared"


class Place:
    """Converts times of one rank's clock to Unix time of the reference clock."""

    def __init__(self, offset_ns: int, fit: ClockFit | None = None, said: str = "") -> None:
        self._offset_ns, self._fit, self.said = offset_ns, fit, said

    def __call__(self, times_ns: Iterable[int]) -> list[int]:
        if self._fit is None:
            return [time + self._offset_ns for time in times_ns]
        placed: list[int] = (self._fit.on_reference(list(times_ns)) + self._offset_ns).tolist()
        return placed


class Places:
    """The conversions of a run's ranks."""

    def __init__(self, run: Run, sessions: list[dict[str, Any]]) -> None:
        self._logs = {(row["rank"], row["session"]): row for row in run.table("logs").rows()}
        self._hosts = {row["host"] for row in sessions}
        self._clocks = cache(lambda session: clocks_of(run, session=session))

    def first_ns(self, logs: list[dict[str, Any]]) -> int:
        """The earliest start in these rows of the table of logs, in Unix time; 0 if unknown."""
        known = [log for log in logs if log["first_unix_ns"] is not None]
        return min((self.of(log)([log["first_unix_ns"] - log["unix_offset_ns"]])[0] for log in known), default=0)

    def of(self, log: dict[str, Any]) -> Place:
        """The conversion for one rank's session."""
        own = Place(log["unix_offset_ns"] or 0)
        if len(self._hosts) < 2:
            # One host has one Unix time.
            return own
        clocks: Clocks = self._clocks(log["session"])
        reference = self._logs[clocks.reference, log["session"]]
        if log["host"] == reference["host"]:
            return own
        fit = clocks.fits.get(log["rank"])
        if fit is None or reference["unix_offset_ns"] is None:
            own.said = NOT_COMPARED
            return own
        return Place(reference["unix_offset_ns"], fit, f"clock ± {_width(fit, log)}")


def say_what_is_not_compared(run: Run, places: Places, sessions: list[dict[str, Any]]) -> None:
    """Warn of ranks on other hosts without compared clocks."""
    apart = sorted({log["rank"] for log in sessions if places.of(log).said == NOT_COMPARED})
    if apart:
        shown = ", ".join(map(str, apart[:8])) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
        warn_once(
            f"The clock of rank {shown} was not compared with that of the first rank, which is on another host. The "
            "timeline uses each host's Unix time; ranks may be shifted by the difference of the hosts' clocks. Call "
            "deep500_timing.ranks.keep_clocks on every rank of the next run.",
            key=f"clocks {run.folders[0]} {shown}",
        )


def _width(fit: ClockFit, log: dict[str, Any]) -> str:
    import numpy as np

    from deep500_timing._summary.text import format_time

    ends = [time for time in (log["first_unix_ns"], log["last_unix_ns"]) if time is not None]
    times = [time - (log["unix_offset_ns"] or 0) for time in ends] or list(fit.at_ns)
    return format_time(float(np.max(fit.uncertainty_ns(times))) / 1e9)


_PER_REGION = ("memory.",)
"""Metrics of the whole process that are read at the ends of regions: one track for all regions."""
_IDENTITY = ("thread", "device", "region", "host_start_ns")
_TOGETHER = 4096
"""Intervals that are converted together."""
_NOT_TABLES = ("intervals", "collectives", "open", "flushes")
_INTERVALS = """
with launched as (
    select distinct rank, session, thread, region, host_start_ns from intervals
    where host_start_ns is not null and {where})
select i.rank, i.session, i.thread, i.device, i.region, i.step, i.start_ns, i.dur_ns,
    coalesce(i.host_start_ns, l.host_start_ns) as host_start_ns
from intervals i left join launched l on i.device = 'CPU' and i.rank = l.rank and i.session = l.session
    and i.thread = l.thread and i.region = l.region and i.start_ns = l.host_start_ns
where {i_where}
order by i.rank, i.session, i.start_ns, i.device, i.dur_ns desc, i.depth"""


def first_time_ns(run: Run) -> int:
    return Places(run, sessions_of(run, None)).first_ns(run.table("logs").rows())


def sessions_of(run: Run, ranks: Sequence[int] | None) -> Rows:
    """The sessions of a run by rank: for each the row of its last file in the table of logs."""
    logs = run.sql("select * from logs order by rank, session, segment").rows()
    there = {log["rank"] for log in logs}
    for rank in ranks or ():
        if rank not in there:
            has = f"rank {min(there)}" if len(there) == 1 else f"ranks {min(there)} to {max(there)}"
            raise LookupError(f"Showing rank {rank}: the run has {has}.")
    found = {(log["rank"], log["session"]): log for log in logs if ranks is None or log["rank"] in ranks}
    return list(found.values())


def add_run(
    run: Run,
    writer: Writer,
    *,
    steps: tuple[int, int] | None,
    ranks: Sequence[int] | None,
    on_progress: Callable[[int, int], None] = lambda done, of: None,
) -> None:
    source = _Source(run, steps, ranks)
    sessions, numbers = sessions_of(run, ranks), count(1)
    places = Places(run, sessions)
    say_what_is_not_compared(run, places, sessions)
    intervals = source.intervals()
    key, rows = next(intervals, (None, iter(())))
    for done, log in enumerate(sessions):
        on_progress(done, len(sessions))
        session = _Session(source, writer, log, places.of(log))
        if key == session.key:
            session.add(rows, numbers)
            key, rows = next(intervals, (None, iter(())))
        else:
            session.add(iter(()), numbers)
    on_progress(len(sessions), len(sessions))


class _Source:
    """The tables of a run, each read by one query for all ranks, by rank and session."""

    def __init__(self, run: Run, steps: tuple[int, int] | None, ranks: Sequence[int] | None) -> None:
        self._run, self._steps = run, steps
        self._ranks = "" if ranks is None else f" and rank in ({', '.join(map(str, ranks)) or 'null'})"
        within = "" if steps is None else f" and step between {steps[0]} and {steps[1]}"
        self._where = "true" + self._ranks + within
        self.threads = self._read("select * from threads where true" + self._ranks)
        tracks = f"select distinct rank, session, thread, device from intervals where {self._where}"
        self.tracks = self._read(tracks)
        self.steps = self._read_steps()
        self.reach: dict[Key, tuple[int, int]] = {}
        if steps is not None:
            for key, of in self.steps.items():
                self.reach[key] = min(row["start_ns"] for row in of), max(row["start_ns"] + row["dur_ns"] for row in of)
        self.events = self.within("events")
        self.collectives = self.within("collectives")
        self.samples = self.within("samples")
        self.others = {
            name: self.within(name)
            for name in sorted(run.tables)
            if name not in _NOT_TABLES and {"start_ns", "dur_ns", "rank", "session"} <= set(run.table(name).columns)
        }

    def intervals(self) -> Iterator[tuple[Key, Iterator[dict[str, Any]]]]:
        """The intervals of each rank and session, sorted by start, as a stream."""
        conditions = self._where.replace(" rank ", " i.rank ").replace(" step ", " i.step ")
        found = self._run.sql(_INTERVALS.format(where=self._where, i_where=conditions))
        rows = (row for batch in found.batches() for row in batch.to_pylist())
        return groupby(rows, key=lambda row: (row["rank"], row["session"]))

    def within(self, table: str) -> dict[Key, Rows]:
        """The rows of a table that touch the range of their own rank's and session's steps."""
        if self._steps is None:
            return self._read(f"select * from {table} where true" + self._ranks)
        begin, end = ("t.time_ns", "t.time_ns")
        if table not in ("events", "samples"):
            begin, end = "t.start_ns", "t.start_ns + coalesce(t.dur_ns, 0)"
        reach = ", ".join(f"({rank}, {session}, {low}, {high})" for (rank, session), (low, high) in self.reach.items())
        return self._read(
            f"select t.* from {table} t join (values {reach or '(-1, -1, 0, 0)'}) as r(rank, session, low, high) "
            f"on t.rank = r.rank and t.session = r.session where {begin} <= r.high and {end} >= r.low"
            + self._ranks.replace(" rank ", " t.rank ")
        )

    def _read(self, query: str) -> dict[Key, Rows]:
        found: dict[Key, Rows] = defaultdict(list)
        for row in self._run.sql(query).rows():
            found[row["rank"], row["session"]].append(row)
        return found

    def _read_steps(self) -> dict[Key, Rows]:
        there = self._run.steps().arrow().select(["rank", "session", "step", "start_ns", "dur_ns"])
        numbers = there["step"].to_pylist()
        first, last = self._steps or (-math.inf, math.inf)
        if self._steps is not None and not any(first <= step <= last for step in numbers):
            asked = f"step {first}" if first == last else f"steps {first} to {last}"
            has = f"steps from {min(numbers)} to {max(numbers)}" if numbers else "no steps"
            raise LookupError(f"Showing {asked}: the run has {has}.")
        found: dict[Key, Rows] = defaultdict(list)
        for row in there.to_pylist():
            if row["dur_ns"] is not None and first <= row["step"] <= last:
                found[row["rank"], row["session"]].append(row)
        return found


class _Session:
    """One session of one rank: a process of the timeline."""

    def __init__(self, source: _Source, writer: Writer, log: dict[str, Any], place: Place) -> None:
        self._source, self._writer, self._place = source, writer, place
        self.key = log["rank"], log["session"]
        self._process = writer.process(_name_of(log, place))

    def add(self, intervals: Iterator[dict[str, Any]], numbers: Iterator[int]) -> None:
        """Write the tracks in the order in which they are shown."""
        source = self._source
        self._add_rows("steps", [row | {"name": f"step {row['step']}"} for row in source.steps[self.key]], "name", ())
        self._add_intervals(intervals, numbers)
        self._add_events()
        self._add_collectives()
        for name, table in source.others.items():
            rows = table[self.key]
            texts = [column for column in rows[0] if isinstance(rows[0][column], str)] if rows else []
            known = {"rank", "session", "start_ns", "dur_ns", "unix_ns", *texts[:1]}
            columns = [column for column in (rows[0] if rows else ()) if column not in known]
            self._add_rows(safe_name(name), rows, texts[0] if texts else "", columns)
        self._add_samples()

    def _add_intervals(self, intervals: Iterator[dict[str, Any]], numbers: Iterator[int]) -> None:
        names = {row["thread"]: row["name"] for row in self._source.threads[self.key]}
        tracks: dict[tuple[int, str], Lanes] = {}
        found = {(row["thread"], row["device"]) for row in self._source.tracks[self.key]}
        # The main thread first, and the device below the thread that launches its work.
        for thread, device in sorted(found, key=lambda of: (of[0], of[1] != CPU, of[1])):
            name = safe_name(names.get(thread) or f"thread {thread}")
            name = name if device == CPU else f"{device} · {name}"
            tracks[thread, device] = Lanes(self._writer, self._process, name)
        flows: dict[tuple[int, str, int], int] = {}
        while rows := [row for row, _ in zip(intervals, range(_TOGETHER), strict=False)]:
            for row, begin in zip(rows, self._place(row["start_ns"] for row in rows), strict=True):
                thread, device, region, host_start_ns = (row[name] for name in _IDENTITY)
                flow_out = flow_in = 0
                if host_start_ns is not None:
                    # The host's and the device's interval share a number; either may come first.
                    flow = flows.pop((thread, region, host_start_ns), 0)
                    if not flow:
                        flow = flows[thread, region, host_start_ns] = next(numbers)
                    flow_out, flow_in = (flow, 0) if device == CPU else (0, flow)
                args = {} if row["step"] is None else {"step": row["step"]}
                of = Slice(begin, begin + row["dur_ns"], safe_name(region), args, flow_out, flow_in)
                tracks[thread, device].slice(of)
        for lanes in tracks.values():
            lanes.close()

    def _add_events(self) -> None:
        lanes = Lanes(self._writer, self._process, "events")
        rows = sorted(self._source.events[self.key], key=lambda row: row["time_ns"])
        for row, at in zip(rows, self._place(row["time_ns"] for row in rows), strict=True):
            lanes.instant(at, safe_name(row["what"] or "event"), {"text": safe_name(row["text"] or "")})

    def _add_collectives(self) -> None:
        by_group: dict[str, Rows] = defaultdict(list)
        for row in self._source.collectives[self.key]:
            by_group[row["group"] or ""].append(row)
        for group, rows in sorted(by_group.items()):
            what = "collectives" + (f" · {safe_name(group)}" if group else "")
            self._add_rows(what, rows, "op", ("bytes", "sequence"))

    def _add_rows(self, what: str, rows: Rows, named_by: str, columns: Sequence[str]) -> None:
        lanes = Lanes(self._writer, self._process, what)
        rows = sorted(rows, key=lambda row: (row["start_ns"], -(row["dur_ns"] or 0)))
        for row, start in zip(rows, self._place(row["start_ns"] for row in rows), strict=True):
            if row["dur_ns"] is not None:
                args = {name: row[name] for name in columns if _can_be_shown(row[name])}
                lanes.slice(Slice(start, start + row["dur_ns"], safe_name(str(row.get(named_by) or what)), args))
        lanes.close()

    def _add_samples(self) -> None:
        counters: dict[str, int] = {}
        rows = sorted(self._source.samples[self.key], key=lambda row: (row["metric"] or "", row["time_ns"]))
        for row, at in zip(rows, self._place(row["time_ns"] for row in rows), strict=True):
            value, metric = row["value"], safe_name(row["metric"] or "sample")
            if value is None or not math.isfinite(value):
                continue
            name = metric
            if row["region"] and not metric.startswith(_PER_REGION):
                name = f"{metric} · {safe_name(row['region'])}"
            if name not in counters:
                counters[name] = self._writer.counter(self._process, name, unit_of(metric))
            self._writer.value(counters[name], at, value)


def _can_be_shown(value: Any) -> bool:
    # An unknown size of a collective is -1 in a log; JSON has no NaN.
    return isinstance(value, (str, int, float)) and value != -1 and (isinstance(value, str) or math.isfinite(value))


def _name_of(log: dict[str, Any], place: Place) -> str:
    session = f" · session {log['session']}" if log["session"] else ""
    host, pid = log["host"], log["pid"]
    where = f" · {safe_name(host)}" if host else ""
    said = f" · {place.said}" if place.said else ""
    return f"rank {log['rank']}{session}{where}" + (f" · pid {pid}" if pid is not None else "") + said
