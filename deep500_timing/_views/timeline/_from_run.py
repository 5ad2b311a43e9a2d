"""A run's processes, threads, devices, steps, collectives and samples as tracks.

A window of time of one rank is held at once, so that a long run needs no memory for its length.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import count
from typing import TYPE_CHECKING, Any

from deep500_timing._base.require import require
from deep500_timing._summary.text import safe_name
from deep500_timing._views.timeline._clocks import Place, Places, say_what_is_not_compared
from deep500_timing._views.timeline._tracks import Lanes, Writer, unit_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from deep500_timing.runs import Run

_WINDOW_ROWS = 200_000
_COLUMNS = ("session", "thread", "device", "region", "path", "depth", "step", "start_ns", "dur_ns")
_PER_REGION = ("memory.",)
"""Metrics that are read at the ends of regions and are of the whole process: one track for all regions."""
_OWN_TABLES = ("intervals", "collectives", "open", "flushes")


def first_time_ns(run: Run) -> int:
    """When the run began, in Unix time where that is known."""
    return Places(run, sessions_of(run, None)).first_ns(run.table("logs").rows())


def sessions_of(run: Run, ranks: Sequence[int] | None) -> list[dict[str, Any]]:
    """The sessions of a run by rank: each a row of the table of logs, of its last file.

    Raises:
        LookupError: A rank is asked for that the run does not have.
    """
    logs = sorted(run.table("logs").rows(), key=lambda log: (log["rank"], log["session"], log["segment"]))
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
    """Write a run's timeline.

    Args:
        run: The run.
        writer: Where to.
        steps: Of these steps only, the first and the last; what belongs to no step is left out then.
        ranks: Of these ranks only.
        on_progress: Called with how many sessions are done, and of how many.

    Raises:
        LookupError: The run has no such rank, or none of the steps.
    """
    if steps is not None:
        _refuse_if_absent(run, steps)
    sessions, numbers = sessions_of(run, ranks), count(1)
    places = Places(run, sessions)
    say_what_is_not_compared(run, places, sessions)
    for done, log in enumerate(sessions):
        on_progress(done, len(sessions))
        _Session(run, writer, log, places.of(log), steps, numbers).add()
    on_progress(len(sessions), len(sessions))


def _refuse_if_absent(run: Run, steps: tuple[int, int]) -> None:
    there = run.steps().arrow()["step"].to_pylist()
    if not any(steps[0] <= step <= steps[1] for step in there):
        asked = f"step {steps[0]}" if steps[0] == steps[1] else f"steps {steps[0]} to {steps[1]}"
        has = f"steps from {min(there)} to {max(there)}" if there else "no steps"
        raise LookupError(f"Showing {asked}: the run has {has}.")


class _Session:
    """One start of one rank: a process of the timeline."""

    def __init__(
        self,
        run: Run,
        writer: Writer,
        log: dict[str, Any],
        place: Place,
        steps: tuple[int, int] | None,
        numbers: Iterator[int],
    ) -> None:
        self._nw = require("narwhals", extra="runs", caller="Writing a timeline")
        self._run, self._writer, self._steps = run, writer, steps
        self.rank, self.session = log["rank"], log["session"]
        self._place = place
        self._process = writer.process(_name_of(log, place))
        self._threads = {
            row["thread"]: safe_name(row["name"] or f"thread {row['thread']}")
            for row in self._rows(run.table("threads").frame)
        }
        self._numbers = numbers
        self._places: dict[tuple[str, int, str], tuple[int | None, int]] = {}
        self._flows: dict[tuple[int, str, int, int], int] = {}
        self._on_device: set[tuple[int, str]] = set()

    def add(self) -> None:
        """Write the tracks, in the order in which a reader wants them."""
        reach = self._add_steps()
        self._add_intervals()
        self._add_events(reach)
        self._add_collectives(reach)
        self._add_tables(reach)
        self._add_samples(reach)

    def _rows(self, frame: Any) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._mine(frame).collect("pyarrow").to_native().to_pylist()
        return rows

    def _mine(self, frame: Any) -> Any:
        return frame.filter((self._nw.col("rank") == self.rank) & (self._nw.col("session") == self.session))

    def _add_steps(self) -> tuple[float, float]:
        lanes = Lanes(self._writer, self._process, "steps")
        first, last = math.inf, -math.inf
        steps = self._run.steps(rank=self.rank, session=self.session).rows()
        for step, start in zip(steps, self._place(step["start_ns"] for step in steps), strict=True):
            if step["dur_ns"] is None or (self._steps and not self._steps[0] <= step["step"] <= self._steps[1]):
                continue
            lanes.slice(start, start + step["dur_ns"], f"step {step['step']}")
            first, last = min(first, start), max(last, start + step["dur_ns"])
        lanes.close()
        return (first, last) if self._steps else (-math.inf, math.inf)

    # --- intervals ----------------------------------------------------------------------------------------------------

    def _add_intervals(self) -> None:
        frame = self._mine(self._run.intervals(rank=self.rank, steps=self._steps).frame)
        unpaired = self._steps_without_pairs(frame)
        tracks: dict[tuple[int, str], Lanes] = {}
        # The main thread first, and a device below the thread that it works for.
        for thread, device in sorted(self._tracks_of(frame), key=lambda of: (of[0], of[1] != "CPU", of[1])):
            name = self._threads.get(thread, f"thread {thread}")
            tracks[thread, device] = Lanes(
                self._writer, self._process, name if device == "CPU" else f"{device} · {name}"
            )
        for window in self._windows(frame):
            begins = self._place(window[_COLUMNS.index("start_ns")])
            for begin, (_, thread, device, region, path, _, step, _, duration) in zip(
                begins, zip(*window, strict=True), strict=True
            ):
                flow_out = flow_in = 0
                if step is not None and (thread, path) in self._on_device and (thread, path, step) not in unpaired:
                    flow = self._flow(device, (thread, path, step))
                    flow_out, flow_in = (flow, 0) if device == "CPU" else (0, flow)
                args = {} if step is None else {"step": step}
                tracks[thread, device].slice(begin, begin + duration, safe_name(region), args, flow_out, flow_in)
        for lanes in tracks.values():
            lanes.close()

    def _flow(self, device: str, of: tuple[int, str, int]) -> int:
        # Whichever of the two comes first gets a number, which the other takes over: what is held is what is in flight.
        place = self._places.get((device, *of[:2]), (None, 0))
        number = place[1] + 1 if place[0] == of[2] else 0
        self._places[(device, *of[:2])] = of[2], number
        known = self._flows.pop((*of, number), None)
        if known is None:
            known = self._flows[(*of, number)] = next(self._numbers)
        return known

    def _tracks_of(self, frame: Any) -> list[tuple[int, str]]:
        rows = frame.select("thread", "device").unique().collect("pyarrow").to_native().to_pylist()
        return [(row["thread"], row["device"]) for row in rows]

    def _steps_without_pairs(self, frame: Any) -> set[tuple[int, str, int]]:
        # The n-th launch of a region in a step is paired with the n-th time on the device. Where some have no time on
        # the device (captured, failed, dropped) nobody can tell which, and no arrow is drawn.
        nw = self._nw
        on_device = (nw.col("device") != "CPU").cast(nw.Int64)
        counts = frame.select("thread", "path", "step", on_device.alias("on_device")).group_by("thread", "path", "step")
        numbers = counts.agg(nw.col("on_device").sum(), nw.len().cast(nw.Int64).alias("all"))
        found = numbers.filter(nw.col("on_device") > 0).select("thread", "path").unique().collect("pyarrow").to_native()
        self._on_device = {(row["thread"], row["path"]) for row in found.to_pylist()}
        if not self._on_device:
            return set()
        odd = numbers.filter(
            nw.col("path").is_in(sorted({path for _, path in self._on_device})),
            nw.col("on_device") * 2 != nw.col("all"),
        )
        odd = odd.collect("pyarrow").to_native().to_pylist()
        return {(row["thread"], row["path"], row["step"]) for row in odd if row["step"] is not None}

    def _windows(self, frame: Any) -> Iterator[list[list[Any]]]:
        nw = self._nw
        reach = (
            frame.select(
                nw.len().cast(nw.Int64).alias("rows"),
                nw.col("start_ns").min().alias("first"),
                nw.col("start_ns").max().alias("last"),
            )
            .collect("pyarrow")
            .to_native()
            .to_pylist()[0]
        )
        if not reach["rows"]:
            return
        number = math.ceil(reach["rows"] / _WINDOW_ROWS)
        width = (reach["last"] - reach["first"]) // number + 1
        for place in range(number):
            low = reach["first"] + place * width
            part = frame.filter((nw.col("start_ns") >= low) & (nw.col("start_ns") < low + width)).select(*_COLUMNS)
            table = part.collect("pyarrow").to_native()
            # A launch before what it launched, the outer before the inner.
            order = {"start_ns": "ascending", "device": "ascending", "dur_ns": "descending", "depth": "ascending"}
            table = table.sort_by(list(order.items()))
            yield [table[name].to_pylist() for name in _COLUMNS]

    # --- what else was recorded ---------------------------------------------------------------------------------------

    def _add_events(self, reach: tuple[float, float]) -> None:
        lanes = Lanes(self._writer, self._process, "events")
        rows = sorted(self._rows(self._run.table("events").frame), key=lambda row: row["time_ns"])
        for row, at in zip(rows, self._place(row["time_ns"] for row in rows), strict=True):
            if reach[0] <= at <= reach[1]:
                lanes.instant(at, safe_name(row["what"] or "event"), {"text": safe_name(row["text"] or "")})

    def _add_collectives(self, reach: tuple[float, float]) -> None:
        by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in self._rows(self._run.table("collectives").frame):
            by_group[row["group"] or ""].append(row)
        for group, rows in sorted(by_group.items()):
            what = "collectives" + (f" · {safe_name(group)}" if group else "")
            args = (("bytes", "bytes"), ("sequence", "sequence"))
            self._add_rows(what, rows, "op", reach, args)

    def _add_tables(self, reach: tuple[float, float]) -> None:
        # A table that a log declares itself is a track if its rows say what took how long.
        for name in sorted(self._run.tables):
            relation = self._run.table(name)
            columns = relation.columns
            if name in _OWN_TABLES or not {"start_ns", "dur_ns", "rank", "session"} <= set(columns):
                continue
            rows = self._rows(relation.frame)
            texts = [column for column in columns if rows and isinstance(rows[0][column], str)]
            known = {"rank", "session", "start_ns", "dur_ns", "unix_ns", *texts[:1]}
            args = tuple((column, column) for column in columns if column not in known)
            self._add_rows(safe_name(name), rows, texts[0] if texts else "", reach, args)

    def _add_rows(
        self,
        what: str,
        rows: list[dict[str, Any]],
        named_by: str,
        reach: tuple[float, float],
        args: tuple[tuple[str, str], ...],
    ) -> None:
        lanes = Lanes(self._writer, self._process, what)
        rows = sorted(rows, key=lambda row: (row["start_ns"], -(row["dur_ns"] or 0)))
        for row, start in zip(rows, self._place(row["start_ns"] for row in rows), strict=True):
            if row["dur_ns"] is None or start + row["dur_ns"] < reach[0] or start > reach[1]:
                continue
            said = {name: row[column] for name, column in args if _can_be_said(row[column])}
            lanes.slice(start, start + row["dur_ns"], safe_name(str(row.get(named_by) or what)), said)
        lanes.close()

    def _add_samples(self, reach: tuple[float, float]) -> None:
        counters: dict[str, int] = {}
        rows = self._rows(self._run.table("samples").frame)
        rows = sorted(rows, key=lambda row: (row["metric"] or "", row["time_ns"]))
        for row, at in zip(rows, self._place(row["time_ns"] for row in rows), strict=True):
            value, metric = row["value"], safe_name(row["metric"] or "sample")
            if value is None or not math.isfinite(value) or not reach[0] <= at <= reach[1]:
                continue
            name = metric
            if row["region"] and not metric.startswith(_PER_REGION):
                name = f"{metric} · {safe_name(row['region'])}"
            if name not in counters:
                counters[name] = self._writer.counter(self._process, name, unit_of(metric))
            self._writer.value(counters[name], at, value)


def _can_be_said(value: Any) -> bool:
    # A collective's unknown size is -1 in a log; a NaN stands in no JSON.
    return isinstance(value, (str, int, float)) and value != -1 and (isinstance(value, str) or math.isfinite(value))


def _name_of(log: dict[str, Any], place: Place) -> str:
    session = f" · session {log['session']}" if log["session"] else ""
    host, pid = log["host"], log["pid"]
    where = f" · {safe_name(host)}" if host else ""
    said = f" · {place.said}" if place.said else ""
    return f"rank {log['rank']}{session}{where}" + (f" · pid {pid}" if pid is not None else "") + said
