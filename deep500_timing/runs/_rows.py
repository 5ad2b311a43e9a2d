"""From what timers recorded to the payloads of a log's frames: merged, given their steps, and packed.

This file runs as plain Python and, with the C code of ``_rows.pxd``, compiled; both give the same bytes. What a log has
to fear is not the work but the interpreter's lock: numpy and zlib let go of it at every call, and beside a loop that
never does, each call then waits 5 ms until it has it back. Plain, a flush makes some dozens of such calls; compiled, it
is all done in one that lets go of the lock once.

numpy is imported where it is used, since this file is read whenever the plain form is asked for.
"""

from __future__ import annotations

from typing import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    import cython
    import numpy as np
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]
else:
    from deep500_timing._base import cython_stub as cython

if not cython.compiled:
    from deep500_timing._base.cython_stub import in_c

    first_late_in_c = payloads_in_c = in_c

COMPILED: bool = cython.compiled


class Part(NamedTuple):
    """Intervals of one region, thread and device."""

    pairs: Int64Array
    """Shape ``(n, 2)``, contiguous: start and end in ns."""
    steps: Int64Array | None
    """Shape ``(n,)``; None if they are to be found by the ends."""
    region: int
    """The number of its name."""
    thread: int
    device: int
    """The number of its name."""


class StepTable(NamedTuple):
    """What tells the step of an interval: by marks of the program, or by the ends of BATCHes."""

    times_ns: Int64Array
    """Shape ``(n,)``, rising: of the marks, or of the ends."""
    steps: Int64Array | None
    """Shape ``(n,)``: the steps that begin at the marks; None if BATCHes are counted."""
    forgotten: int
    """BATCHes that ended before the first of these ends."""
    earliest: int
    """The step of what is before all times."""


def labels_of(table: StepTable, starts_ns: Int64Array, ends_ns: Int64Array | None) -> Int64Array:
    """The steps of intervals, see :meth:`StepCounter.label`."""
    import numpy as np

    times = table.times_ns
    if table.steps is None:
        if ends_ns is None:
            at = np.searchsorted(times, starts_ns, side="right")
        else:
            at = np.searchsorted(times, ends_ns, side="left")
        labels = table.forgotten + at.astype(np.int64)
    else:
        at = np.searchsorted(times, starts_ns, side="right")
        if ends_ns is not None:
            # What ends at the very moment of a mark ended before it, unless it began there as well.
            at = np.maximum(at, np.searchsorted(times, ends_ns, side="left"))
        labels = table.steps[np.maximum(at - 1, 0)] if len(times) else np.zeros(len(at), dtype=np.int64)
    labels[at == 0] = table.earliest
    return labels


def first_late(ints: bytes, cut_ns: int, future_ns: int) -> int:
    """How many intervals come before the first that ended after the cut, though not after ``future_ns``.

    Args:
        ints: Start and end in ns alternating, int64.
        cut_ns: The cut.
        future_ns: What ends later than this is not late, but of another clock.
    """
    if cython.compiled:
        on_time: int = first_late_in_c(ints, cut_ns, future_ns)
        return on_time
    return _first_late_by_numpy(ints, cut_ns, future_ns)


def _first_late_by_numpy(ints: bytes, cut_ns: int, future_ns: int) -> int:
    import numpy as np

    ends = np.frombuffer(ints, dtype=np.int64)[1::2]
    late = (ends > cut_ns) & (ends <= future_ns)
    return int(late.argmax()) if late.any() else len(ends)


def payloads_of(parts: list[Part], table: StepTable, length: int) -> list[tuple[int, bytes]]:
    """The payloads of frames of the table ``intervals``, by the starts of the intervals.

    Args:
        parts: The intervals.
        table: What tells the steps of those that come without.
        length: Rows of each frame but the last.

    Returns:
        Rows and payload of each frame.
    """
    if cython.compiled:
        payloads: list[tuple[int, bytes]] = payloads_in_c(
            parts, table.times_ns, table.steps, table.forgotten, table.earliest, length
        )
        return payloads
    return _payloads_by_numpy(parts, table, length)


def _payloads_by_numpy(parts: list[Part], table: StepTable, length: int) -> list[tuple[int, bytes]]:
    import numpy as np

    from deep500_timing.runs._columns import pack
    from deep500_timing.runs._kinds import TABLES

    if not parts:
        return []
    lengths = [len(part.pairs) for part in parts]
    pairs = np.concatenate([part.pairs for part in parts])
    steps = [
        labels_of(table, part.pairs[:, 0], part.pairs[:, 1]) if part.steps is None else part.steps for part in parts
    ]
    order = np.argsort(pairs[:, 0], kind="stable")
    starts = pairs[order, 0]

    def spread(numbers: list[int]) -> Any:
        return np.repeat(np.array(numbers, dtype=np.int64), lengths)[order]

    arrays = {
        "start_ns": starts,
        "dur_ns": pairs[order, 1] - starts,
        "step": np.concatenate(steps)[order],
        "region": spread([part.region for part in parts]),
        "thread": spread([part.thread for part in parts]),
        "device": spread([part.device for part in parts]),
    }
    columns = TABLES["intervals"][1]
    return [
        (
            min(len(starts) - first, length),
            pack(columns, {name: values[first : first + length] for name, values in arrays.items()}),
        )
        for first in range(0, len(starts), length)
    ]
