"""Assigns training steps to intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deep500_timing.runs._format import NO_STEP, unpack

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int64Array = NDArray[np.int64]

_REMEMBERED = 1 << 16
"""Number of steps that are remembered for device intervals, which arrive late."""


class StepCounter:
    """Labels intervals with steps: by the user's marks, else by counting BATCHes.

    An interval belongs to the step in which it ended. With marks, a step lasts from its mark to the next one. Without,
    step ``k`` lasts until the ``k``-th BATCH ends, so that the preparation of a batch belongs to its step.
    """

    def __init__(self, first: int = 0) -> None:
        self.batches = first
        self._ends = np.zeros(0, dtype=np.int64)
        self._mark_times = np.zeros(0, dtype=np.int64)
        self._mark_steps = np.zeros(0, dtype=np.int64)
        self._marked = False

    def add_batches(self, ends_ns: Int64Array) -> None:
        """Count ended BATCHes, shape ``(n,)``. Call it before :meth:`label` for the same time."""
        self.batches += len(ends_ns)
        fresh = np.sort(ends_ns, kind="stable")
        self._ends = np.concatenate((self._ends, fresh))[-_REMEMBERED:]

    def add_marks(self, marks: list[tuple[int, int]]) -> None:
        """Add marks: times in ns and steps, in order."""
        if not marks:
            return
        self._marked = True
        times, steps = np.array(marks, dtype=np.int64).T
        times = np.concatenate((self._mark_times, times))
        order = np.argsort(times, kind="stable")
        self._mark_times = times[order][-_REMEMBERED:]
        self._mark_steps = np.concatenate((self._mark_steps, steps))[order][-_REMEMBERED:]

    def label(self, starts_ns: Int64Array, ends_ns: Int64Array | None) -> Int64Array:
        if self._marked:
            times, forgotten, earliest = self._mark_times, 0, NO_STEP
            at = np.searchsorted(times, starts_ns, side="right")
            if ends_ns is not None:
                # An interval that ends at the time of a mark ended before it, unless it began there as well.
                at = np.maximum(at, np.searchsorted(times, ends_ns, side="left"))
            labels = self._mark_steps[np.maximum(at - 1, 0)]
        else:
            times, forgotten = self._ends, self.batches - len(self._ends)
            earliest = NO_STEP if len(times) == _REMEMBERED else forgotten
            if ends_ns is None:
                at = np.searchsorted(times, starts_ns, side="right")
            else:
                at = np.searchsorted(times, ends_ns, side="left")
            labels = forgotten + at.astype(np.int64)
        labels[at == 0] = earliest
        return labels


def last_batch_of(paths: list[str]) -> int:
    """The number of BATCHes in the logs of a session; 0 if they cannot be read."""
    from deep500_timing.runs._format import TABLES, Frame, read_frames

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
