"""The kept intervals of a region: all of them, or the last N and aggregates of the others.

This module runs as plain Python and, with the C types of ``intervals.pxd``, compiled. Differences between the two forms
are under ``cython.compiled``.

A reader on another thread finds a consistent state at any moment. Compiled, an interval is written and a full block put
away without a call into Python and without an allocation that the garbage collector tracks, so nothing can run in
between. Plain, everything but the newest intervals is an immutable tuple, replaced by one assignment.
"""

from __future__ import annotations

from array import array
from itertools import chain
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import cython
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    bit_length = int.bit_length
    add_to_total = copied_block = copy_last = ints_in = ints_of = keep = new_block = total_of = zeroed_block = in_c

_FIRST_BLOCK = 64
"""Intervals in a region's first block. Each later block is four times as long, up to ``_BLOCK``."""
_BLOCK = 1024
"""Large enough for 16 bytes an interval, small enough that allocating one costs about 1 µs."""
_AGGREGATED_BLOCK = 128
"""Intervals in a block that will be aggregated, which takes about 1 µs compiled."""
_STAGED = 128
"""Intervals that plain Python collects in a list before it packs them."""
_STAGED_AGGREGATED = 32
_INT64 = "n" if Struct("n").size == 8 else "q"  # Python packs the same 8 bytes three times as fast as an `n`.
_PACK = {2 * length: Struct(f"{2 * length}{_INT64}").pack for length in (_STAGED, _STAGED_AGGREGATED)}
_PARTS = 8
"""Packed lists in a block."""
BIN_COUNT = 3712
"""Bins of the histogram: one for each of 0..127 ns, then 64 for each power of two up to 2**63 ns."""
LOG_BOUND = 1 << 19
"""Intervals beyond ``keep_last`` that wait for a log at most (8 MiB); see :meth:`Intervals.since`."""


class Aggregates:
    """Exact moments and a histogram of intervals that are not kept one by one.

    Mean and sum of squared deviations after Welford, Technometrics 4(3), 1962. The histogram follows HdrHistogram: a
    bin is 1/64 of a power of two wide, so its middle is within 0.8 % of each value in it.
    """

    # The compiled form has total_low and total_high instead of total_ns.
    __slots__ = ("bins", "count", "m2", "max_ns", "mean_ns", "min_ns", "total_high", "total_low", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.min_ns = 0
        self.max_ns = 0
        self.mean_ns = 0.0
        self.m2 = 0.0
        self.bins: Any = None
        if cython.compiled:
            self.total_low = 0
            self.total_high = 0
        else:
            self.total_ns = 0

    def add(self, ints: Any, begin: int, end: int, skip_first: int) -> None:
        """Add intervals."""
        if self.bins is None:
            self.bins = new_bins()
        bins = ints_of(self.bins) if cython.compiled else self.bins
        for i in range(begin, end, 2):
            self.count += 1
            seen = self.count - skip_first
            if seen <= 0:
                continue
            duration = ints[i + 1] - ints[i]
            if duration < 0:  # the user's own clock may run backwards
                duration = 0
            if cython.compiled:
                add_to_total(self, duration)
            else:
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
            bins[slot] += 1

    def copy(self) -> Aggregates:
        other = Aggregates()
        other.count = self.count
        other.min_ns = self.min_ns
        other.max_ns = self.max_ns
        other.mean_ns = self.mean_ns
        other.m2 = self.m2
        if cython.compiled:
            other.total_low = self.total_low
            other.total_high = self.total_high
            if self.bins is not None:
                other.bins = copied_block(ints_of(self.bins), BIN_COUNT)
        else:
            other.total_ns = self.total_ns
            if self.bins is not None:
                other.bins = self.bins[:]
        return other

    def as_dict(self) -> dict[str, Any]:
        """Return the values by name, times in ns; ``bins`` is None without intervals."""
        if cython.compiled:
            total = total_of(self)
            bins = None if self.bins is None else memoryview(self.bins).cast("q")
        else:
            total = self.total_ns
            bins = self.bins
        return {
            "aggregated": self.count,
            "total_ns": total,
            "min_ns": self.min_ns,
            "max_ns": self.max_ns,
            "mean_ns": self.mean_ns,
            "m2": self.m2,
            "bins": bins,
        }


class Intervals:
    """The finished intervals of one region on one thread or device.

    ``keep_last`` bounds how many are kept one by one (-1: all); :class:`Aggregates` holds the others. The first
    ``skip_first`` intervals are left out of aggregates and statistics.

    Attributes:
        failed: Intervals that ended in an exception, or without a readable device time.
        discarded: Intervals that were forgotten while open.
        captured: Device times that were not taken because the stream was captured into a graph.
        recomputed: Intervals of a recomputation, such as activation checkpointing.
    """

    __slots__ = (
        "aggregates",
        "block",
        "blocks",
        "buffer",
        "captured",
        "discarded",
        "end",
        "failed",
        "keep_last",
        "kept_in_blocks",
        "limit",
        "place",
        "recomputed",
        "skip_first",
        "state",
        "taken",
    )

    def __init__(self, keep_last: int, skip_first: int, logged: bool = False) -> None:
        """Start empty.

        Args:
            keep_last: How many to keep one by one, -1 for all.
            skip_first: How many of the first are warm-up.
            logged: A log is attached, see :meth:`since`.
        """
        self.keep_last = keep_last
        self.skip_first = skip_first
        self.failed = 0
        self.discarded = 0
        self.captured = 0
        self.recomputed = 0
        self.taken = 0 if logged else -1
        if cython.compiled:
            self.blocks: list[Any] = []
            self.kept_in_blocks = 0
            self.aggregates = Aggregates()
            self.block: Any = new_block(2 * (_FIRST_BLOCK if keep_last < 0 else _AGGREGATED_BLOCK))
            self.place: Any = ints_of(self.block)
            self.end: Any = self.place + ints_in(self.block)
        else:
            # A list takes the clock's integers three times as fast as an array does.
            self.buffer: list[int] = []
            self.limit = 2 * (_STAGED if keep_last < 0 else _STAGED_AGGREGATED)
            self.state: tuple[Any, ...] = ((), (), 0, 0, Aggregates(), (), self.buffer)
            """Blocks; parts of the next block; integers in both so far, aggregated ones included; integers of the
            first part that are aggregated; aggregates; full buffers; the buffer, which alone changes in place."""

    def append(self, start_ns: int, end_ns: int) -> None:
        """Keep one interval."""
        if cython.compiled:
            keep(self, start_ns, end_ns)
        else:
            pair = (start_ns, end_ns)  # The garbage collector may run here, and its callback may flush the buffer.
            buffer = self.buffer
            buffer += pair
            if len(buffer) >= self.limit:
                self.flush_block()

    def flush_block(self) -> None:
        """Put the full buffer among the blocks, and aggregate the intervals beyond ``keep_last``."""
        if cython.compiled:
            self.flush_compiled()
        else:
            self.flush_plain()

    def flush_plain(self) -> None:
        """See :meth:`flush_block`."""
        # Python code may run at each allocation, and may record here. So the full buffer is replaced first, in one
        # step without an allocation, and then packed.
        before = self.state
        blocks, recent, moved, start, aggregates, full, buffer = before
        full = (*full, buffer)
        fresh: list[int] = []
        sealed = (blocks, recent, moved, start, aggregates, full, fresh)
        if self.state is not before:
            return  # A second entry has flushed the buffer.
        self.buffer, self.state = fresh, sealed
        staged = full[0] if len(full) == 1 else [*chain.from_iterable(full)]
        packer = _PACK.get(len(staged)) or Struct(f"{len(staged)}{_INT64}").pack
        recent = (*recent, array("q", packer(*staged)))
        moved += len(staged)
        if self.keep_last >= 0:
            surplus = moved // 2 - aggregates.count - self.keep_last
            if surplus > 0:
                surplus = self.spared_by_log(surplus, aggregates.count)
            if surplus > 0:
                aggregates = aggregates.copy()
                parts, start = self.without_oldest((*blocks, *recent), start, aggregates, 2 * surplus)
                gone = len(blocks) + len(recent) - len(parts)
                blocks, recent = blocks[gone:], recent[max(gone - len(blocks), 0) :]
        if len(recent) == _PARTS and not start:
            # A copy has no spare room at its end, a sixteenth of the array.
            blocks, recent = (*blocks, array("q", b"".join(recent))[:]), ()
        packed = (blocks, recent, moved, start, aggregates, (), fresh)
        if self.state is sealed:  # Else a second entry has packed this buffer with its own.
            self.state = packed

    def without_oldest(
        self, parts: tuple[Any, ...], start: int, aggregates: Aggregates, numbers: int
    ) -> tuple[tuple[Any, ...], int]:
        """Aggregate the oldest integers; return the remaining parts, and the aggregated integers of the first part."""
        gone = 0
        while numbers > 0:
            end = min(len(parts[gone]), start + numbers)
            aggregates.add(parts[gone], start, end, self.skip_first)
            numbers -= end - start
            start = end
            if end == len(parts[gone]):
                gone, start = gone + 1, 0
        return parts[gone:], start

    def spared_by_log(self, surplus: int, aggregated: int) -> int:
        """How many surplus intervals may be aggregated: taken by a log, or beyond ``LOG_BOUND``.

        Args:
            surplus: Intervals beyond ``keep_last``.
            aggregated: Intervals that are aggregated so far.
        """
        if self.taken < 0:
            return surplus
        return max(min(surplus, self.taken - aggregated), surplus - LOG_BOUND, 0)

    def flush_compiled(self) -> None:
        """See :meth:`flush_block`. Does not call into Python."""
        if cython.compiled:
            full = self.block
            length = self.end - ints_of(full)
            # If the allocation fails, the next interval replaces the last.
            self.place = self.end - 2
            fresh = new_block(min(4 * length, 2 * _BLOCK) if self.keep_last < 0 else length)
            self.blocks.append(full)
            self.kept_in_blocks += length // 2
            self.block = fresh
            self.place = ints_of(fresh)
            self.end = self.place + ints_in(fresh)
            if self.keep_last >= 0:
                self.aggregate_oldest()

    def aggregate_oldest(self) -> None:
        """Aggregate the blocks beyond ``keep_last`` that no log waits for."""
        if cython.compiled:
            while self.blocks:
                oldest = self.blocks[0]
                length = ints_in(oldest)
                surplus = self.kept_in_blocks - self.keep_last
                if surplus < length // 2:
                    break
                if 0 <= self.taken < self.aggregates.count + length // 2 and surplus <= LOG_BOUND:
                    break
                self.aggregates.add(ints_of(oldest), 0, length, self.skip_first)
                self.kept_in_blocks -= length // 2
                del self.blocks[0]

    def kept(self) -> tuple[list[Any], Aggregates]:
        """Return the kept intervals, oldest first, and the aggregates of the others, as of one moment.

        Returns:
            Buffers of int64, start and end in ns alternating, and the aggregates. Neither changes any more.
        """
        if cython.compiled:
            parts: list[Any] = []
            # From here on nothing is allocated that the garbage collector tracks.
            parts.extend(self.blocks)
            parts.append(copied_block(ints_of(self.block), self.place - ints_of(self.block)))
            aggregates = self.aggregates.copy()
            return [memoryview(part).cast("q") for part in parts], aggregates
        blocks, recent, _, start, aggregates, full, buffer = self.state
        parts = [*blocks, *recent]
        for numbers in (*full, buffer):
            parts.append(array("q", numbers[:]))  # a comprehension here fails in Cython
        if start:
            parts[0] = parts[0][start:]
        return parts, aggregates

    def copy(self) -> dict[str, Any]:
        """Return a consistent copy, from any thread while the owner goes on recording.

        Returns:
            ``pairs``: the kept intervals as buffers of int64, start and end in ns alternating, oldest first;
            ``aggregated``: the number of others, with their ``total_ns``, ``min_ns``, ``max_ns``, ``mean_ns``, ``m2``
            and ``bins`` (None without others); and the counters.
        """
        parts, aggregates = self.kept()
        copied = aggregates.as_dict()
        copied["pairs"] = parts
        copied["failed"] = self.failed
        copied["discarded"] = self.discarded
        copied["captured"] = self.captured
        copied["recomputed"] = self.recomputed
        copied["keep_last"] = self.keep_last
        copied["skip_first"] = self.skip_first
        return copied

    @property
    def count(self) -> int:
        """Intervals recorded so far, kept or aggregated."""
        if cython.compiled:
            recorded: int = self.aggregates.count + self.kept_in_blocks + (self.place - ints_of(self.block)) // 2
            return recorded
        _, _, moved, _, _, full, buffer = self.state
        number: int = (moved + sum(map(len, full)) + len(buffer)) // 2
        return number

    def since(self, taken: int) -> tuple[bytes, int, int]:
        """Return the intervals after the first ``taken``, for a log that reads from its own thread.

        After :meth:`attach`, a full block is aggregated only when the log has taken its intervals (:meth:`took`), or
        when more than ``LOG_BOUND`` intervals beyond ``keep_last`` wait. Only full blocks are checked, so that
        recording costs the same.

        Args:
            taken: How many intervals the log has taken or lost.

        Returns:
            Start and end in ns alternating, as native int64, in the order in which they ended; how many intervals were
            recorded so far; and how many the log lost because it came too late.
        """
        if cython.compiled:
            # One copy, without releasing the GIL.
            aggregated = self.aggregates.count
            filled = self.place - ints_of(self.block)
            recorded = aggregated + self.kept_in_blocks + filled // 2
            first = max(taken, aggregated)
            missing = 2 * (recorded - first) if first < recorded else 0
            found = new_block(missing)
            missing -= copy_last(found, missing, self.block, filled)
            number = len(self.blocks)
            while missing > 0:
                number -= 1
                missing -= copy_last(found, missing, self.blocks[number], ints_in(self.blocks[number]))
            return found, recorded, aggregated - taken if aggregated > taken else 0
        parts, aggregates = self.kept()
        aggregated = aggregates.count
        recorded = aggregated + sum(map(len, parts)) // 2
        missing = 2 * (recorded - max(taken, aggregated))
        newest: list[Any] = []
        for part in reversed(parts):
            if missing <= 0:
                break
            newest.append(part[max(len(part) - missing, 0) :])
            missing -= len(part)
        return b"".join(reversed(newest)), recorded, max(aggregated - taken, 0)

    def took(self, taken: int) -> None:
        """Note that the log has the first ``taken`` intervals."""
        self.taken = taken

    def attach(self) -> None:
        """Wait for a log from now on, see :meth:`since`."""
        if self.taken < 0:
            self.taken = 0

    def detach(self) -> None:
        """Stop waiting for a log."""
        self.taken = -1


def new_bins() -> Any:
    if cython.compiled:
        return zeroed_block(BIN_COUNT)
    return array("q", bytes(8 * BIN_COUNT))


def pairs_of(parts: Sequence[Any]) -> list[tuple[int, int]]:
    """Return start and end of each interval, from buffers in which they alternate."""
    return [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]
