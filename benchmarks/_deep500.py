"""The design that this package replaces, for comparison: two lists per key, appended to on each call.

Written for the benchmark after its description. Keys are members of an ordinary ``Enum``, which hashes in Python,
and one of them stands for all and is refused at each call. Starts and ends come from an object that can be exchanged
for one of a device, go to a list each, and are turned into times when someone asks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from enum import Enum, auto


class Key(Enum):
    """The timed kinds."""

    EPOCH = auto()
    BATCH = auto()
    FORWARD = auto()
    BACKWARD = auto()
    COMM = auto()
    IO = auto()
    OTHER = auto()
    EVERY = auto()


class HostMarks:
    """Marks on the host are readings of its clock."""

    def begin(self) -> float:
        """Mark the start of a region."""
        return time.perf_counter()

    def finish(self) -> float:
        """Mark the end of a region."""
        return time.perf_counter()


def refuse_every(key: Key) -> None:
    """Raise a ValueError for the key that stands for all."""
    if key == Key.EVERY:
        raise ValueError("Time one kind of region.")


class ListTimer:
    """A start and an end per region, kept for ever."""

    def __init__(self) -> None:
        self.marks = HostMarks()
        self.begun: dict[Key, list[float]] = defaultdict(list)
        self.finished: dict[Key, list[float]] = defaultdict(list)

    def start(self, key: Key) -> None:
        """Open a region.

        Raises:
            RuntimeError: It is open.
        """
        refuse_every(key)
        if len(self.begun[key]) > len(self.finished[key]):
            raise RuntimeError(f"{key} was begun before and is not finished.")
        self.begun[key].append(self.marks.begin())

    def end(self, key: Key) -> None:
        """Close a region.

        Raises:
            RuntimeError: It is not open.
        """
        refuse_every(key)
        if len(self.begun[key]) <= len(self.finished[key]):
            raise RuntimeError(f"{key} was not begun.")
        self.finished[key].append(self.marks.finish())

    def get_time(self, key: Key) -> list[float]:
        """Seconds of each region."""
        return [after - before for before, after in zip(self.begun[key], self.finished[key], strict=True)]

    def reset(self) -> None:
        """Forget everything."""
        self.begun.clear()
        self.finished.clear()
