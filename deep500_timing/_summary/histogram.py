"""Bins of durations, 1/64 of a power of two wide, and their packed form.

The bins follow HdrHistogram (G. Tene, hdrhistogram.org). Counts of bins merge and subtract exactly.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

HISTOGRAM_ERROR = 0.01
"""Upper bound of the relative error of a quantile that is read from bins."""
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
_COMPRESSED = 0x80
_WORTH_COMPRESSING = 120
"""Shortest input in bytes that zlib can make shorter."""


def pack(bins: Sequence[int], counts: Sequence[int]) -> str:
    """Encode the bins that are not empty as ASCII text.

    One byte gives the width of a count and whether zlib was used. The gaps between bins follow as 16-bit numbers, then
    the counts in the narrowest of 8, 16, 32 and 64 bits, all little-endian. The result is base64, so that JSON can
    hold it: about 100 characters for 1 000 times with a spread of 5 %.
    """
    width = max((max(counts, default=0).bit_length() + 7) // 8, 1)
    code = (width - 1).bit_length()
    gaps = [index - before for before, index in zip((0, *bins), bins, strict=False)]
    raw = struct.pack(f"<{len(bins)}H{len(bins)}{'BHIQ'[code]}", *gaps, *counts)
    if len(raw) >= _WORTH_COMPRESSING:
        smaller = zlib.compress(raw)
        if len(smaller) < len(raw):
            raw, code = smaller, code | _COMPRESSED
    return b64encode(bytes((code,)) + raw).decode("ascii")


def unpack(text: str) -> tuple[Int64Array, Int64Array]:
    """The inverse of :func:`pack`: bins and counts, shapes ``(bins,)``."""
    try:
        raw = b64decode(text, validate=True)
        code, raw = raw[0], raw[1:]
        if code & _COMPRESSED:
            raw = zlib.decompress(raw)
        width = _WIDTHS[code & ~_COMPRESSED]
        number, rest = divmod(len(raw), 2 + int(width[-1]))
        bins = np.cumsum(np.frombuffer(raw, dtype="<u2", count=number), dtype=np.int64)
        counts = np.frombuffer(raw, dtype=width, offset=2 * number).astype(np.int64)
        if rest or (number and not 0 <= bins[-1] < BIN_COUNT):
            raise ValueError("it is cut off, or of another kind")
    except (ValueError, IndexError, zlib.error) as error:
        raise ValueError(f"Reading a packed histogram from {text[:40]!r}: {error}.") from error
    return bins, counts


def bin_of(durations_ns: Int64Array) -> Int64Array:
    """The bin of each duration in ns: one for each of 0 to 127 ns, then 64 for each power of two."""
    values = np.maximum(durations_ns, 0)
    # frexp rounds integers above 2**53, possibly up to the next power of two.
    length = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    length -= (values >> np.maximum(length - 1, 0)) == 0
    shift = np.maximum(length - 7, 0)
    return np.asarray((shift << 6) + (values >> shift), dtype=np.int64)


def bin_bounds(index: int) -> tuple[int, int]:
    """The smallest duration of a bin and the bin's width, both in ns."""
    if index < 128:
        return index, 1
    shift = (index >> 6) - 1
    return (index - (shift << 6)) << shift, 1 << shift


def middle_of(index: int) -> float:
    """The middle of a bin, in ns."""
    low, width = bin_bounds(index)
    return low + (width - 1) / 2
