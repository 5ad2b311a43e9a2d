"""Writes the frames of a rank to one file after another."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._base.warn import warn_once
from deep500_timing.runs._format import (
    FIRST_OWN,
    KINDS,
    NAMES,
    TABLES,
    TYPES,
    Column,
    LogFile,
    encode,
    name_of,
    pack,
    segments_of,
)
from deep500_timing.runs._header import to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray


BLOCK_ROWS = 1 << 15
"""Most rows in a frame, and so the most that one flipped bit destroys. Smaller frames would take the GIL more often."""


class Encoder:
    """Makes the frames of one file. Names are written once, before the first frame that uses them."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"": 0}
        self._names: list[str] = [""]
        self._named = 1
        self._sequence = 0
        self.own_tables: dict[str, tuple[int, tuple[Column, ...]]] = {}
        self._described = 0

    def restart(self) -> None:
        """Begin the next file and write every name again."""
        self._sequence = 0
        self._named = 1
        self._described = 0

    def id_of(self, name: str) -> int:
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = len(self._names)
            self._names.append(name)
        return number

    def declare(self, table: str, columns: Mapping[str, str]) -> None:
        wanted = tuple(Column(name, kind) for name, kind in columns.items())
        unknown = sorted({column.type for column in wanted} - set(TYPES))
        if not table.isidentifier() or unknown or not wanted:
            raise ValueError(
                f"Declaring the table {table!r} with {dict(columns)}: a table has an identifier for its name, and "
                f"columns of the types {', '.join(TYPES)}."
            )
        known = self.columns_of(table)
        if known is None:
            self.own_tables[table] = (FIRST_OWN + len(self.own_tables), wanted)
        elif known != wanted:
            raise ValueError(f"Declaring the table {table!r}: it is there with the columns {known}.")

    def columns_of(self, table: str) -> tuple[Column, ...] | None:
        found = TABLES.get(table) or self.own_tables.get(table)
        return None if found is None else found[1]

    def document(self, kind: int, value: object) -> bytes:
        return self._frame(kind, 1, to_json(value))

    def rows(self, table: str, arrays: Mapping[str, NDArray[np.generic]]) -> Iterable[bytes]:
        """The frames of a table's rows, with those of names that are new before them."""
        number, columns = TABLES.get(table) or self.own_tables[table]
        count = len(next(iter(arrays.values())))
        for first in range(0, count, BLOCK_ROWS):
            part = {name: values[first : first + BLOCK_ROWS] for name, values in arrays.items()}
            payload = pack(columns, part)
            yield from self._new_names()
            yield self._frame(number, min(count - first, BLOCK_ROWS), payload)

    def tuples(self, table: str, rows: Sequence[Sequence[Any]]) -> Iterable[bytes]:
        """As :meth:`rows`, from tuples in the order of the columns; names as texts."""
        if not rows:
            return
        columns = self.columns_of(table)
        assert columns is not None
        arrays: dict[str, NDArray[np.generic]] = {}
        for place, column in enumerate(columns):
            values = [row[place] for row in rows]
            if column.type == "name":
                values = [self.id_of(value) for value in values]
            arrays[column.name] = np.array(values, dtype=np.float64 if column.type == "float" else np.int64)
        yield from self.rows(table, arrays)

    def _new_names(self) -> Iterable[bytes]:
        if self._described < len(self.own_tables):
            self._described = len(self.own_tables)
            described = {
                name: {"kind": number, "columns": [list(column) for column in columns]}
                for name, (number, columns) in self.own_tables.items()
            }
            yield self._frame(KINDS, 1, to_json(described))
        if self._named < len(self._names):
            new = list(enumerate(self._names))[self._named :]
            self._named = len(self._names)
            yield self._frame(NAMES, len(new), to_json(new))

    def _frame(self, kind: int, rows: int, payload: bytes) -> bytes:
        sequence = self._sequence
        self._sequence += 1
        return encode(kind, sequence, rows, payload)


_MOST_FAULTS = 100


class Writer:
    """The files of one session of one rank.

    One flush that could not be written waits for the next try. Later intervals stay in the timers until then, so that a
    disk that is full for a minute loses nothing.
    """

    def __init__(self, folder: str, rotate_bytes: int) -> None:
        self.folder = folder
        self.session = 0
        self.segment = 0
        self.sealed: list[tuple[str, int]] = []
        """Complete files of this session with their sizes in bytes, oldest first."""
        self.needs_header = True
        self._rank = 0
        self._begun = False
        self._rotate_bytes = rotate_bytes
        self._file: LogFile | None = None
        self._waiting: list[bytes] = []
        self._faults: list[str] = []

    def begin(self, rank: int) -> list[str]:
        self._rank = rank
        before = segments_of(self.folder, rank)
        if before:
            self.session = before[-1][0] + 1
        return [path for session, _, path in before if session == self.session - 1]

    def prepare(self) -> bool:
        """Whether a flush can be written: the file is open and the waiting flush is written."""
        if self._file is not None and self._file.is_gone:
            self._fault(f"{self._file.path} was deleted; the run goes on in a new file")
            self._file.close()
            self._file = None
            self._waiting.clear()
            self.segment += 1
            self.needs_header = True
        if self._file is None and not self._open():
            return False
        return self._write_waiting()

    def write(self, data: bytes) -> bool:
        """Write a flush; if that fails, keep it for the next :meth:`prepare`."""
        self.needs_header = False
        self._waiting.append(data)
        return self._write_waiting()

    def rotate_if_full(self, end: Callable[[], bytes]) -> bool:
        """Begin the next file if this one is full; ``end`` makes its last frame."""
        file = self._file
        if file is None or self._waiting or file.size < self._rotate_bytes:
            return False
        self.segment += 1
        self._file = None
        if not self._open():
            self.segment -= 1
            self._file = file
            return False
        try:
            file.append(end())
        except OSError as error:
            self._fault(f"ending {file.path}: {error}")
        self.sealed.append((file.path, file.size))
        file.close()
        self.needs_header = True
        return True

    def keep_within(self, keep_bytes: int) -> Iterable[str]:
        """Remove the oldest complete files until the others fit; yields their names."""
        while self.sealed and sum(size for _, size in self.sealed) > keep_bytes:
            path, _ = self.sealed[0]
            with suppress(FileNotFoundError):
                os.unlink(path)
            self.sealed.pop(0)
            yield os.path.basename(path)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def take_faults(self) -> list[str]:
        faults, self._faults = self._faults, []
        return faults

    def _name(self) -> str:
        return name_of(self._rank, self.session, self.segment)

    def _open(self) -> bool:
        try:
            os.makedirs(self.folder, exist_ok=True)
            while True:
                path = os.path.join(self.folder, self._name())
                try:
                    self._file = LogFile(path)
                    self._begun = True
                    return True
                except FileExistsError:
                    # Another process of the same rank was faster.
                    if self._begun:
                        self.segment += 1
                    else:
                        self.session += 1
        except OSError as error:
            self._fault(f"making a log in {self.folder}: {error}")
            return False

    def _write_waiting(self) -> bool:
        assert self._file is not None
        try:
            while self._waiting:
                self._file.append(self._waiting[0])
                self._waiting.pop(0)
        except OSError as error:
            self._fault(f"writing to {self._file.path}: {error}")
            return False
        return True

    def _fault(self, text: str) -> None:
        if len(self._faults) < _MOST_FAULTS:
            self._faults.append(text)
        warn_once(
            f"The log of the run has a fault: {text}. Recorded times wait in memory; the training goes on.",
            key=f"run log {self.folder}",
        )
