"""The format of a log: kinds of records, frames with length and checksum, columns of numbers in few bytes, file names.

A frame is complete or absent, so a log that a crash cut off is read up to its last whole frame. See
``docs/run-format.md``.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing.runs._checks import NO_STEP as NO_STEP
from deep500_timing.runs._checks import PAYLOAD_BYTES, ROWS, is_table
from deep500_timing.runs._machine import LEVELS, RATES

if TYPE_CHECKING:
    from mmap import mmap


SUFFIX = ".d5log"
_NAME = re.compile(r"rank-(\d+)(?:\.s(\d+))?(?:\.(\d+))?\.d5log\Z")


def log_name(rank: int, session: int, segment: int) -> str:
    """The name of a log: ``rank-00003.d5log``; ``.s1`` for the first restart; ``.0002`` for the second rotation."""
    again = f".s{session}" if session else ""
    later = f".{segment:04}" if segment else ""
    return f"rank-{rank:05}{again}{later}{SUFFIX}"


def parse_name(name: str) -> tuple[int, int, int] | None:
    """Rank, session and segment from a name; None for other files."""
    match = _NAME.match(name)
    return None if match is None else (int(match[1]), int(match[2] or 0), int(match[3] or 0))


_BASE = Struct("<QB")
_MASK = (1 << 64) - 1


class Column(NamedTuple):
    """A column of a table in a log."""

    name: str
    type: str
    """``int`` (64 bits, signed), ``time`` (the same, stored as differences), ``float`` (64 bits; NaN is missing) or
    ``name`` (the number of a text in the log's list of names; 0 is none)."""


TYPES = ("int", "time", "float", "name")


def pack(columns: Sequence[Column], arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """Columns of equal length as bytes."""
    parts = []
    for column in columns:
        values = np.ascontiguousarray(arrays[column.name], dtype=np.float64 if column.type == "float" else np.int64)
        bits = values.view(np.uint64)
        if column.type == "time":
            differences = np.empty_like(bits)
            differences[:1] = bits[:1]
            np.subtract(bits[1:], bits[:-1], out=differences[1:])
            # The first one is no difference: as the base, it widens none of the others.
            parts.append(int(differences[0]).to_bytes(8, "little"))
            bits = differences[1:]
        parts.append(_planes(bits))
    return b"".join(parts)


def _planes(bits: NDArray[np.uint64]) -> bytes:
    if not len(bits):
        return _BASE.pack(0, 0)
    # As signed numbers: the distances of small negative ones from small positive ones are small.
    low = int(bits.view(np.int64).min())
    distances = bits - np.uint64(low & _MASK)
    width = (int(distances.max()).bit_length() + 7) // 8
    planes = distances.view(np.uint8).reshape(-1, 8)[:, :width].T
    return _BASE.pack(low & _MASK, width) + planes.tobytes()


def unpack(
    columns: Sequence[Column], rows: int, payload: bytes, spans: dict[str, tuple[int, int]] | None = None
) -> dict[str, NDArray[np.generic]]:
    """The inverse of :func:`pack`; ``spans`` takes bounds of each column's values, as its number of bytes tells."""
    arrays: dict[str, NDArray[np.generic]] = {}
    position = 0
    for column in columns:
        timed = column.type == "time"
        try:
            if timed:
                first = int.from_bytes(payload[position : position + 8], "little")
                position += 8
            count = rows - 1 if timed else rows
            base, width = _BASE.unpack_from(payload, position)
        except Exception as error:
            raise ValueError(f"The column {column.name!r} is cut short.") from error
        position += _BASE.size
        end = position + width * count
        if width > 8 or count < 0 or end > len(payload):
            raise ValueError(f"The column {column.name!r} does not hold {rows} rows.")
        bits = np.zeros(count, dtype=np.uint64)
        if width:
            planes = np.frombuffer(payload, np.uint8, width * count, position).reshape(width, count)
            bits.view(np.uint8).reshape(count, 8)[:, :width] = planes.T
        bits += np.uint64(base)
        low = base - (base >> 63 << 64)
        high = low + (1 << 8 * width) - 1
        if timed:
            start = first - (first >> 63 << 64)
            low, high = start + min(low * count, 0), start + max(high * count, 0)
            whole = np.empty(rows, dtype=np.uint64)
            whole[0] = first
            np.cumsum(bits, out=whole[1:])
            whole[1:] += np.uint64(first)
            bits = whole
        position = end
        if spans is not None:
            spans[column.name] = low, high
        arrays[column.name] = bits.view(np.float64 if column.type == "float" else np.int64)
    if position != len(payload):
        raise ValueError(f"{len(payload) - position} bytes follow the last column.")
    return arrays


MAGIC = b"\xd5RUN"
"""The first byte is not ASCII; the others name the format in a hex dump."""
HEAD = Struct("<4sHHIIII")
"""Magic, kind, flags, sequence, rows, bytes of the payload, CRC-32."""
_CRC_AT = HEAD.size - 4
ZLIB = 1
_CRC_BYTES = 4096
"""Up to this size ``zlib.crc32`` keeps the GIL. Waiting for it may take 5 ms."""


class Frame(NamedTuple):
    """One whole frame."""

    kind: int
    sequence: int
    """Its number in the file, from 0. A gap shows missing frames."""
    rows: int
    stored: bytes
    is_compressed: bool
    offset: int
    crc: int

    @property
    def end(self) -> int:
        """The offset of what follows it."""
        return self.offset + HEAD.size + len(self.stored)

    @property
    def payload(self) -> bytes:
        """Its content.

        Raises:
            ValueError: It cannot be decompressed, or is larger than a writer makes it.
        """
        if not self.is_compressed:
            return self.stored
        inflater = zlib.decompressobj()
        try:
            found = inflater.decompress(self.stored, PAYLOAD_BYTES)
        except zlib.error as error:
            raise ValueError(f"A frame of kind {self.kind}: {error}") from error
        if not inflater.eof:
            raise ValueError(f"A frame of kind {self.kind} is cut short, or has more than {PAYLOAD_BYTES} bytes.")
        return found


class Damage(NamedTuple):
    """A part of a file without a whole frame."""

    offset: int
    length: int


def encode(kind: int, sequence: int, rows: int, payload: bytes) -> bytes:
    packed = zlib.compress(payload, 1)
    flags = ZLIB
    if len(packed) >= len(payload):
        packed, flags = payload, 0
    head = HEAD.pack(MAGIC, kind, flags, sequence & 0xFFFFFFFF, rows, len(packed), 0)[:_CRC_AT]
    crc = zlib.crc32(head)
    for first in range(0, len(packed), _CRC_BYTES):
        crc = zlib.crc32(packed[first : first + _CRC_BYTES], crc)
    return b"".join((head, crc.to_bytes(4, "little"), packed))


def read_frames(data: bytes | mmap) -> Iterator[Frame | Damage]:
    """Every whole frame in order, and the damage between them."""
    position, size = 0, len(data)
    while position < size:
        frame = _frame_at(data, position)
        found = position
        while frame is None:
            found = data.find(MAGIC, found + 1)
            if found < 0:
                yield Damage(position, size - position)
                return
            frame = _frame_at(data, found)
        if found > position:
            yield Damage(position, found - position)
        yield frame
        position = frame.end


def _frame_at(data: bytes | mmap, position: int) -> Frame | None:
    body = position + HEAD.size
    if body > len(data):
        return None
    head = data[position:body]
    magic, kind, flags, sequence, rows, length, crc = HEAD.unpack(head)
    if magic != MAGIC or length > PAYLOAD_BYTES or body + length > len(data):
        return None
    stored = data[body : body + length]
    if zlib.crc32(stored, zlib.crc32(head[:_CRC_AT])) != crc:
        return None
    return Frame(kind, sequence, rows, stored, bool(flags & ZLIB), position, crc)


SCHEMA = 1
"""Version of the schema. It rises when older readers would misread; new kinds and attributes do not raise it."""

HEADER = 0
NAMES = 1
KINDS = 2
EVENT = 3
END = 4
"""Kinds below 16 are JSON."""
FIRST_TABLE = 16
FIRST_OWN = 64
"""The first number of tables that a log declares by a record of the kind ``KINDS``."""

CUT = "cut by --steps"
IN_ORDER = ("closed", "exit", "rotated", CUT)
"""Reasons in a record of the kind ``END`` that need no mention: the program went on, or ended without an error."""


def typed(*columns: str) -> dict[str, str]:
    """Columns with their types, from texts such as ``"int: thread step"``."""
    return {name: kind for kind, _, names in (text.partition(": ") for text in columns) for name in names.split()}


class Table(NamedTuple):
    """A table of a log."""

    kind: int
    """The number of its frames."""
    columns: tuple[Column, ...]


def _table(kind: int, *columns: str) -> Table:
    return Table(kind, tuple(Column(*column) for column in typed(*columns).items()))


_OF_AN_INTERVAL = ("time: start_ns", "int: dur_ns step", "name: region", "int: thread", "name: device")
TABLES = {
    "intervals": _table(16, *_OF_AN_INTERVAL),
    "open": _table(17, "time: start_ns", "name: region", "int: thread"),
    "marks": _table(18, "time: time_ns", "int: step"),
    "flushes": _table(19, "int: time_ns unix_ns width_ns written dropped batches"),
    "counters": _table(
        20, "name: region", "int: thread", "name: device", "int: recorded failed discarded captured dropped"
    ),
    "collectives": _table(21, "time: start_ns", "int: dur_ns", "name: op group", "int: sequence bytes"),
    "samples": _table(22, "time: time_ns", "name: metric", "float: value", "name: region"),
    "threads": _table(24, "int: thread", "name: name"),
    "device_intervals": _table(25, *_OF_AN_INTERVAL, "time: host_start_ns"),
    "milestones": _table(26, "time: time_ns", "name: what", "int: step dur_ns"),
    "stacks": _table(27, "time: time_ns", "name: stack"),
    "processor": _table(28, "time: time_ns", "int: thread", "time: ran_ns waited_ns"),
    "labels": _table(30, "time: time_ns", "int: step label"),
    "machine": _table(29, "time: time_ns", f"float: {' '.join((*RATES, *LEVELS))}"),
}
"""The tables that every reader knows."""
NOT_READ = ("open", "flushes", "device_intervals")
"""Tables that a reader merges into others."""


def described(tables: Mapping[str, Table]) -> dict[str, Any]:
    """Tables as in a log's header."""
    return {
        name: {"kind": table.kind, "columns": [list(column) for column in table.columns]}
        for name, table in tables.items()
    }


def declare(tables: dict[str, Table], description: Mapping[str, Any]) -> bool:
    """Add tables from the inverse of :func:`described`, and return whether all of them may be there.

    Tables that have columns of unknown types are left out.
    """
    is_whole = True
    for name, table in description.items():
        columns = tuple(Column(str(column), str(kind)) for column, kind in table["columns"])
        if not is_table(name, table["kind"], columns, tables, FIRST_OWN):
            is_whole = False
        elif all(column.type in TYPES for column in columns):
            tables[name] = Table(table["kind"], columns)
    return is_whole


def to_json(value: object) -> bytes:
    """JSON in ASCII, so that no text looks like the start of a frame."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False, default=str).encode("ascii")


_NAMES_AT_ONCE = 256
"""Names in a frame: a stack sample has up to some 20 kB."""


class Encoder:
    """Makes the frames of one file. Names and tables are described once, before the first frame that uses them."""

    def __init__(self, tables: Mapping[str, Table] = TABLES) -> None:
        self.sequence = 0
        self.threads = 0
        """Threads that the file names."""
        self.counters: dict[tuple[str, int, str], tuple[int, ...]] = {}
        """The newest counters in the file."""
        self._tables = tables
        self._described = len(TABLES)
        self._ids: dict[str, int] = {"": 0}
        self._named = 1

    def id_of(self, name: str) -> int:
        return self._ids.setdefault(name, len(self._ids))

    def document(self, kind: int, value: object) -> bytes:
        return self._frame(kind, 1, to_json(value))

    def rows(self, table: str, arrays: Mapping[str, NDArray[np.generic]]) -> Iterable[bytes]:
        """The frames of a table's rows, with those of names that are new before them."""
        kind, columns = self._tables[table]
        count = len(arrays[columns[0].name])
        for first in range(0, count, ROWS):
            part = {name: values[first : first + ROWS] for name, values in arrays.items()}
            if self._described < len(self._tables):
                self._described = len(self._tables)
                yield self.document(KINDS, described(dict(list(self._tables.items())[len(TABLES) :])))
            if self._named < len(self._ids):
                new = list(enumerate(self._ids))[self._named :]
                self._named = len(self._ids)
                for at in range(0, len(new), _NAMES_AT_ONCE):
                    some = new[at : at + _NAMES_AT_ONCE]
                    yield self._frame(NAMES, len(some), to_json(some))
            yield self._frame(kind, min(count - first, ROWS), pack(columns, part))

    def tuples(self, table: str, rows: Sequence[Sequence[Any]]) -> Iterable[bytes]:
        """As :meth:`rows`, from tuples in the order of the columns; names as texts."""
        if not rows:
            return ()
        arrays: dict[str, NDArray[np.generic]] = {}
        for place, column in enumerate(self._tables[table].columns):
            values = [row[place] for row in rows]
            if column.type == "name":
                values = [self.id_of(value) for value in values]
            arrays[column.name] = np.array(values, dtype=np.float64 if column.type == "float" else np.int64)
        return self.rows(table, arrays)

    def _frame(self, kind: int, rows: int, payload: bytes) -> bytes:
        frame = encode(kind, self.sequence, rows, payload)
        self.sequence += 1
        return frame
