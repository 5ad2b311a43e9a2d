"""The kept intervals of a region: all of them, or the last N and aggregates of the others.

This module runs as plain Python and, with the C types of ``intervals.pxd``, compiled. Differences between the two forms
are under ``cython.compiled``.

A reader on another thread finds a consistent state at any moment. Compiled, an interval is written and a full block put
away without a call into Python and without an allocation that the garbage collector tracks, so nothing can run in
between. Plain, everything but the newest intervals is an immutable tuple, replaced by one assignment.
"""

from __future__ import annotations

from array import array
from struct import Struct, pack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import cython
else:
    from deep500_timing._base import plain as cython

if not cython.compiled:
    import os
    from _thread import get_ident as thread_ident
    from contextlib import suppress
    from time import perf_counter_ns

    from deep500_timing._base.plain import in_c

    bit_length = int.bit_length
    copied_block = ints_in = ints_of = keep = keep_on_device = new_block = zeroed_block = in_c
    close_times = keep_times = open_times = in_c

_FIRST_BLOCK = 64
"""Intervals in a region's first block. Each later block is four times as long, up to ``_BLOCK``."""
_BLOCK = 1024
"""Large enough for 16 bytes an interval, small enough that allocating one costs about 1 µs."""
_AGGREGATED_BLOCK = 128
"""Intervals in a block that will be aggregated, which takes about 1 µs compiled. Plain Python packs as many at once."""
_INT64 = "n" if Struct("n").size == 8 else "q"  # Python packs the same 8 bytes three times as fast as an `n`.
BIN_COUNT = 3712
"""Bins of the histogram: one for each of 0..127 ns, then 64 for each power of two up to 2**63 ns."""
NO_HOST = -(1 << 63)
"""The start and the end on the host of a device interval that no region on the host launched."""
LOG_BOUND = 1 << 19
"""Intervals beyond ``keep_last`` that wait for a log at most (8 MiB); see :meth:`Intervals.since`."""


class Aggregates:
    """Exact moments and a histogram of intervals that are not kept one by one.

    Mean and sum of squared deviations after Welford, Technometrics 4(3), 1962. The histogram follows HdrHistogram: a
    bin is 1/64 of a power of two wide, so its middle is within 0.8 % of each value in it.
    """

    __slots__ = ("bins", "count", "m2", "max_ns", "mean_ns", "min_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.min_ns = 0
        self.max_ns = 0
        self.mean_ns = 0.0
        self.m2 = 0.0
        self.bins: Any = None

    def add(self, ints: Any, length: int, width: int, skip_first: int) -> None:
        """Add intervals: ``length`` integers, ``width`` of each interval, its start and end first."""
        if self.bins is None:
            self.bins = zeroed_block(BIN_COUNT) if cython.compiled else array("q", bytes(8 * BIN_COUNT))
        bins = ints_of(self.bins) if cython.compiled else self.bins
        total = 0
        for number in range(length // width):
            i = number * width
            self.count += 1
            seen = self.count - skip_first
            if seen <= 0:
                continue
            duration = ints[i + 1] - ints[i]
            if duration < 0:  # the user's own clock may run backwards
                duration = 0
            total += duration
            if total >> 62:  # Compiled, it has 64 bits, and the object's total any number.
                self.total_ns += total
                total = 0
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
        self.total_ns += total

    def copy(self) -> Aggregates:
        other = Aggregates()
        other.count = self.count
        other.total_ns = self.total_ns
        other.min_ns = self.min_ns
        other.max_ns = self.max_ns
        other.mean_ns = self.mean_ns
        other.m2 = self.m2
        if self.bins is not None:
            other.bins = copied_block(ints_of(self.bins), BIN_COUNT) if cython.compiled else self.bins[:]
        return other


class Intervals:
    """The finished intervals of one region on one thread or device.

    ``keep_last`` bounds how many are kept one by one (-1: all); :class:`Aggregates` holds the others. The first
    ``skip_first`` intervals are left out of aggregates and statistics.

    Attributes:
        width: Integers of an interval: start and end, and on a device also those of its region on the host.
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
        "place",
        "processor",
        "recomputed",
        "skip_first",
        "state",
        "taken",
        "width",
    )

    def __init__(self, keep_last: int, skip_first: int, logged: bool = False, on_device: bool = False) -> None:
        """Start empty.

        Args:
            keep_last: How many to keep one by one, -1 for all.
            skip_first: How many of the first are warm-up.
            logged: A log is attached, see :meth:`since`.
            on_device: They are times of a device.
        """
        self.width = 4 if on_device else 2
        self.processor: ProcessorTimes | None = None
        """Read after each interval of the host; see :meth:`Recorder._attach_log`."""
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
            self.block: Any = new_block(self.width * (_FIRST_BLOCK if keep_last < 0 else _AGGREGATED_BLOCK))
            self.place: Any = ints_of(self.block)
            self.end: Any = self.place + ints_in(self.block)
        else:
            # A list takes the clock's integers three times as fast as an array does.
            self.buffer: list[int] = []
            self.state: tuple[Any, ...] = ((), Aggregates(), (), self.buffer)
            """Blocks; aggregates; full buffers; the buffer, which alone changes in place."""

    def append(self, start_ns: int, end_ns: int, host_start_ns: int = NO_HOST, host_end_ns: int = NO_HOST) -> None:
        """Keep one interval; on a device, also the start and the end of its region on the host."""
        if cython.compiled:
            if self.width == 2:
                keep(self, start_ns, end_ns)
            else:
                keep_on_device(self, start_ns, end_ns, host_start_ns, host_end_ns)
        else:
            # The garbage collector may run here, and its callback may flush the buffer.
            interval = (start_ns, end_ns) if self.width == 2 else (start_ns, end_ns, host_start_ns, host_end_ns)
            buffer = self.buffer
            buffer += interval
            if len(buffer) >= self.width * _AGGREGATED_BLOCK:
                self.flush_plain()
            if self.processor is not None:
                self.processor.read()

    def flush_plain(self) -> None:
        """Put the full buffer among the blocks, and aggregate the intervals beyond ``keep_last``."""
        # Python code may run at each call and allocation, and may record here. So the full buffer is replaced first, in
        # one step, and then packed.
        before = self.state
        blocks, aggregates, full, buffer = before
        full = (*full, buffer)
        fresh: list[int] = []
        sealed = (blocks, aggregates, full, fresh)
        if self.state is not before:
            return  # A second entry has flushed the buffer.
        self.buffer, self.state = fresh, sealed
        block, width = b"".join(map(packed, full)), self.width
        if self.keep_last >= 0:
            parts, aggregates = [*blocks, block], aggregates.copy()
            kept = sum(map(len, parts)) // (8 * width)
            while parts and self._is_surplus(kept, aggregates.count, len(parts[0]) // (8 * width)):
                ints = memoryview(parts.pop(0)).cast("q")
                aggregates.add(ints, len(ints), width, self.skip_first)
                kept -= len(ints) // width
            blocks = tuple(parts)
        else:
            *older, last = blocks or (b"",)
            blocks = (*older, last + block) if len(last) < 8 * width * _BLOCK else (*blocks, block)
        after = (blocks, aggregates, (), fresh)
        if self.state is sealed:  # Else a second entry has packed this buffer with its own.
            self.state = after

    def flush_compiled(self) -> None:
        """Put the full block among the blocks, and aggregate those beyond ``keep_last``. Does not call into Python."""
        if cython.compiled:
            full, width = self.block, self.width
            length = self.end - ints_of(full)
            # If the allocation fails, the next interval replaces the last.
            self.place = self.end - width
            fresh = new_block(min(4 * length, width * _BLOCK) if self.keep_last < 0 else length)
            self.blocks.append(full)
            self.kept_in_blocks += length // width
            self.block = fresh
            self.place = ints_of(fresh)
            self.end = self.place + ints_in(fresh)
            while (
                self.keep_last >= 0
                and self.blocks
                and self._is_surplus(self.kept_in_blocks, self.aggregates.count, length // width)
            ):
                self.aggregates.add(ints_of(self.blocks[0]), length, width, self.skip_first)
                self.kept_in_blocks -= length // width
                del self.blocks[0]

    def _is_surplus(self, kept: int, aggregated: int, block: int) -> bool:
        """Whether the oldest block of the ``kept`` intervals is beyond ``keep_last`` and no log needs it."""
        surplus = kept - self.keep_last
        if surplus < block:
            return False
        return not 0 <= self.taken < aggregated + block or surplus > LOG_BOUND

    def kept(self) -> tuple[list[Any], Aggregates]:
        """Return the kept intervals, oldest first, and the aggregates of the others, as of one moment.

        Returns:
            ``bytes`` of int64, ``width`` of each interval in ns, and the aggregates. Neither changes any more.
        """
        if cython.compiled:
            parts: list[Any] = []
            # From here on nothing is allocated that the garbage collector tracks.
            parts.extend(self.blocks)
            parts.append(copied_block(ints_of(self.block), self.place - ints_of(self.block)))
            copied = self.aggregates.copy()
            return parts, copied
        blocks, aggregates, full, buffer = self.state
        return [*blocks, *map(packed, (*full, buffer))], aggregates

    def copy(self) -> dict[str, Any]:
        """Return a consistent copy, from any thread while the owner goes on recording.

        Returns:
            ``pairs``: the kept intervals as buffers of int64, oldest first, ``width`` of each, in ns;
            ``aggregated``: the number of others, with their ``total_ns``, ``min_ns``, ``max_ns``, ``mean_ns``, ``m2``
            and ``bins`` (None without others); and the counters.
        """
        parts, aggregates = self.kept()
        return {
            "pairs": [memoryview(part).cast("q") for part in parts],
            "width": self.width,
            "aggregated": aggregates.count,
            "total_ns": aggregates.total_ns,
            "min_ns": aggregates.min_ns,
            "max_ns": aggregates.max_ns,
            "mean_ns": aggregates.mean_ns,
            "m2": aggregates.m2,
            "bins": None if aggregates.bins is None else memoryview(aggregates.bins).cast("B").cast("q"),
            "failed": self.failed,
            "discarded": self.discarded,
            "captured": self.captured,
            "recomputed": self.recomputed,
            "keep_last": self.keep_last,
            "skip_first": self.skip_first,
        }

    @property
    def count(self) -> int:
        """Intervals recorded so far, kept or aggregated."""
        if cython.compiled:
            in_block = (self.place - ints_of(self.block)) // self.width
            recorded: int = self.aggregates.count + self.kept_in_blocks + in_block
            return recorded
        blocks, aggregates, full, buffer = self.state
        in_lists = sum(map(len, full)) + len(buffer)
        number: int = aggregates.count + sum(map(len, blocks)) // (8 * self.width) + in_lists // self.width
        return number

    def since(self, taken: int) -> tuple[bytes, int, int]:
        """Return the intervals after the first ``taken``, for a log that reads from its own thread.

        After :meth:`attach`, a full block is aggregated only when the log has taken its intervals (:meth:`took`), or
        when more than ``LOG_BOUND`` intervals beyond ``keep_last`` wait. Only full blocks are checked, so that
        recording costs the same.

        Args:
            taken: How many intervals the log has taken or lost.

        Returns:
            ``width`` native int64 of each interval, in ns, in the order in which they ended; how many intervals were
            recorded so far; and how many the log lost because it came too late.
        """
        parts, aggregates = self.kept()
        aggregated, size = aggregates.count, 8 * self.width
        recorded = aggregated + sum(map(len, parts)) // size
        missing = size * (recorded - max(taken, aggregated))
        newest: list[bytes] = []
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


_NOT_OPEN, _MISSING = -2, -1


class ProcessorTimes:
    """How long a thread ran on a processor, and waited for one, until each reading. Linux tells it.

    Only that thread reads: on another one, and where the kernel does not tell, there are no rows.

    Args:
        ident: The thread's, of ``threading.get_ident``.

    Attributes:
        rows: The time of each reading on the system's clock, the time on a processor and the time waited for one since
            the thread began, and 0; in ns. They are for a log, see :meth:`Intervals.since`.
    """

    __slots__ = ("file", "ident", "rows")

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.rows = Intervals(0, 0, True, True)
        self.file = _NOT_OPEN

    def read(self) -> None:
        """Add a row. It takes 1.5 µs, and compiled it does not call into Python."""
        if self.file == _MISSING or self.ident != thread_ident():
            return
        if cython.compiled:
            if self.file == _NOT_OPEN:
                self.file = open_times()
            if not keep_times(self):  # Another system; or the thread has ended, and another one goes on in its place.
                self.close()
        else:
            try:
                if self.file == _NOT_OPEN:
                    self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
                ran, waited, _ = map(int, os.pread(self.file, 96, 0).split())
                self.rows.append(perf_counter_ns(), ran, waited, 0)
            except (OSError, AttributeError, ValueError):
                self.close()

    def close(self) -> None:
        """Close the file. It is opened again at the next reading, unless it could not be opened."""
        is_open, file = self.file >= 0, self.file
        self.file = _NOT_OPEN if is_open else _MISSING
        if is_open:
            if cython.compiled:
                close_times(file)
            else:
                with suppress(OSError):
                    os.close(file)

    def stop(self) -> None:
        """Read no more; the rows stay."""
        self.close()
        self.file = _MISSING

    def __del__(self) -> None:
        self.close()


def packed(numbers: list[int]) -> bytes:
    """Integers as native int64. The list may grow meanwhile."""
    numbers = numbers[:]
    return pack(f"{len(numbers)}{_INT64}", *numbers)
