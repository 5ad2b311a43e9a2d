"""Reads one log: tables, header and damage."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.names import CPU
from deep500_timing.runs._format import (
    END,
    EVENT,
    FIRST_TABLE,
    HEADER,
    KINDS,
    NAMES,
    NO_STEP,
    SCHEMA,
    TABLES,
    TYPES,
    Column,
    Damage,
    Frame,
    parse_name,
    read_frames,
    unpack,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Arrays = dict[str, NDArray[Any]]


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
    """Empty if it was damaged."""
    rank: int = 0
    session: int = 0
    segment: int = 0
    names: dict[int, str] = field(default_factory=lambda: {0: ""})
    events: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    """The reason of its end; None if the process was killed or is running."""
    tables: dict[str, tuple[int, tuple[Column, ...]]] = field(default_factory=lambda: dict(TABLES))
    damage: list[Damage] = field(default_factory=list)
    unknown: int = 0
    missing_frames: int = 0
    """Missing numbers of frames: the frames in damaged parts."""
    intervals: int = 0

    def text(self, number: int) -> str:
        """The name of a number; the number itself if the name's frame is lost."""
        return self.names.get(number, f"name {number} (lost)")


CHUNK_ROWS = 1 << 17
"""Intervals that are nested together, and rows of a row group: they fit into a processor's cache."""
INTERVALS = ("intervals", "device_intervals")
"""The tables of intervals. Those of a device with a known host interval are in the second."""


class NewerSchemaError(ValueError):
    """A later version wrote the log, and this version would misread it."""


def open_log(path: str) -> Log:
    """A log with rank, session and segment from its name, until the header is read."""
    parsed = parse_name(os.path.basename(path)) or (0, 0, 0)
    return Log(path, rank=parsed[0], session=parsed[1], segment=parsed[2])


def read_log(log: Log, only: tuple[str, ...] = ()) -> Iterator[Batch]:
    """Read a log frame by frame, in bounded memory: all tables, or some. Damaged parts are recorded and skipped."""
    if os.path.getsize(log.path) == 0:
        return
    with open(log.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        expected = 0
        columns_of = {number: (name, columns) for name, (number, columns) in log.tables.items()}
        for frame in read_frames(data):
            if isinstance(frame, Damage):
                log.damage.append(frame)
                continue
            log.missing_frames += max(frame.sequence - expected, 0)
            expected = frame.sequence + 1
            if frame.kind < FIRST_TABLE:
                _take_document(log, frame)
                if frame.kind in (HEADER, KINDS):
                    columns_of = {number: (name, columns) for name, (number, columns) in log.tables.items()}
                continue
            known = columns_of.get(frame.kind)
            if known is None:
                log.unknown += 1
                continue
            if only and known[0] not in only:
                continue
            try:
                arrays = unpack(known[1], frame.rows, frame.payload)
            except ValueError:
                # The frame is whole, but its columns differ from their description.
                log.unknown += 1
                continue
            if known[0] in INTERVALS:
                log.intervals += frame.rows
            yield Batch(known[0], frame.rows, arrays)


def chunk_of(log: Log, batches: list[Batch], still_open: Batch | None) -> tuple[Arrays, Arrays]:
    """Rows of both tables of intervals together, and the open regions that are not among them.

    The columns are those of ``device_intervals`` and ``on_host``.
    """
    names = [column.name for column in TABLES["device_intervals"][1]]
    missing = np.int64(NO_STEP)
    rows = {
        name: np.concatenate([batch.arrays.get(name, np.full(batch.rows, missing)) for batch in batches])
        for name in names
    }
    devices = [number for number in set(rows["device"].tolist()) if log.text(number) != CPU]
    rows["on_host"] = ~np.isin(rows["device"], devices)
    columns = ("start_ns", "region", "thread")
    if still_open is None:
        return rows, {name: np.zeros(0, dtype=np.int64) for name in columns}
    # A region that ended during the flush is in both tables.
    ended = set(zip(*(rows[name].tolist() for name in columns), strict=True)) if still_open.rows else set()
    begun = zip(*(still_open.arrays[name].tolist() for name in columns), strict=True)
    left = np.array([row not in ended for row in begun], dtype=np.bool_)
    return rows, {name: still_open.arrays[name][left] for name in columns}


def _take_document(log: Log, frame: Frame) -> None:
    try:
        value = json.loads(frame.payload)
        if frame.kind == HEADER:
            _take_header(log, value)
        elif frame.kind == NAMES:
            log.names.update({int(number): str(name) for number, name in value})
        elif frame.kind == KINDS:
            log.tables.update(_tables_of(value))
        elif frame.kind == EVENT:
            log.events.append(dict(value))
        elif frame.kind == END:
            log.end = dict(value)
        else:
            log.unknown += 1
    except NewerSchemaError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError):
        log.unknown += 1


def _take_header(log: Log, header: dict[str, Any]) -> None:
    if int(header["schema"]) > SCHEMA:
        raise NewerSchemaError(
            f"Reading {log.path}: it was written by {header.get('written_by')} with schema {header['schema']}, this "
            f"version reads up to {SCHEMA}. Update deep500-timing."
        )
    log.header = header
    log.rank, log.session, log.segment = (int(header[name]) for name in ("rank", "session", "segment"))
    log.tables.update(_tables_of(header["tables"]))


def _tables_of(described: dict[str, Any]) -> dict[str, tuple[int, tuple[Column, ...]]]:
    # The log's description counts, also for known tables: a later version may have added columns.
    found = {}
    for name, table in described.items():
        columns = tuple(Column(str(column), str(kind)) for column, kind in table["columns"])
        if all(column.type in TYPES for column in columns):
            found[str(name)] = (int(table["kind"]), columns)
    return found
