"""Which training step an interval belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deep500_timing.runs._columns import unpack
from deep500_timing.runs._kinds import NO_STEP
from deep500_timing.runs._rows import StepTable, labels_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

_REMEMBERED = 1 << 16
"""Steps whose times are remembered for what arrives late: times from a device."""


class StepCounter:
    """Labels intervals with steps: by the user's marks if there are any, else by the count of BATCH.

    An interval belongs to the step in which it ended. With marks, a step lasts from its mark to the next; without, step
    ``k`` lasts until the ``k``-th BATCH ends, so that what prepares a batch belongs to its step.
    """

    def __init__(self, first: int = 0) -> None:
        """Count from ``first``."""
        self.batches = first
        self._ends = np.zeros(0, dtype=np.int64)
        self._room = np.zeros(0, dtype=np.int64)
        self._used = 0
        self._mark_times = np.zeros(0, dtype=np.int64)
        self._mark_steps = np.zeros(0, dtype=np.int64)
        self._marked = False

    def add_batches(self, ends_ns: Int64Array) -> None:
        """Count the BATCHes that ended, shape ``(n,)``, before anything that ended with them is labelled."""
        self.batches += len(ends_ns)
        # Appended where there is room: to copy all of them takes so long that another thread gets the interpreter.
        fresh = np.sort(ends_ns, kind="stable")[-_REMEMBERED:]
        known = self._ends
        if self._used + len(fresh) > len(self._room):
            self._room = np.empty(4 * _REMEMBERED, dtype=np.int64)
            self._room[: len(known)] = known
            self._used = len(known)
        self._room[self._used : self._used + len(fresh)] = fresh
        self._used += len(fresh)
        self._ends = self._room[max(self._used - _REMEMBERED, 0) : self._used]

    def add_marks(self, marks: list[tuple[int, int]]) -> None:
        """Take in marks: times in ns and steps, in order."""
        if not marks:
            return
        self._marked = True
        times, steps = np.array(marks, dtype=np.int64).T
        times = np.concatenate((self._mark_times, times))
        order = np.argsort(times, kind="stable")
        self._mark_times = times[order][-_REMEMBERED:]
        self._mark_steps = np.concatenate((self._mark_steps, steps))[order][-_REMEMBERED:]

    def label(self, starts_ns: Int64Array, ends_ns: Int64Array | None) -> Int64Array:
        """The steps of intervals.

        Args:
            starts_ns: When they began, shape ``(n,)``.
            ends_ns: When they ended; None for those of a device, whose end says when the device was ready, not
                when the step was: their start decides.
        """
        return labels_of(self.table, starts_ns, ends_ns)

    @property
    def table(self) -> StepTable:
        """What tells the step of an interval, at this moment."""
        if self._marked:
            return StepTable(self._mark_times, self._mark_steps, 0, NO_STEP)
        forgotten = self.batches - len(self._ends)
        return StepTable(self._ends, None, forgotten, NO_STEP if len(self._ends) == _REMEMBERED else forgotten)


def last_batch_of(paths: list[str]) -> int:
    """How many BATCHes the logs of a session had counted; 0 if they cannot be read."""
    from deep500_timing.runs._frames import Frame, read_frames
    from deep500_timing.runs._kinds import TABLES

    number, columns = TABLES["flushes"]
    for path in reversed(paths):
        try:
            with open(path, "rb") as file:
                frames = [frame for frame in read_frames(file.read()) if isinstance(frame, Frame)]
            for frame in reversed(frames):
                if frame.kind == number:
                    return int(unpack(columns, frame.rows, frame.payload)["batches"][-1])
        except (OSError, ValueError):
            continue
    return 0
