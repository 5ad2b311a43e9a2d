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


def bin_of(duration: int) -> int:
    """The bin of a duration in ns, which is not negative."""
    if duration < 128:
        return duration
    shift = bit_length(duration) - 7
    return (shift << 6) + (duration >> shift)


def new_counts(counts: bytes, earlier: bytes, at: int) -> tuple[int, bytes] | None:
    """What came to a histogram, each as int64, since the earlier one, whose first bin is the bin ``at`` of this one.

    Returns:
        The first bin that is not empty, and the number in each from there to the last one; None if the earlier one had
        more in a bin.
    """
    if at < 0 or at + len(earlier) // 8 > len(counts) // 8:
        return None
    if cython.compiled:
        fresh: Any = copied_block(ints_of(counts), ints_in(counts))
        new, old, known = ints_of(fresh), ints_of(earlier), ints_in(earlier)
    else:
        counted: Any = array("q", counts)
        new, old, known = counted, memoryview(earlier).cast("q"), len(earlier) // 8
    for place in range(known):
        new[at + place] -= old[place]
        if new[at + place] < 0:
            return None
    first, beyond = 0, len(counts) // 8
    while beyond and not new[beyond - 1]:
        beyond -= 1
    while first < beyond and not new[first]:
        first += 1
    if cython.compiled:
        return first, copied_block(new + first, beyond - first)
    return first, new[first:beyond].tobytes()


class Aggregates:
    """Exact moments and a histogram of a store's first ``count`` intervals, without its warm-up.

    Mean and sum of squared deviations after Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979: each call adds a part. The histogram follows HdrHistogram: a bin is 1/64 of a
    power of two wide, so its middle is within 0.8 % of each value in it. The powers of two from that of the shortest
    to that of the longest have bins.
    """

    __slots__ = ("bins", "count", "first_bin", "m2", "max_ns", "mean_ns", "min_ns", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self.min_ns = 0
        self.max_ns = 0
        self.mean_ns = 0.0
        self.m2 = 0.0
        self.first_bin = 0
        self.bins: Any = b"" if cython.compiled else array("q")

    def add(self, ints: Any, length: int, width: int, skip_first: int) -> None:
        """Add the next intervals: ``length`` integers, ``width`` of each interval, its start and end first."""
        begin = min(width * max(skip_first - self.count, 0), length)
        low = high = total = 0
        sum_ns = drift = m2 = 0.0
        for number in range(begin // width, length // width):
            i = number * width
            duration = ints[i + 1] - ints[i]
            if duration < 0:  # the user's own clock may run backwards
                duration = 0
            if i == begin or duration < low:
                low = duration
            if duration > high:
                high = duration
            sum_ns += duration
            total += duration
            if total >> 62:  # Compiled, it has 64 bits, and the object's total any number.
                self.total_ns += total
                total = 0
        self.total_ns += total
        before = max(self.count - skip_first, 0)
        self.count += length // width
        if begin == length:
            return
        self.make_room(bin_of(low))
        self.make_room(bin_of(high))
        bins = ints_of(self.bins) if cython.compiled else self.bins
        added = (length - begin) // width
        mean_ns = sum_ns / added
        for number in range(begin // width, length // width):
            i = number * width
            duration = ints[i + 1] - ints[i]
            if duration < 0:
                duration = 0
            bins[bin_of(duration) - self.first_bin] += 1
            delta = duration - mean_ns
            drift += delta
            m2 += delta * delta
        delta = mean_ns - self.mean_ns
        share = added / (before + added)
        self.m2 += m2 - drift * drift / added + delta * delta * before * share
        self.mean_ns += delta * share
        if before == 0 or low < self.min_ns:
            self.min_ns = low
        if high > self.max_ns:
            self.max_ns = high

    def make_room(self, slot: int) -> None:
        """Add the bins from those that there are to the power of two of another."""
        known = ints_in(self.bins) if cython.compiled else len(self.bins)
        if self.first_bin <= slot < self.first_bin + known:
            return
        first, beyond = slot & -64, (slot & -64) + 64
        if known:
            first, beyond = min(first, self.first_bin), max(beyond, self.first_bin + known)
        fresh = zeroed_block(beyond - first) if cython.compiled else array("q", bytes(8 * (beyond - first)))
        old = ints_of(self.bins) if cython.compiled else self.bins
        new = ints_of(fresh) if cython.compiled else fresh
        for place in range(known):
            new[self.first_bin - first + place] = old[place]
        self.bins = fresh
        self.first_bin = first

    def copy(self) -> Aggregates:
        """For plain Python, where a reader on another thread must not see it change."""
        other = Aggregates()
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.bins = self.bins[:]
        return other

    def counts(self, skip_first: int) -> tuple[int, bytes]:
        """The bin of the shortest interval, and from there to the longest the number in each bin, as int64."""
        if self.count <= skip_first:
            return 0, b""
        low, beyond = bin_of(self.min_ns), bin_of(self.max_ns) + 1
        if cython.compiled:
            return low, copied_block(ints_of(self.bins) + (low - self.first_bin), beyond - low)
        return low, self.bins[low - self.first_bin : beyond - self.first_bin].tobytes()


class Intervals:
    """The finished intervals of one region on one thread or device.

    ``keep_last`` bounds how many are kept one by one (-1: all). :class:`Aggregates` holds the others, and those that a
    reader has asked for, so that the next reader adds the new ones. The first ``skip_first`` intervals are left out of
    aggregates and statistics.

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
        "digested",
        "discarded",
        "dropped",
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
            self.dropped = 0
            """Intervals that are in the aggregates alone."""
            self.aggregates = Aggregates()
            self.block: Any = new_block(self.width * (_FIRST_BLOCK if keep_last < 0 else _AGGREGATED_BLOCK))
            self.place: Any = ints_of(self.block)
            self.end: Any = self.place + ints_in(self.block)
        else:
            # A list takes the clock's integers three times as fast as an array does.
            self.buffer: list[int] = []
            self.state: tuple[Any, ...] = ((), Aggregates(), (), self.buffer)
            """Blocks; aggregates of the intervals before; full buffers; the buffer, which alone changes in place."""
            self.digested = Aggregates()
            """What a reader has seen: replaced by readers alone, which are never between two states."""

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
                self.processor.read(end_ns)

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
                and self._is_surplus(self.kept_in_blocks, self.dropped, length // width)
            ):
                seen = min(width * (self.aggregates.count - self.dropped), length)  # By readers.
                self.aggregates.add(ints_of(self.blocks[0]) + seen, length - seen, width, self.skip_first)
                self.dropped += length // width
                self.kept_in_blocks -= length // width
                del self.blocks[0]

    def _is_surplus(self, kept: int, dropped: int, block: int) -> bool:
        """Whether the oldest block of the ``kept`` intervals is beyond ``keep_last`` and no log needs it."""
        surplus = kept - self.keep_last
        if surplus < block:
            return False
        return not 0 <= self.taken < dropped + block or surplus > LOG_BOUND

    def kept(self) -> tuple[list[Any], int]:
        """Return the kept intervals, oldest first, and the number of the others before, as of one moment.

        Returns:
            ``bytes`` of int64, ``width`` of each interval in ns, which do not change any more; and the number.
        """
        if cython.compiled:
            parts: list[Any] = []
            # From here on nothing is allocated that the garbage collector tracks.
            parts.extend(self.blocks)
            parts.append(copied_block(ints_of(self.block), self.place - ints_of(self.block)))
            dropped = self.dropped
            return parts, dropped
        blocks, aggregates, full, buffer = self.state
        return [*blocks, *map(packed, (*full, buffer))], aggregates.count

    def digest(self) -> tuple[Any, ...]:
        """Aggregate what has come since the last call, and return the aggregates of all intervals, from any thread.

        Returns:
            The number of intervals, warm-up included; of the others the sum, the shortest, the longest, the sum of
            squared deviations from the mean, and the histogram, see :meth:`Aggregates.counts`; then ``failed``,
            ``discarded``, ``captured`` and ``recomputed``.
        """
        if cython.compiled:
            # Nothing is called in between that could let another thread go on.
            aggregates, width = self.aggregates, self.width
            place = len(self.blocks)
            ahead = self.dropped + self.kept_in_blocks - aggregates.count
            while ahead > 0:
                place -= 1
                ahead -= ints_in(self.blocks[place]) // width
            for number in range(place, len(self.blocks)):
                block = self.blocks[number]
                aggregates.add(ints_of(block) - width * ahead, ints_in(block) + width * ahead, width, self.skip_first)
                ahead = 0
            seen = width * (aggregates.count - self.dropped - self.kept_in_blocks)
            length = self.place - ints_of(self.block)
            aggregates.add(ints_of(self.block) + seen, length - seen, width, self.skip_first)
        else:
            parts, dropped = self.kept()
            aggregates = (self.digested if self.digested.count >= dropped else self.state[1]).copy()
            missing = 8 * self.width * (dropped - aggregates.count) + sum(map(len, parts))
            newest = b"".join(last_of(parts, missing))
            aggregates.add(memoryview(newest).cast("q"), len(newest) // 8, self.width, self.skip_first)
            self.digested = aggregates
        first_bin, counts = aggregates.counts(self.skip_first)
        return (
            aggregates.count,
            aggregates.total_ns,
            aggregates.min_ns,
            aggregates.max_ns,
            aggregates.m2,
            first_bin,
            counts,
            self.failed,
            self.discarded,
            self.captured,
            self.recomputed,
        )

    @property
    def count(self) -> int:
        """Intervals recorded so far, kept or aggregated."""
        if cython.compiled:
            in_block = (self.place - ints_of(self.block)) // self.width
            recorded: int = self.dropped + self.kept_in_blocks + in_block
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
        parts, dropped = self.kept()
        recorded = dropped + sum(map(len, parts)) // (8 * self.width)
        newest = last_of(parts, 8 * self.width * (recorded - max(taken, dropped)))
        return b"".join(newest), recorded, max(dropped - taken, 0)

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


def last_of(parts: list[bytes], missing: int) -> list[bytes]:
    """The last so many bytes of several blocks, oldest first."""
    newest: list[bytes] = []
    for part in reversed(parts):
        if missing <= 0:
            break
        newest.append(part[max(len(part) - missing, 0) :])
        missing -= len(part)
    return newest[::-1]


_NOT_OPEN, _MISSING = -2, -1
_CLOSEST_NS = 4_000_000


class ProcessorTimes:
    """How long a thread ran on a processor, and waited for one, until each reading. Linux tells it.

    Only that thread reads: on another one, and where the kernel does not tell, there are no rows.

    Args:
        ident: The thread's, of ``threading.get_ident``.

    Attributes:
        rows: The time of each reading on the system's clock, the time on a processor and the time waited for one since
            the thread began, and 0; in ns. They are for a log, see :meth:`Intervals.since`.
    """

    __slots__ = ("file", "ident", "read_ns", "rows")

    def __init__(self, ident: int) -> None:
        self.ident = ident
        self.rows = Intervals(0, 0, True, True)
        self.file = _NOT_OPEN
        self.read_ns = 0

    def read(self, end_ns: int) -> None:
        """Add a row, unless the last one is less than 4 ms old: the ticks of most kernels are no closer.

        It takes 1.5 µs, and 5 in a step that fills the caches. Compiled, it does not call into Python.
        """
        if 0 <= end_ns - self.read_ns < _CLOSEST_NS:
            return
        self.read_ns = end_ns
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
        if not cython.compiled:
            self.close()
        elif self.file >= 0:  # as the process ends, names of this module may be gone
            close_times(self.file)


def packed(numbers: list[int]) -> bytes:
    """Integers as native int64. The list may grow meanwhile."""
    numbers = numbers[:]
    return pack(f"{len(numbers)}{_INT64}", *numbers)
