"""Encodes rows as frames of one log file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing.runs._columns import TYPES, Column, pack
from deep500_timing.runs._frames import encode
from deep500_timing.runs._header import to_json
from deep500_timing.runs._kinds import FIRST_OWN, KINDS, NAMES, TABLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray


BLOCK_ROWS = 1 << 15
"""Most rows in a frame, and so the most that one flipped bit destroys. Smaller frames would take the GIL more often."""


class Encoder:
    """Makes the frames of one file. Names are written once, before the first frame that uses them."""

    def __init__(self) -> None:
        """Begin a file."""
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
        """The number of a text."""
        number = self._ids.get(name)
        if number is None:
            number = self._ids[name] = len(self._names)
            self._names.append(name)
        return number

    def declare(self, table: str, columns: Mapping[str, str]) -> None:
        """Declare an additional table, once."""
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
        """The columns of a table, None if there is none of that name."""
        found = TABLES.get(table) or self.own_tables.get(table)
        return None if found is None else found[1]

    def document(self, kind: int, value: object) -> bytes:
        """A frame of JSON."""
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
