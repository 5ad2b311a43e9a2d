"""A run as a timeline in Chrome's trace format, which Perfetto and chrome://tracing read.

A few queries serve all ranks, and intervals are read as a sorted stream, so that memory does not grow with the run.
``baseTimeNanoseconds`` plus ``ts`` of an event is Unix time, in a timeline as in a trace of ``torch.profiler``.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count, groupby, islice, pairwise
from os import PathLike
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from deep500_timing._base import progress
from deep500_timing._base.files import whole_file
from deep500_timing._base.names import CPU
from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.clocks import ClockFit, clocks_of
from deep500_timing._summary.text import format_time, safe_name
from deep500_timing.runs import _checks as check

if TYPE_CHECKING:
    from deep500_timing.runs import Run

Row = dict[str, Any]
Key = tuple[int, int]
"""Rank and session."""
ByKey = dict[Key, list[Row]]

_PER_REGION = ("memory.",)
"""Metrics of the whole process that are read at the ends of regions: one track for all regions."""
_TOGETHER = 4096
"""Intervals that are converted together."""
_LOAD = ("busy_cores", "process_cores", "process_waiting", "workers_cores", "throttled", "pressure_io")
"""Columns of the table ``machine`` with a track."""
_OWN_TRACKS = ("intervals", "collectives", "open", "flushes")
_SESSIONS = """
select rank, session, max_by(host, segment) as host, max_by(pid, segment) as pid,
    max_by(unix_offset_ns, segment) as unix_offset_ns,
    min(first_unix_ns) as first_unix_ns, max(last_unix_ns) as last_unix_ns
from logs group by rank, session order by rank, session"""
_INTERVALS = f"""
with part as (select * from intervals where {{where}}),
launched as (select distinct rank, session, thread, region, host_start_ns from part where host_start_ns is not null)
select i.rank, i.session, i.thread, i.device, i.region, i.step, i.start_ns, i.dur_ns,
    coalesce(i.host_start_ns, l.host_start_ns) as host_start_ns
from part i left join launched l on i.device = '{CPU}' and i.rank = l.rank and i.session = l.session
    and i.thread = l.thread and i.region = l.region and i.start_ns = l.host_start_ns
order by i.rank, i.session, i.start_ns, i.device, i.dur_ns desc, i.depth"""


def _sample(time_ns: int, metric: str, value: float | None) -> Row:
    return {"time_ns": time_ns, "metric": metric, "region": "", "value": value}


def write_timeline(
    run: Run,
    path: str | PathLike[str],
    *,
    steps: tuple[int, int] | None = None,
    ranks: Sequence[int] | None = None,
    profiles: Sequence[str | PathLike[str]] = (),
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

    Raises:
        LookupError: The run has no such rank, or none of the steps.
        OSError: The file cannot be written, or a trace cannot be read.
        ValueError: The clock of a trace is unknown.
    """
    traces = [_Trace(os.fspath(profile)) for profile in profiles]
    places = places_of(run, ranks)
    starts = [*(place.first_ns() for place in places.values()), *(trace.first_ns() for trace in traces)]
    with whole_file(os.fspath(path)) as file:
        writer = _Writer(file, min((start for start in starts if start), default=0))
        _warn_of_clocks(run, places)
        tables = _Tables(run, steps, ranks)
        intervals = tables.intervals()
        key, rows = next(intervals, (None, iter(())))
        for done, (own, place) in enumerate(places.items()):
            progress.show(done, len(places))
            process = _Process(writer, own, place)
            if key == own:
                process.write(tables, rows)
                key, rows = next(intervals, (None, iter(())))
            else:
                process.write(tables, iter(()))
        progress.show(len(places), len(places))
        for trace in traces:
            trace.write(writer)
        writer.close()


# --- clocks -----------------------------------------------------------------------------------------------------------


class RankClock(NamedTuple):
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


def places_of(run: Run, ranks: Sequence[int] | None = None) -> dict[Key, RankClock]:
    """The conversion of each rank and session, in their order."""
    logs = {(log["rank"], log["session"]): log for log in run.sql(_SESSIONS).rows()}
    there = sorted({rank for rank, _ in logs})
    for rank in ranks or ():
        if rank not in there:
            has = f"rank {there[0]}" if len(there) == 1 else f"ranks {there[0]} to {there[-1]}"
            raise LookupError(f"Showing rank {rank}: the run has {has}.")
    clocks = cache(lambda session: clocks_of(run, session=session))
    places = {}
    for (rank, session), log in logs.items():
        if ranks is not None and rank not in ranks:
            continue
        reference, fit = logs[clocks(session).reference, session], clocks(session).fits.get(rank)
        # One host has one Unix time.
        if log["host"] == reference["host"]:
            places[rank, session] = RankClock(log, log["unix_offset_ns"] or 0)
        elif fit is None or reference["unix_offset_ns"] is None:
            places[rank, session] = RankClock(log, log["unix_offset_ns"] or 0, compared=False)
        else:
            places[rank, session] = RankClock(log, reference["unix_offset_ns"], fit)
    return places


def _warn_of_clocks(run: Run, places: dict[Key, RankClock]) -> None:
    apart = sorted({rank for (rank, _), place in places.items() if not place.compared})
    if apart:
        shown = ", ".join(map(str, apart[:8])) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
        warn_once(
            f"The clock of rank {shown} was not compared with that of the first rank, which is on another host. The "
            "timeline uses each host's Unix time; ranks may be shifted by the difference of the hosts' clocks. Call "
            "deep500_timing.ranks.keep_clocks on every rank of the next run.",
            key=f"clocks {run.folders[0]} {shown}",
        )


# --- what a run holds -------------------------------------------------------------------------------------------------


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
        self.events = self._within("events", "time_ns")
        self.samples = self._with_machine(self._within("samples", "time_ns"))
        self.collectives = self._within("collectives", "start_ns")
        self.others = {
            name: self._within(name, "start_ns")
            for name in sorted(run.tables)
            if name not in _OWN_TRACKS and {"start_ns", "dur_ns", "rank", "session"} <= set(run.table(name).columns)
        }

    def intervals(self) -> Iterator[tuple[Key, Iterator[Row]]]:
        """The intervals of each rank and session, sorted by start, as a stream."""
        found = self._run.sql(_INTERVALS.format(where=self._where))
        rows = (row for batch in found.batches() for row in batch.to_pylist())
        return groupby(rows, key=lambda row: (row["rank"], row["session"]))

    def _with_machine(self, samples: ByKey) -> ByKey:
        # What the machine did, and the share of the time in which each thread waited for a processor.
        found: ByKey = defaultdict(list, {key: list(rows) for key, rows in samples.items()})
        for key, rows in self._within("machine", "time_ns").items():
            found[key] += (_sample(row["time_ns"], f"machine.{name}", row[name]) for row in rows for name in _LOAD)
        for key, rows in self._within("processor", "time_ns").items():
            threads: dict[int, Row] = {}
            for row in sorted(rows, key=lambda row: row["time_ns"]):
                before = threads.get(row["thread"])
                threads[row["thread"]] = row
                if before is not None and row["time_ns"] > before["time_ns"]:
                    waited = (row["waited_ns"] - before["waited_ns"]) / (row["time_ns"] - before["time_ns"])
                    found[key].append(
                        _sample(before["time_ns"], f"thread {row['thread']} waits for a processor", waited)
                    )
        return found

    def _within(self, table: str, begin: str) -> ByKey:
        """The rows that touch the range of their own rank's and session's steps."""
        if self._reach is None:
            return self._read(table)
        end = "start_ns + coalesce(dur_ns, 0)" if begin == "start_ns" else begin
        values = f"(values {self._reach}) as r(of_rank, of_session, low, high)"
        on = f"rank = of_rank and session = of_session and {begin} <= high and {end} >= low"
        return self._read(f"(select t.* from {table} t join {values} on {on})")

    def _read(self, table: str) -> ByKey:
        found: ByKey = defaultdict(list)
        for row in self._run.sql(f"select * from {table} where {self._ranks}").rows():
            found[row["rank"], row["session"]].append(row)
        return found

    def _read_steps(self, steps: tuple[int, int] | None) -> ByKey:
        rows = self._run.steps().rows()
        first, last = steps or (-math.inf, math.inf)
        shown = [row for row in rows if first <= row["step"] <= last]
        if steps is not None and not shown:
            asked = f"step {first}" if first == last else f"steps {first} to {last}"
            numbers = [row["step"] for row in rows]
            has = f"steps from {min(numbers)} to {max(numbers)}" if numbers else "no steps"
            raise LookupError(f"Showing {asked}: the run has {has}.")
        found: ByKey = defaultdict(list)
        for row in shown:
            if row["dur_ns"] is not None:
                found[row["rank"], row["session"]].append(row | {"name": f"step {row['step']}"})
        return found


class _Process:
    """One session of one rank: a process of the timeline."""

    def __init__(self, writer: _Writer, key: Key, place: RankClock) -> None:
        self._writer, self._key, self._place = writer, key, place
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

    def write(self, tables: _Tables, intervals: Iterator[Row]) -> None:
        """Write the tracks in the order in which they are shown."""
        key = self._key
        self._write_rows("steps", tables.steps[key], "name", ())
        self._write_intervals(intervals, tables.tracks[key], tables.threads[key])
        track = self._writer.track(self._process, "events") if tables.events[key] else {}
        for row, at in self._placed(tables.events[key], "time_ns"):
            event = {"ph": "i", "s": "t", "name": safe_name(row["what"] or "event"), "ts": self._writer.time(at)}
            self._writer.write({**event, **track, "args": {"text": safe_name(row["text"] or "")}})
        by_group: dict[str, list[Row]] = defaultdict(list)
        for row in tables.collectives[key]:
            by_group[row["group"] or ""].append(row)
        for group, rows in sorted(by_group.items()):
            what = "collectives" + (f" · {safe_name(group)}" if group else "")
            self._write_rows(what, rows, "op", ("bytes", "sequence"))
        for name, table in tables.others.items():
            if rows := table[key]:
                texts = [column for column, value in rows[0].items() if isinstance(value, str)]
                known = {"rank", "session", "start_ns", "dur_ns", "unix_ns", *texts[:1]}
                columns = [column for column in rows[0] if column not in known]
                self._write_rows(safe_name(name), rows, texts[0] if texts else "", columns)
        for row, at in self._placed(tables.samples[key], "time_ns"):
            name = safe_name(row["metric"] or "sample")
            if row["region"] and not name.startswith(_PER_REGION):
                name += f" · {safe_name(row['region'])}"
            if row["value"] is not None and math.isfinite(row["value"]):
                place = {"pid": self._process, "ts": self._writer.time(at)}
                self._writer.write({"ph": "C", "name": name, **place, "args": {"value": row["value"]}})

    def _write_intervals(self, intervals: Iterator[Row], tracks: list[Row], threads: list[Row]) -> None:
        names = {row["thread"]: row["name"] for row in threads}
        lanes: dict[tuple[int, str], _Lanes] = {}
        # The main thread first, and the device below the thread that launches its work.
        for row in sorted(tracks, key=lambda row: (row["thread"], row["device"] != CPU, row["device"])):
            thread, device = row["thread"], row["device"]
            name = safe_name(names.get(thread) or f"thread {thread}")
            name = name if device == CPU else f"{device} · {name}"
            lanes[thread, device] = _Lanes(self._writer, self._process, name)
        arrows: dict[tuple[int, str, int], int] = {}
        while rows := list(islice(intervals, _TOGETHER)):
            for row, begin in zip(rows, self._place(row["start_ns"] for row in rows), strict=True):
                arrow = "", 0
                if row["host_start_ns"] is not None:
                    # The host's and the device's interval share a number; either may come first.
                    launch = row["thread"], row["region"], row["host_start_ns"]
                    number = arrows.pop(launch, 0)
                    if not number:
                        number = arrows[launch] = next(self._writer.arrows)
                    arrow = "s" if row["device"] == CPU else "f", number
                args = {} if row["step"] is None else {"step": row["step"]}
                track = lanes[row["thread"], row["device"]]
                track.slice(begin, begin + row["dur_ns"], safe_name(row["region"]), args, arrow)

    def _write_rows(self, what: str, rows: list[Row], named_by: str, columns: Sequence[str]) -> None:
        lanes = _Lanes(self._writer, self._process, what)
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


# --- the file ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes events as a stream."""

    def __init__(self, file: IO[bytes], origin_ns: int) -> None:
        self._file, self._origin_ns = file, origin_ns
        self._encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
        self._processes, self._tracks = count(1), count(1)
        self.arrows = count(1)
        """The next number of an arrow."""
        self._separator = ""
        head = {"schemaVersion": 1, "displayTimeUnit": "ms", "baseTimeNanoseconds": origin_ns}
        self._file.write((self._encode(head)[:-1] + ',"traceEvents":[\n').encode())

    def process(self, name: str | None = None) -> int:
        """Add a process below the others. A trace names its own."""
        number = next(self._processes)
        if name is not None:
            self._name("process", name, number, {"pid": number, "tid": 0})
        return number

    def track(self, process: int, name: str) -> dict[str, int]:
        """Add a track below the others of its process."""
        number = next(self._tracks)
        place = {"pid": process, "tid": number}
        self._name("thread", name, number, place)
        return place

    def _name(self, kind: str, name: str, index: int, place: dict[str, int]) -> None:
        self.write({"ph": "M", "name": f"{kind}_name", **place, "args": {"name": name}})
        self.write({"ph": "M", "name": f"{kind}_sort_index", **place, "args": {"sort_index": index}})

    def time(self, time_ns: int) -> float:
        """A time in the unit of the file."""
        return (time_ns - self._origin_ns) / 1000

    def write(self, event: dict[str, Any]) -> None:
        self._file.write((self._separator + self._encode(event)).encode())
        self._separator = ",\n"

    def close(self) -> None:
        self._file.write(b"\n]}\n")


class _Lanes:
    """A track with lanes for overlapping slices.

    Viewers draw a track as a stack, in which a slice ends before the slices around it. A slice that overlaps goes to
    another lane.
    """

    def __init__(self, writer: _Writer, process: int, name: str) -> None:
        self._writer, self._process, self._name = writer, process, name
        self._lanes: list[tuple[dict[str, int], list[int]]] = []

    def slice(self, start_ns: int, end_ns: int, name: str, args: Row, arrow: tuple[str, int] = ("", 0)) -> None:
        """Add a slice. Slices must come by rising start; for equal starts the longest first.

        Viewers show ``args`` for a selected slice. An arrow has a number, and begins (``"s"``) or ends (``"f"``) here.
        """
        lane = next((lane for lane in self._lanes if _fits(lane[1], start_ns, end_ns)), None)
        if lane is None:
            lane = self._writer.track(self._process, self._name), []
            self._lanes.append(lane)
        place, open_ends = lane
        open_ends.append(end_ns)
        event = {"ph": "X", "name": name, **place, "ts": self._writer.time(start_ns), "dur": (end_ns - start_ns) / 1000}
        self._writer.write({**event, "args": args} if args else event)
        side, number = arrow
        if number:
            # An arrow ends in the slice around its end: a nanosecond inside it, where no other one ends as it begins.
            at = self._writer.time(min(start_ns + 1, end_ns))
            self._writer.write(
                {"ph": side, "bp": "e", "id": number, "cat": "launch", "name": "launch", **place, "ts": at}
            )


def _fits(open_ends: list[int], start_ns: int, end_ns: int) -> bool:
    while open_ends and open_ends[-1] <= start_ns:
        open_ends.pop()
    return not open_ends or open_ends[-1] >= end_ns


class _Trace:
    """The events of a trace of ``torch.profiler``. Its format is that of the timeline, so they keep their form."""

    def __init__(self, path: str) -> None:
        try:
            trace = check.read_json(path, check.TRACE_BYTES)
        except ValueError as error:
            wrong = f"{error}. Export it with profiler.export_chrome_trace()."
            raise ValueError(f"Merging the trace {path!r}: {wrong}") from error
        if not check.has(traceEvents=check.of(list))(trace):
            wrong = "it has no traceEvents. Export it with profiler.export_chrome_trace()."
            raise ValueError(f"Merging the trace {path!r}: {wrong}")
        if not check.integer(0, check.FAR)(trace.get("baseTimeNanoseconds")):
            wrong = "it has no baseTimeNanoseconds, so its time is unknown. PyTorch 2.1 or later writes it."
            raise ValueError(f"Merging the trace {path!r}: {wrong}")
        self._base_ns: int = trace["baseTimeNanoseconds"]
        self._events = [event for event in trace["traceEvents"] if isinstance(event, dict)]
        self._path, about = path, trace.get("distributedInfo")
        self._rank = about["rank"] if check.has(rank=check.integer(0, check.RANKS))(about) else None

    def first_ns(self) -> int | None:
        """When its first event began; None if it has none."""
        times = [event["ts"] for event in self._events if event.get("ph") == "X" and check.number(event.get("ts"))]
        return self._ns(min(times)) if times else None

    def write(self, writer: _Writer) -> None:
        """Write the trace's processes below the others."""
        source = "torch.profiler" if self._rank is None else f"torch.profiler of rank {self._rank}"
        processes: dict[str, int] = {}
        arrows: dict[tuple[str, str], int] = {}
        for event in self._events:
            pid = event.get("pid")
            if str(pid) not in processes:
                processes[str(pid)] = writer.process()
            moved = {**event, "pid": processes[str(pid)]}
            if event.get("ph") != "M":
                if not (check.number(event.get("ts")) and check.number(event.get("dur", 0))):
                    continue
                moved["ts"] = writer.time(self._ns(event["ts"]))
            elif event.get("name") == "process_name":
                args = event.get("args")
                name = (args.get("name") if isinstance(args, dict) else None) or pid
                moved["args"] = {"name": f"{source} · {safe_name(str(name))}"}
            if "id" in event:
                key = str(event.get("cat")), str(event["id"])
                if key not in arrows:
                    arrows[key] = next(writer.arrows)
                moved["id"] = arrows[key]
            try:
                writer.write(moved)
            except (ValueError, RecursionError):
                raise ValueError(f"Merging the trace {self._path!r}: an event cannot be written as JSON.") from None

    def _ns(self, microseconds: float) -> int:
        # In integers: seconds since 1970 as a double are right to a quarter of a microsecond only.
        return self._base_ns + round(microseconds * 1000)
