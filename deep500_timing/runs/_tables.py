"""Reads one log frame by frame, and converts it to Arrow tables, with names, paths and Unix time."""

from __future__ import annotations

import json
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import CPU
from deep500_timing._base.regular import open_regular
from deep500_timing._base.sql import arrow_of
from deep500_timing._summary.distribution import bin_of
from deep500_timing._summary.nesting import ENDLESS, Paths, distinct, path_text
from deep500_timing._summary.text import safe_name
from deep500_timing.runs._checks import NO_STEP, ROWS, BadLogError, check_header, check_rows, event_of, json_of
from deep500_timing.runs._format import (
    END,
    EVENT,
    FIRST_OWN,
    FIRST_TABLE,
    HEADER,
    KINDS,
    NAMES,
    SCHEMA,
    TABLES,
    Damage,
    Frame,
    Table,
    declare,
    parse_name,
    read_frames,
    typed,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import pyarrow as pa
    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]
    Int64Array = NDArray[np.int64]


@dataclass
class Batch:
    """The rows of one frame."""

    table: str
    rows: int
    arrays: Arrays
    """By column: int64, float64 for ``float``; names as numbers into :attr:`Log.names`."""


@dataclass
class Log:
    """The facts of a log. Complete after :func:`read_log` is exhausted."""

    path: str
    header: dict[str, Any] = field(default_factory=dict)
    """Empty if it was damaged. Rank, session and segment are then those of the file's name."""
    rank: int = 0
    session: int = 0
    segment: int = 0
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """The reason of its end; None if the process was killed or is running."""
    tables: dict[str, Table] = field(default_factory=lambda: dict(TABLES))
    damage: list[Damage] = field(default_factory=list)
    unknown: int = 0
    missing_frames: int = 0
    """Missing numbers of frames: the frames in damaged parts."""
    repeated: int = 0
    """Frames that are there again, as in a file that was joined to a copy of itself. They are skipped."""
    intervals: int = 0
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self.rank, self.session, self.segment = parse_name(os.path.basename(self.path)) or (0, 0, 0)

    def text(self, number: int) -> str:
        """The name of a number; the number itself if the name's frame is lost."""
        return self.names.get(number, f"name {number} (lost)")


CHUNK_ROWS = 1 << 15
"""Intervals that are nested together: they fit into a processor's cache. A row group has four times as many."""
INTERVALS = ("intervals", "device_intervals")
"""The tables of intervals. Those of a device are in the second."""


class NewerSchemaError(BadLogError):
    """A later version wrote the log, and this version would misread it."""


def read_log(log: Log, only: Collection[str] = ()) -> Iterator[Batch]:
    """Read a log frame by frame, in bounded memory: all tables, or some. Damaged parts are recorded and skipped."""
    with open_regular(log.path) as file:
        if os.fstat(file.fileno()).st_size == 0:
            return
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with data:
        expected, seen = 0, set[tuple[int, ...]]()
        columns_of = {number: (name, columns) for name, (number, columns) in log.tables.items()}
        for frame in read_frames(data):
            if isinstance(frame, Damage):
                log.damage.append(frame)
                continue
            identity = frame.kind, frame.sequence, frame.rows, len(frame.stored), frame.crc
            if identity in seen:
                log.repeated += 1
                continue
            seen.add(identity)
            log.read_bytes += len(frame.stored)
            log.missing_frames += max(frame.sequence - expected, 0)
            expected = frame.sequence + 1
            if frame.kind < FIRST_TABLE:
                _take_document(log, frame)
                if frame.kind in (HEADER, KINDS):
                    columns_of = {number: (name, columns) for name, (number, columns) in log.tables.items()}
                continue
            known = columns_of.get(frame.kind)
            if known is None or not 0 < frame.rows <= ROWS:
                log.unknown += 1
                continue
            if only and known[0] not in only:
                continue
            try:
                spans: dict[str, tuple[int, int]] = {}
                arrays = unpack(known[1], frame.rows, frame.payload, spans)
                check_rows(known[1], arrays, spans, is_ours=frame.kind < FIRST_OWN)
            except ValueError:
                # The frame is whole, but its columns differ from their description, or its values are out of range.
                log.unknown += 1
                continue
            if known[0] in INTERVALS:
                log.intervals += frame.rows
            yield Batch(known[0], frame.rows, arrays)


def _take_document(log: Log, frame: Frame) -> None:
    try:
        value = json_of(frame.payload)
        if frame.kind == HEADER:
            if int(value["schema"]) > SCHEMA:
                by = safe_name(str(value.get("written_by")))
                raise NewerSchemaError(
                    f"it was written by {by} with schema {int(value['schema'])}, this version reads up to {SCHEMA}. "
                    "Update deep500-timing"
                )
            check_header(value, parse_name(os.path.basename(log.path)))
            log.header = {name: one for name, one in value.items() if one is not None}
            log.rank, log.session, log.segment = (value[name] for name in ("rank", "session", "segment"))
            log.unknown += not declare(log.tables, value["tables"])
        elif frame.kind == NAMES:
            _take_names(log, value)
        elif frame.kind == KINDS:
            log.unknown += not declare(log.tables, value)
        elif frame.kind == EVENT:
            log.events.append(event_of(value))
        elif frame.kind == END:
            log.end = dict(value)
        else:
            log.unknown += 1
    except BadLogError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if frame.kind == HEADER:
            raise BadLogError(f"its header cannot be read: {error}") from error
        log.unknown += 1


def _take_names(log: Log, pairs: Any) -> None:
    # A name is written once.
    if not all(type(number) is int and type(name) is str for number, name in pairs):
        raise ValueError("A name is a number and a text.")
    for number, name in pairs:
        log.unknown += log.names.setdefault(number, name) != name


COLUMNS = {
    "intervals": typed(
        "int32: rank session thread",
        "text: device region path",
        "int32: depth",
        "int64: step start_ns dur_ns unix_ns",
        "int32: bin",
        "bool: overlaps",
        "int64: overlap_ns host_start_ns",
    ),
    "logs": typed(
        "int32: rank session segment",
        "text: file host",
        "int64: pid world_size local_rank",
        "text: clock",
        "int64: unix_offset_ns clock_step_ns written read dropped damaged_bytes missing_frames unknown_frames "
        "repeated_frames",
        "text: end",
        "int64: first_unix_ns last_unix_ns flushed_unix_ns clock_end_ns",
        "text: header fault",
    ),
    "events": typed("int32: rank session", "int64: time_ns unix_ns", "text: what text more"),
}
"""Columns of the tables that differ from the log's."""
_KINDS = {"int": "int64", "time": "int64", "float": "float64", "name": "text"}


def columns_of(table: str, described: Any = None) -> dict[str, str]:
    """The columns of a run's table with their types: rank, session and those of the log."""
    if table in COLUMNS:
        return COLUMNS[table]
    columns = {"rank": "int32", "session": "int32"}
    for column in described or TABLES[table][1]:
        columns[column.name] = _KINDS[column.type]
        if column.name in ("time_ns", "start_ns"):
            columns["unix_ns"] = "int64"
    return columns


def schema_of(columns: dict[str, str]) -> pa.Schema:
    import pyarrow as pa

    types = {"text": pa.string(), "bool": pa.bool_()}
    return pa.schema([(name, types.get(kind) or getattr(pa, kind)()) for name, kind in columns.items()])


class LogTables:
    """Converts one log to Arrow tables."""

    def __init__(self, path: str, offset_ns: int | None, first_mark_ns: int | None) -> None:
        self.log = Log(path)
        self._offset_ns = offset_ns
        self._first_mark_ns = first_mark_ns
        self._paths = Paths()
        self._path_texts: list[str] = []
        self._first_ns = ENDLESS
        self._last_ns = -ENDLESS
        self._flush: dict[str, int] = {}
        """The last flush."""
        self._clock_step_ns: int | None = None

    def tables(self) -> Iterator[tuple[str, pa.Table]]:
        """The tables with rows, ``intervals`` in chunks, and ``logs``."""
        chunk: list[Batch] = []
        rows = 0
        small: dict[str, list[Batch]] = {}
        still_open, said_open = _NONE_OPEN, dict[str, Any]()
        for batch in read_log(self.log):
            if batch.table in INTERVALS:
                chunk.append(batch)
                rows += batch.rows
            elif batch.table == "open":
                said_open = batch.arrays
            elif batch.table == "flushes":
                self._take_flush(batch)
                still_open, said_open = said_open or _NONE_OPEN, {}
                if rows >= CHUNK_ROWS:
                    yield from self._intervals(chunk, still_open)
                    chunk, rows = [], 0
            else:
                small.setdefault(batch.table, []).append(batch)
        if rows:
            yield from self._intervals(chunk, said_open or still_open)
        for table, batches in small.items():
            yield table, self._small(table, batches)
        if self.log.events:
            yield "events", self._events()
        yield "logs", self._facts()

    def _take_flush(self, batch: Batch) -> None:
        self._flush = flush = {name: int(values[-1]) for name, values in batch.arrays.items()}
        if self._offset_ns is not None:
            flush["step_ns"] = flush["unix_ns"] - flush["time_ns"] - self._offset_ns
            self._clock_step_ns = max(self._clock_step_ns or 0, flush["step_ns"], key=abs)

    def _intervals(self, chunk: list[Batch], still_open: Arrays) -> Iterator[tuple[str, pa.Table]]:
        begun = _begun(chunk, still_open)
        part, count = list[Batch](), 0
        # A flush is sorted by start. The intervals of devices come last and need those of the host.
        is_host = chunk[-1].table == INTERVALS[0]
        for batch, following in zip(chunk, [*chunk[1:], None], strict=True):
            part.append(batch)
            count += batch.rows
            if following is None or (
                is_host and count >= CHUNK_ROWS and following.arrays["start_ns"][0] > batch.arrays["start_ns"][-1]
            ):
                yield from self._part(part, begun)
                part, count = [], 0

    def _part(self, chunk: list[Batch], begun: Arrays) -> Iterator[tuple[str, pa.Table]]:
        # Rows of both tables of intervals together.
        rows = {
            column.name: np.concatenate([batch.arrays[column.name] for batch in chunk])
            for column in TABLES["intervals"].columns
        }
        unknown = np.full(max(batch.rows for batch in chunk), NO_STEP)
        rows["host_start_ns"] = np.concatenate([one.arrays.get("host_start_ns", unknown[: one.rows]) for one in chunk])
        devices = [number for number in distinct(rows["device"]) if self.log.text(number) != CPU]
        rows["on_host"] = ~np.isin(rows["device"], devices)
        nested = self._paths.nest(rows, begun)
        starts, durations, steps, hosts = (rows[name] for name in ("start_ns", "dur_ns", "step", "host_start_ns"))
        ends = starts + durations
        self._first_ns = min(int(starts.min()), self._first_ns)
        self._last_ns = max(int(ends.max()), self._last_ns)
        no_step = steps == NO_STEP
        if self._first_mark_ns is not None:
            # Counted steps before the first mark are not of the program's numbering.
            at = np.where(rows["on_host"], ends, starts)
            no_step |= (at <= self._first_mark_ns) & (starts < self._first_mark_ns)
        while len(self._path_texts) < len(self._paths.parents):
            regions = self._paths.regions_of(len(self._path_texts))
            self._path_texts.append(path_text([self._name(region) for region in regions]))
        depths = np.array(self._paths.depths, dtype=np.int64)
        arrays = {
            "thread": rows["thread"],
            "device": self._names(rows["device"]),
            "region": self._names(rows["region"]),
            "path": _dictionary(nested.paths, self._path_texts),
            "depth": depths[nested.paths],
            "step": (steps, ~no_step),
            "start_ns": starts,
            "dur_ns": durations,
            "unix_ns": self._unix(starts),
            "bin": bin_of(durations),
            "overlaps": nested.overlaps,
            "overlap_ns": nested.covered,
            "host_start_ns": (hosts, hosts != NO_STEP),
        }
        yield "intervals", self._table(COLUMNS["intervals"], arrays, len(arrays["thread"]))

    def _small(self, table: str, batches: list[Batch]) -> pa.Table:
        described = self.log.tables[table].columns
        arrays: dict[str, Any] = {}
        for name, kind in described:
            values = np.concatenate([batch.arrays[name] for batch in batches])
            arrays[name] = values
            if kind == "name":
                arrays[name] = [self._name(number) or None for number in values.tolist()]
            elif kind == "float":
                arrays[name] = (values, ~np.isnan(values))
            elif name == "step":
                arrays[name] = (values, values != NO_STEP)
            elif table == "milestones" and name == "dur_ns":
                arrays[name] = (values, values >= 0)
            if name in ("time_ns", "start_ns"):
                arrays["unix_ns"] = self._unix(values)
        return self._table(columns_of(table, described), arrays, sum(batch.rows for batch in batches))

    def _unix(self, times: Int64Array) -> Any:
        return [None] * len(times) if self._offset_ns is None else times + self._offset_ns

    def _name(self, number: int) -> str:
        return safe_text(self.log.text(number))

    def _names(self, numbers: Int64Array) -> pa.Array:
        # Of the names that occur: a log may have 10^5, and a chunk few of them.
        found = np.array(distinct(numbers), dtype=np.int64)
        places = np.zeros(int(found[-1]) + 1, dtype=np.int64)
        places[found] = np.arange(len(found))
        return _dictionary(places[numbers], [self._name(number) for number in found.tolist()])

    def _table(self, columns: dict[str, str], arrays: dict[str, Any], rows: int) -> pa.Table:
        import pyarrow as pa

        arrays.setdefault("rank", np.full(rows, self.log.rank, dtype=np.int64))
        arrays.setdefault("session", np.full(rows, self.log.session, dtype=np.int64))
        schema = schema_of(columns)
        return pa.table([arrow_of(arrays[column.name], column.type) for column in schema], names=schema.names)

    def _events(self) -> pa.Table:
        events = self.log.events
        known = ("time_ns", "what", "text")
        times = [event["time_ns"] for event in events]
        arrays = {
            "time_ns": times,
            "unix_ns": [self._unix_of(time) for time in times],
            "what": [safe_text(str(event.get("what", ""))) for event in events],
            "text": [safe_text(str(event.get("text", ""))) for event in events],
            "more": [json.dumps({k: v for k, v in event.items() if k not in known}) for event in events],
        }
        return self._table(COLUMNS["events"], arrays, len(events))

    def unread(self, reason: str) -> pa.Table:
        """The table ``logs`` of a log that cannot be read, or not to its end."""
        read, self.log = self.log.intervals, Log(self.log.path, intervals=self.log.intervals)
        if not read:
            self._flush = {}
        return self._facts(fault=reason)

    def _facts(self, fault: str | None = None) -> pa.Table:
        log, header, flush = self.log, self.log.header, self._flush
        is_known = self._first_ns != ENDLESS
        first = self._unix_of(self._first_ns) if is_known else None
        last = self._unix_of(self._last_ns) if is_known else None
        begun = header.get("process_start_unix_ns")
        if header.get("whole_process") and first is not None and last is not None:
            first = first if begun is None or log.segment else min(first, begun)
            last = max(last, self._unix_of(flush.get("time_ns")) or last) if log.end is not None else last
        row = {
            "segment": log.segment,
            "file": safe_text(log.path.replace("\\", "/").rsplit("/", 1)[-1]),
            **{name: header.get(name) for name in ("pid", "world_size", "local_rank")},
            **{name: None if header.get(name) is None else safe_text(header[name]) for name in ("host", "clock")},
            "unix_offset_ns": self._offset_ns,
            "clock_step_ns": self._clock_step_ns,
            "written": flush.get("written", 0),
            "read": log.intervals,
            "dropped": flush.get("dropped", 0),
            "damaged_bytes": sum(damage.length for damage in log.damage),
            "missing_frames": log.missing_frames,
            "unknown_frames": log.unknown,
            "repeated_frames": log.repeated,
            "end": None if log.end is None else safe_text(str(log.end.get("reason"))),
            "first_unix_ns": first,
            "last_unix_ns": last,
            "flushed_unix_ns": self._unix_of(flush.get("time_ns")),
            "clock_end_ns": flush.get("step_ns"),
            "header": json.dumps(header),
            "fault": None if fault is None else safe_text(fault),
        }
        return self._table(COLUMNS["logs"], {name: [value] for name, value in row.items()}, 1)

    def _unix_of(self, time: int | None) -> int | None:
        return None if time is None or self._offset_ns is None else time + self._offset_ns


_NONE_OPEN: Arrays = {name: np.zeros(0, dtype=np.int64) for name in ("start_ns", "region", "thread")}


def _begun(chunk: list[Batch], still_open: Arrays) -> Arrays:
    # The open regions that are not among the rows: one that ended during the flush is in both.
    known = [np.concatenate([batch.arrays[name] for batch in chunk]) for name in _NONE_OPEN]
    near = np.isin(known[0], still_open["start_ns"])  # One or two of many million.
    ended = set(zip(*(values[near].tolist() for values in known), strict=True))
    begun = zip(*(still_open[name].tolist() for name in _NONE_OPEN), strict=True)
    left = np.array([row not in ended for row in begun], dtype=np.bool_)
    return {name: still_open[name][left] for name in _NONE_OPEN}


def _dictionary(numbers: Int64Array, texts: list[str]) -> pa.Array:
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(arrow_of(numbers, pa.int32()), arrow_of(texts, pa.string()))


def safe_text(text: str) -> str:
    """A text that UTF-8 can encode: half a surrogate pair becomes its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def peek(paths: list[str]) -> tuple[int | None, int | None]:
    """Unix time minus the session's clock, from its first anchor, and the time of its first mark."""
    offset: int | None = None
    for path in paths:
        log, wanted = Log(path), {"flushes", "marks"}
        with suppress(OSError, ValueError):  # Said when the log is read.
            for batch in read_log(log, wanted):
                if offset is None:
                    offset = _offset_of(log.header.get("anchor"))
                if batch.table == "marks":
                    return offset, int(batch.arrays["time_ns"].min())
                if offset is None:
                    offset = int(batch.arrays["unix_ns"][0]) - int(batch.arrays["time_ns"][0])
                wanted.discard("flushes")
        if offset is None:
            offset = _offset_of(log.header.get("anchor"))
    return offset, None


def _offset_of(anchor: Any) -> int | None:
    return None if anchor is None else int(anchor["unix_ns"] - anchor["time_ns"])
