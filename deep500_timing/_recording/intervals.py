"""What is kept of the intervals of a region: every one, or the last N and aggregates of the rest.

This file runs as plain Python and, with the C types of ``intervals.pxd``, compiled. What differs between the two
forms stands under ``cython.compiled``.
"""

from __future__ import annotations

from array import array
from struct import Struct
from time import sleep

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import cython
else:
    from deep500_timing._ground import cython_stub as cython

if not cython.compiled:
    bit_length = int.bit_length

    def new_block(template: array[int], length: int) -> array[int]:
        """An array of that length; compiled, it is not set to zero."""
        return template * length


_BLOCK = 1024
"""Intervals in a block: large enough to weigh 16 bytes each, small enough that a new one costs about 1 µs."""
_FOLDED_BLOCK = 128
"""The same where blocks are folded, so that one fold costs about a microsecond compiled."""
_STAGED = 64
"""Intervals that plain Python collects in a list before it packs them."""
_STAGED_FOLDED = 16
_ZERO = array("q", [0])
_INT64 = "n" if Struct("n").size == 8 else "q"  # Python packs the same 8 bytes three times as fast as an `n`.
_PACK = {limit: Struct(f"{limit}{_INT64}").pack for limit in (2 * _STAGED, 2 * _STAGED_FOLDED)}
"""What packs a list of so many integers."""
BIN_COUNT = 3712
"""Bins of the histogram: one for each of 0..127 ns, then 64 for each power of two up to 2**63 ns."""


class Intervals:
    """The finished intervals of one region on one thread or device.

    ``keep_last`` bounds how many are kept one by one (-1: all). The rest lives on in aggregates: count, total,
    extremes, mean and sum of squared deviations (Welford, Technometrics 4(3), 1962), and a histogram in the manner
    of HdrHistogram, whose bins are 1/64 of a power of two wide: the middle of a bin is within 0.8 % of whatever
    fell into it. The first ``skip_first`` intervals take no part in aggregates or statistics.
    """

    __slots__ = (
        "bins",
        "block",
        "blocks",
        "buffer",
        "captured",
        "discarded",
        "failed",
        "folded",
        "index",
        "keep_last",
        "kept_in_blocks",
        "limit",
        "m2",
        "max_ns",
        "mean_ns",
        "min_ns",
        "skip_first",
        "total_ns",
        "version",
    )

    def __init__(self, keep_last: int, skip_first: int) -> None:
        """Start empty."""
        self.keep_last = keep_last
        self.skip_first = skip_first
        self.blocks: list[array[int]] = []
        self.kept_in_blocks = 0
        self.version = 0
        self.folded = 0
        self.total_ns = 0
        self.min_ns = 0
        self.max_ns = 0
        self.mean_ns = 0.0
        self.m2 = 0.0
        self.failed = 0
        self.discarded = 0
        self.captured = 0
        self.index = 0
        self.limit = 0
        self._new_buffer()

    def put(self, start_ns: int, end_ns: int) -> None:
        """Keep one interval."""
        index = self.index
        self.buffer[index] = start_ns
        self.buffer[index + 1] = end_ns
        index += 2
        self.index = index
        if index == self.limit:
            self.seal()

    def append(self, start_ns: int, end_ns: int) -> None:
        """Keep one interval (``put`` for callers outside this file)."""
        self.put(start_ns, end_ns)

    def _new_buffer(self) -> None:
        if cython.compiled:
            self.limit = 2 * (_BLOCK if self.keep_last < 0 else _FOLDED_BLOCK)
            self.block = new_block(_ZERO, self.limit)
            self.buffer: Any = self.block
        else:
            # A list takes what the clock returned as it is, three times as fast as an array does.
            self.limit = 2 * (_STAGED if self.keep_last < 0 else _STAGED_FOLDED)
            self.buffer = [0] * self.limit
        self.index = 0

    def seal(self) -> None:
        """Put the full buffer among the blocks, and fold what is older than ``keep_last`` wants."""
        # Readers on other threads retry while the version is odd or has changed.
        self.version += 1
        if cython.compiled:
            self.blocks.append(self.block)
            self._new_buffer()
        else:
            capacity = 2 * (_BLOCK if self.keep_last < 0 else self.limit // 2)
            if not self.blocks or len(self.blocks[-1]) >= capacity:
                self.blocks.append(array("q"))
            self.blocks[-1].frombytes(_PACK[self.limit](*self.buffer))
            if len(self.blocks[-1]) >= capacity:
                self.blocks[-1] = self.blocks[-1][:]  # Without the room to grow, a sixteenth of it.
            self.index = 0
        self.kept_in_blocks += self.limit // 2
        if self.keep_last >= 0:
            while self.kept_in_blocks >= self.keep_last + self.limit // 2:
                oldest = self.blocks.pop(0)
                self.kept_in_blocks -= len(oldest) // 2
                self._fold(oldest)
        self.version += 1

    def _fold(self, block: array[int]) -> None:
        if not self.folded:
            self.bins = array("q", bytes(8 * BIN_COUNT))
        for i in range(0, len(block), 2):
            duration = block[i + 1] - block[i]
            self.folded += 1
            seen = self.folded - self.skip_first
            if seen <= 0:
                continue
            if duration < 0:  # a clock of the user's own may run backwards
                duration = 0
            self.total_ns += duration
            if seen == 1 or duration < self.min_ns:
                self.min_ns = duration
            if duration > self.max_ns:
                self.max_ns = duration
            delta = duration - self.mean_ns
            self.mean_ns += delta / seen
            self.m2 += delta * (duration - self.mean_ns)
            if duration < 128:
                slot = duration
            else:
                shift = bit_length(duration) - 7
                slot = (shift << 6) + (duration >> shift)
            self.bins[slot] += 1

    def copy(self) -> dict[str, Any]:
        """A consistent copy, taken from any thread while the owner goes on recording.

        Returns:
            ``pairs``: list of arrays of int64, start and end in ns alternating, oldest first, of the intervals that
            are kept; the other entries are the aggregates over those that are not (``bins`` is None if there are
            none), and the counters.
        """
        # A signal handler may call this in the middle of a seal on its own thread, which will never finish while
        # it is waited for: after some tries take what is there.
        for attempt in range(200):
            version = self.version
            if version & 1 and attempt < 199:
                sleep(0)
                continue
            index = self.index
            blocks = list(self.blocks)
            if cython.compiled:
                tail = self.block[:index]
            else:
                tail = array("q", self.buffer[:index])
                # The last block still grows, which it could not while somebody else holds its memory.
                blocks[-1:] = [block[:] for block in blocks[-1:]]
            copied = {
                "pairs": [*blocks, tail],
                "folded": self.folded,
                "total_ns": self.total_ns,
                "min_ns": self.min_ns,
                "max_ns": self.max_ns,
                "mean_ns": self.mean_ns,
                "m2": self.m2,
                "bins": array("q", self.bins) if self.folded else None,
                "failed": self.failed,
                "discarded": self.discarded,
                "captured": self.captured,
                "keep_last": self.keep_last,
                "skip_first": self.skip_first,
            }
            if self.version == version:
                break
        return copied

    @property
    def count(self) -> int:
        """Intervals recorded so far, kept or folded."""
        recorded: int = self.folded + self.kept_in_blocks + self.index // 2
        return recorded
