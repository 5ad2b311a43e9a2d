"""A histogram of durations that merges and subtracts exactly, and its packed form."""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing.exceptions import NoTimesError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

HISTOGRAM_ERROR = 0.01
"""Relative error that a quantile from the histogram stays below (its bins are 1/64 of a power of two wide)."""
_WIDTHS = ("<u1", "<u2", "<u4", "<u8")
_COMPRESSED = 0x80
_WORTH_COMPRESSING = 120
"""Bytes from which on compression pays for its own overhead."""


@dataclass(slots=True)
class Histogram:
    """Counts of times in bins 1/64 of a power of two wide, in the manner of HdrHistogram (G. Tene, hdrhistogram.org).

    Merging adds counts, so it is exact, and no order of merging matters.
    """

    counts: Int64Array = field(default_factory=lambda: np.zeros(BIN_COUNT, dtype=np.int64))
    """Shape ``(BIN_COUNT,)``: how many times fell into each bin."""

    @classmethod
    def of(cls, durations_ns: Int64Array) -> Histogram:
        """The histogram of durations in ns, shape ``(n,)``; what is negative counts as 0."""
        counts = np.bincount(bin_of(durations_ns), minlength=BIN_COUNT).astype(np.int64)
        return cls(counts)

    def merge(self, other: Histogram) -> None:
        """Add the counts of ``other``."""
        self.counts = self.counts + other.counts

    def order_statistics(self, ranks: Sequence[int]) -> list[float]:
        """The ``rank``-th smallest durations in ns (from 1), each within 0.8 %: the middles of their bins.

        One cumulative sum serves all ranks.
        """
        found = np.searchsorted(np.cumsum(self.counts), ranks)
        return [_middle_of(int(index)) for index in found]

    def order_statistic(self, rank: int) -> float:
        """The ``rank``-th smallest duration in ns (from 1), within 0.8 %."""
        return self.order_statistics([rank])[0]

    def quantiles(self, shares: Iterable[float]) -> list[float]:
        """The quantiles in ns at these shares (0 to 1), linear between order statistics.

        Raises:
            NoTimesError: The histogram is empty.
        """
        n = int(self.counts.sum())
        if n == 0:
            raise NoTimesError("A quantile of an empty histogram does not exist; record a time first.")
        positions = [share * (n - 1) for share in shares]
        lows = [int(position) for position in positions]
        around = self.order_statistics([rank for low in lows for rank in (low + 1, min(low + 2, n))])
        return [
            first + (position - low) * (second - first)
            for position, low, first, second in zip(positions, lows, around[::2], around[1::2], strict=True)
        ]

    def quantile(self, share: float) -> float:
        """The quantile in ns at one share (0 to 1).

        Raises:
            NoTimesError: The histogram is empty.
        """
        return self.quantiles([share])[0]

    def trimmed_mean_ns(self, trim: float) -> float:
        """The mean in ns of what is left when ``round(n * trim)`` times are cut off at either end, within 1 %.

        Raises:
            NoTimesError: The histogram is empty.
        """
        used = np.flatnonzero(self.counts)
        n = int(self.counts.sum())
        if n == 0:
            raise NoTimesError("The mean of an empty histogram does not exist; record a time first.")
        cut = round(n * trim)
        ends = np.cumsum(self.counts[used])
        starts = ends - self.counts[used]
        left = np.maximum(np.minimum(ends, n - cut) - np.maximum(starts, cut), 0)
        middles = np.array([_middle_of(int(index)) for index in used])
        return float((left * middles).sum() / (n - 2 * cut))

    def pack(self) -> str:
        """As a short text, see :func:`pack`."""
        used = np.flatnonzero(self.counts)
        return pack(used.tolist(), self.counts[used].tolist())

    @classmethod
    def unpack(cls, text: str) -> Histogram:
        """The inverse of :meth:`pack`.

        Raises:
            ValueError: The text is no packed histogram.
        """
        return merged([text])


def merged(texts: Iterable[str]) -> Histogram:
    """The sum of packed histograms, by one scatter-add over all their bins.

    Raises:
        ValueError: A text is no packed histogram.
    """
    bins, counts = [], []
    for text in texts:
        some_bins, some_counts = unpack(text)
        bins.append(some_bins)
        counts.append(some_counts)
    histogram = Histogram()
    if bins:
        np.add.at(histogram.counts, np.concatenate(bins), np.concatenate(counts))
    return histogram


def pack(bins: Sequence[int], counts: Sequence[int]) -> str:
    """Bins that are not empty, ascending, and how many times fell into each, as a short ASCII text.

    The gaps between bins as 16-bit numbers and then the counts, in the narrowest of 8, 16, 32 and 64 bits that holds
    them, all little-endian; compressed by zlib where that is shorter; after one byte that says which. In base64, so
    that JSON can hold it: some 100 characters for a thousand times with a spread of 5 %.
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


@lru_cache(maxsize=BIN_COUNT)
def _pack_single(index: int) -> str:
    return pack((index,), (1,))


def pack_one(duration_ns: int) -> str:
    """The packed histogram of a single duration in ns, 0 or more."""
    return _pack_single(bin_of_one(duration_ns))


def unpack(text: str) -> tuple[Int64Array, Int64Array]:
    """The inverse of :func:`pack`: bins and counts, shapes ``(bins,)``.

    Raises:
        ValueError: The text is no packed histogram.
    """
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
    """The bin of each duration in ns: itself below 128, then 64 bins for each power of two."""
    values = np.maximum(durations_ns, 0)
    # frexp rounds integers beyond 2**53, possibly up to the next power of two.
    length = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    length -= (values >> np.maximum(length - 1, 0)) == 0
    shift = np.maximum(length - 7, 0)
    return np.asarray((shift << 6) + (values >> shift), dtype=np.int64)


def bin_of_one(duration_ns: int) -> int:
    """The bin of one duration in ns, 0 or more."""
    shift = max(duration_ns.bit_length() - 7, 0)
    return (shift << 6) + (duration_ns >> shift)


def bin_bounds(index: int) -> tuple[int, int]:
    """The smallest duration in ns of a bin, and how many nanoseconds it spans."""
    if index < 128:
        return index, 1
    shift = (index >> 6) - 1
    return (index - (shift << 6)) << shift, 1 << shift


def _middle_of(index: int) -> float:
    low, width = bin_bounds(index)
    return low + (width - 1) / 2
