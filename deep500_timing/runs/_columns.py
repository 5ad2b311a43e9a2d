"""Columns of numbers in few bytes.

A column is its smallest value and the distances from it. The distances are stored in planes: the lowest byte of every
row, then the next, up to the highest byte that is used. Rising times are stored as differences. That leaves a third of
the bytes, and zlib compresses most of those.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

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


def unpack(columns: Sequence[Column], rows: int, payload: bytes) -> dict[str, NDArray[np.generic]]:
    """The inverse of :func:`pack`."""
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
        bits = np.full(count, base, dtype=np.uint64)
        planes = np.frombuffer(payload, np.uint8, width * count, position).reshape(width, count)
        for place in range(width):
            bits += planes[place].astype(np.uint64) << np.uint64(8 * place)
        if timed:
            whole = np.empty(rows, dtype=np.uint64)
            whole[0] = first
            np.cumsum(bits, out=whole[1:])
            whole[1:] += np.uint64(first)
            bits = whole
        position = end
        arrays[column.name] = bits.view(np.float64 if column.type == "float" else np.int64)
    if position != len(payload):
        raise ValueError(f"{len(payload) - position} bytes follow the last column.")
    return arrays
