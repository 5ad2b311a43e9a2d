"""What is kept of the intervals of a region: every one, or the last N and aggregates of the rest.

This file runs as plain Python and, with the C types of ``intervals.pxd``, compiled. What differs between the two
forms stands under ``cython.compiled``.

Anything may run between two lines of ours on the same thread: a finalizer, a callback of the garbage collector, a
signal handler, an exception that one of them raises. So what is stored is whole at each moment.

* Compiled, an interval is written and a full block is put away without a call into Python and without an allocation
  that the collector sees (a block is a ``bytes``, which it does not track): nothing can run in between.
* Plain, an interval is appended in one bytecode. What is put away is an immutable tuple, made on the side and
  published in one assignment; only then is the buffer cut, and the buffer says by its first item how much was cut off
  it. Whoever is interrupted in between leaves a state that the next one reads rightly and finishes.
"""

from __future__ import annotations

from array import array
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
"""Intervals in a region's first block; many regions have few. Each later one is four times as long, up to:"""
_BLOCK = 1024
"""Large enough to weigh 16 bytes each, small enough that a new one costs about 1 µs."""
_AGGREGATED_BLOCK = 128
"""Where blocks are aggregated, so that it costs about a microsecond compiled."""
_STAGED = 128
"""Intervals that plain Python collects in a list before it packs them."""
_STAGED_AGGREGATED = 32
_INT64 = "n" if Struct("n").size == 8 else "q"  # Python packs the same 8 bytes three times as fast as an `n`.
_PACK = {2 * length: Struct(f"{2 * length}{_INT64}").pack for length in (_STAGED, _STAGED_AGGREGATED)}
"""What packs a list of so many integers."""
_PARTS = 8
"""Packed lists that make a block."""
_NOTHING = slice(0, 0)
BIN_COUNT = 3712
"""Bins of the histogram: one for each of 0..127 ns, then 64 for each power of two up to 2**63 ns."""
LOG_BOUND = 1 << 19
"""Intervals beyond ``keep_last`` that wait at most for a log to take them, 8 MiB; see :meth:`Intervals.since`."""


class Aggregates:
    """What is known of intervals that are not kept one by one: exact moments, and a histogram.

    Mean and sum of squared deviations after Welford, Technometrics 4(3), 1962. The histogram is in the manner of
    HdrHistogram; its bins are 1/64 of a power of two wide, so that the middle of a bin is within 0.8 % of whatever
    fell into it.
    """

    # The last two are the compiled form's.
    __slots__ = ("bins", "count", "m2", "max_ns", "mean_ns", "min_ns", "total_high", "total_low", "total_ns")

    def __init__(self) -> None:
        """Start empty; the bins are made when the first interval comes."""
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
        """Take in intervals.

        Args:
            ints: Start and end in ns, alternating.
            begin: Where in ``ints`` the first of them starts.
            end: Where the last of them ends.
            skip_first: How many of all are warm-up: counted, and left out of everything else.
        """
        if self.bins is None:
            self.bins = new_bins()
        bins = ints_of(self.bins) if cython.compiled else self.bins
        for i in range(begin, end, 2):
            self.count += 1
            seen = self.count - skip_first
            if seen <= 0:
                continue
            duration = ints[i + 1] - ints[i]
            if duration < 0:  # a clock of the user's own may run backwards
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
        """Another one with the same values."""
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
        """The values by their names, those of times in ns; ``bins`` is None while there are none."""
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

    ``keep_last`` bounds how many are kept one by one (-1: all); the rest lives on in :class:`Aggregates`. The first
    ``skip_first`` intervals take no part in aggregates or statistics.

    Attributes:
        failed: Intervals that were ended by an exception, or whose device time could not be had.
        discarded: Intervals that were forgotten while open.
        captured: Device times that were not taken because the stream was being captured into a graph.
        recomputed: Intervals of a recomputation, as that of an activation checkpoint.
    """

    # Some are the compiled form's alone.
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
            # A list takes what the clock returned as it is, three times as fast as an array does. Its first item is
            # how many numbers were cut off after it.
            self.buffer: list[int] = [0]
            self.limit = 2 * (_STAGED if keep_last < 0 else _STAGED_AGGREGATED)
            self.state: tuple[Any, ...] = ((), (), 0, 0, Aggregates())
            """Blocks, parts of the next block, numbers put into them so far, numbers of the first of them that are
            aggregated already, aggregates. None of it is ever changed in place."""

    def append(self, start_ns: int, end_ns: int) -> None:
        """Keep one interval."""
        if cython.compiled:
            keep(self, start_ns, end_ns)
        else:
            buffer = self.buffer
            buffer += (start_ns, end_ns)
            if len(buffer) > self.limit:
                self.flush_block()

    def flush_block(self) -> None:
        """Put the full buffer among the blocks, and aggregate what is older than ``keep_last`` wants."""
        if cython.compiled:
            self.flush_compiled()
        else:
            self.flush_plain()

    def flush_plain(self) -> None:
        """See :meth:`flush_block`; may be called again, or by itself, at any of its lines."""
        state = self.state
        blocks, recent, moved, start, aggregates = state
        staged = [*self.buffer]
        fresh = staged[1 + moved - staged[0] :]  # What an interrupted call has put away and not yet cut is left out.
        if fresh:
            packer = _PACK.get(len(fresh)) or Struct(f"{len(fresh)}{_INT64}").pack
            recent = (*recent, array("q", packer(*fresh)))
            moved += len(fresh)
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
                # A copy is without the room to grow, a sixteenth of it.
                blocks, recent = (*blocks, array("q", b"".join(recent))[:]), ()
            state_now = (blocks, recent, moved, start, aggregates)
            # In one statement without a call, in which nothing else can run.
            self.state = state_now if self.state is state else self.state
        # The same for the buffer: cut as much as was put away, unless somebody has cut it meanwhile.
        moved, cut_off = self.state[2], staged[0]
        cut, mark = slice(0, 1 + moved - cut_off), (moved,)
        self.buffer[cut if self.buffer[0] == cut_off else _NOTHING] = mark if self.buffer[0] == cut_off else ()

    def without_oldest(
        self, parts: tuple[Any, ...], start: int, aggregates: Aggregates, numbers: int
    ) -> tuple[tuple[Any, ...], int]:
        """Aggregate so many of the oldest numbers; return the other parts, and how much of the first is aggregated."""
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
        """How many of the surplus intervals may be aggregated: those that a log has taken, and what exceeds the bound.

        Args:
            surplus: Intervals beyond ``keep_last``.
            aggregated: Intervals that are aggregated so far.
        """
        if self.taken < 0:
            return surplus
        return max(min(surplus, self.taken - aggregated), surplus - LOG_BOUND, 0)

    def flush_compiled(self) -> None:
        """See :meth:`flush_block`; nothing in it calls into Python."""
        if cython.compiled:
            full = self.block
            length = self.end - ints_of(full)
            # A failure leaves room for one, in place of the last.
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
        """Aggregate the blocks that ``keep_last`` does not want and no log waits for."""
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
        """The intervals that are kept, oldest first, and the aggregates of the others, of one moment.

        Returns:
            Buffers of int64, start and end in ns alternating, and the aggregates. Neither changes any more.
        """
        if cython.compiled:
            parts: list[Any] = []
            # From here on nothing allocates what the collector tracks.
            parts.extend(self.blocks)
            parts.append(copied_block(ints_of(self.block), self.place - ints_of(self.block)))
            aggregates = self.aggregates.copy()
            return [memoryview(part).cast("q") for part in parts], aggregates
        while True:
            blocks, recent, moved, start, aggregates = self.state
            staged = [*self.buffer]
            if staged[0] <= moved:  # Else both were changed in between.
                break
        parts = [*blocks, *recent]
        if start:
            parts[0] = parts[0][start:]
        return [*parts, array("q", staged[1 + moved - staged[0] :])], aggregates

    def copy(self) -> dict[str, Any]:
        """A consistent copy, taken from any thread while the owner goes on recording.

        Returns:
            ``pairs``: buffers of int64, start and end in ns alternating, oldest first, of the intervals that are kept;
            ``aggregated``: how many others there are, ``total_ns``, ``min_ns``, ``max_ns``, ``mean_ns``, ``m2``,
            ``bins`` (None if there are none): the aggregates over those; and the counters.
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
        staged = [*self.buffer]
        return (staged[0] + len(staged) - 1) // 2

    def since(self, taken: int) -> tuple[bytes, int, int]:
        """What was recorded after the first so many intervals, for a log that reads along on a thread of its own.

        A log is told that it may by :meth:`attach`, and says what it has by :meth:`took`: a full block is then
        aggregated only when the log has taken what is in it, or when more than ``LOG_BOUND`` intervals beyond
        ``keep_last`` wait for it. Recording costs what it did, since both are looked at only where a block is full.

        Args:
            taken: How many intervals the log has taken or lost.

        Returns:
            Start and end in ns alternating, as native int64, in the order in which they ended; how many intervals were
            recorded so far; and how many were lost to the log because it came too late.
        """
        if cython.compiled:
            # One copy, in which nobody's code can run: the interpreter is not let go of, however much there is.
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
        """Let go of the first so many intervals: the log has them."""
        self.taken = taken

    def attach(self) -> None:
        """From now on wait for a log, see :meth:`since`."""
        if self.taken < 0:
            self.taken = 0

    def detach(self) -> None:
        """Wait for no log any more."""
        self.taken = -1


def new_bins() -> Any:
    """A histogram without anything in it."""
    if cython.compiled:
        return zeroed_block(BIN_COUNT)
    return array("q", bytes(8 * BIN_COUNT))


def pairs_of(parts: Sequence[Any]) -> list[tuple[int, int]]:
    """Start and end of each interval, from buffers in which they alternate."""
    return [pair for part in parts for pair in zip(part[::2], part[1::2], strict=True)]
