"""Frames: the records of a log, each with its kind, length and checksum.

A frame is a head of 24 bytes and a payload, see ``docs/run-format.md``. The checksum covers both, so that every flipped
bit is detected. The reader continues at the next whole frame. Standard library only.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

MAGIC = b"\xd5RUN"
"""The first byte is not ASCII; the others name the format in a hex dump."""
HEAD = Struct("<4sHHIIII")
"""Magic, kind, flags, sequence, rows, bytes of the payload, CRC-32."""
_CRC_AT = HEAD.size - 4
ZLIB = 1
"""The flag of a compressed payload."""
_CRC_BYTES = 4096
"""Up to this size ``zlib.crc32`` keeps the GIL. Waiting for it may take 5 ms."""
LARGEST_PAYLOAD = 1 << 28
"""A frame that claims more is damaged."""


class Frame(NamedTuple):
    """One whole frame."""

    kind: int
    sequence: int
    """Its number in the file, from 0. A gap shows missing frames."""
    rows: int
    stored: bytes
    """The payload as stored."""
    is_compressed: bool
    offset: int
    """Its position in the file."""

    @property
    def payload(self) -> bytes:
        """The payload, decompressed."""
        try:
            return zlib.decompress(self.stored) if self.is_compressed else self.stored
        except zlib.error as error:
            raise ValueError(f"A frame of kind {self.kind}: {error}") from error


class Damage(NamedTuple):
    """A part of a file without a whole frame."""

    offset: int
    length: int
    at_end: bool
    """Whether it reaches the end of the file: a torn tail or an unfinished write."""


def encode(kind: int, sequence: int, rows: int, payload: bytes) -> bytes:
    """Encode a frame and compress its payload."""
    packed = zlib.compress(payload, 1)
    flags = ZLIB
    if len(packed) >= len(payload):
        packed, flags = payload, 0
    head = HEAD.pack(MAGIC, kind, flags, sequence & 0xFFFFFFFF, rows, len(packed), 0)[:_CRC_AT]
    crc = zlib.crc32(head)
    for first in range(0, len(packed), _CRC_BYTES):
        crc = zlib.crc32(packed[first : first + _CRC_BYTES], crc)
    return b"".join((head, crc.to_bytes(4, "little"), packed))


def read_frames(data: bytes | mmap, start: int = 0) -> Iterator[Frame | Damage]:
    """Every whole frame in order, and the damage between them."""
    position = start
    end = len(data)
    while position < end:
        frame = _frame_at(data, position, end)
        if frame is not None:
            yield frame[0]
            position = frame[1]
            continue
        found = position
        while True:
            found = data.find(MAGIC, found + 1)
            if found < 0:
                yield Damage(position, end - position, True)
                return
            if _frame_at(data, found, end) is not None:
                break
        yield Damage(position, found - position, False)
        position = found


def _frame_at(data: bytes | mmap, position: int, end: int) -> tuple[Frame, int] | None:
    # The frame at a position and the position after it; None without a whole frame.
    body = position + HEAD.size
    if body > end:
        return None
    head = data[position:body]
    magic, kind, flags, sequence, rows, length, crc = HEAD.unpack(head)
    if magic != MAGIC or length > LARGEST_PAYLOAD or body + length > end:
        return None
    stored = data[body : body + length]
    if zlib.crc32(stored, zlib.crc32(head[:_CRC_AT])) != crc:
        return None
    return Frame(kind, sequence, rows, stored, bool(flags & ZLIB), position), body + length
