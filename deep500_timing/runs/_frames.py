"""Frames: what a log is made of. Each says what it is, how long it is, and whether it is whole.

A frame is a head of 24 bytes and a payload, see ``docs/run-format.md``. The checksum covers both, so that a flipped bit
anywhere in a frame is noticed; and a reader that meets one goes on at the next whole frame. Standard library only.
"""

from __future__ import annotations

import zlib
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from mmap import mmap

MAGIC = b"\xd5RUN"
"""The first byte stands in no UTF-8 text of ASCII, the others name the format in a hex dump."""
HEAD = Struct("<4sHHIIII")
"""Magic, kind, flags, sequence, rows, bytes of the payload, CRC-32."""
_CRC_AT = HEAD.size - 4
ZLIB = 1
"""The flag of a payload that is compressed."""
_CRC_BYTES = 4096
"""Of so few, zlib takes the checksum without letting go of the interpreter's lock, which a loop may hold for 5 ms."""
LARGEST_PAYLOAD = 1 << 28
"""No frame holds more: a longer one is damaged."""


class Frame(NamedTuple):
    """One whole frame."""

    kind: int
    sequence: int
    """Its number in the file, from 0: a gap tells how many are missing."""
    rows: int
    stored: bytes
    """The payload as it lies in the file."""
    is_compressed: bool
    offset: int
    """Where it begins in the file."""

    @property
    def payload(self) -> bytes:
        """The payload, not compressed any more.

        Raises:
            ValueError: It cannot be decompressed, though it is as it was written.
        """
        try:
            return zlib.decompress(self.stored) if self.is_compressed else self.stored
        except zlib.error as error:
            raise ValueError(f"A frame of kind {self.kind}: {error}") from error


class Damage(NamedTuple):
    """A stretch of a file that holds no whole frame."""

    offset: int
    length: int
    at_end: bool
    """Whether it reaches to the end of the file: a torn tail, or a write that is under way."""


def encode(kind: int, sequence: int, rows: int, payload: bytes) -> bytes:
    """A frame as bytes, its payload compressed."""
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
    """Every whole frame in order, and what lies between them.

    Args:
        data: The bytes of a log.
        start: Where to begin.
    """
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
    # The frame that begins at a position, and where the next one does; None if there is no whole one.
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
