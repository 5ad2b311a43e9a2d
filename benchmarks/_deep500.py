"""The design that this package replaces, for comparison: two lists per key, appended to on each call.

Written for the benchmark from its documented behaviour. The keys are members of an ordinary ``Enum``, which hashes in
Python, and the start and the end of a region each go to a list of their own; the times are made when asked for.
"""

from __future__ import annotations

import time
from collections import defaultdict
from enum import Enum, auto


class Key(Enum):
    """What is timed."""

    EPOCH = auto()
    BATCH = auto()
    FORWARD = auto()
    BACKWARD = auto()
    COMM = auto()
    IO = auto()
    OTHER = auto()


class ListTimer:
    """A start and an end per region, kept for ever."""

    def __init__(self) -> None:
        self.starts: dict[Key, list[float]] = defaultdict(list)
        self.ends: dict[Key, list[float]] = defaultdict(list)

    def start(self, key: Key) -> None:
        """Open a region.

        Raises:
            RuntimeError: It is open.
        """
        if len(self.starts[key]) != len(self.ends[key]):
            raise RuntimeError(f"{key} is started already")
        self.starts[key].append(time.perf_counter())

    def end(self, key: Key) -> None:
        """Close a region.

        Raises:
            RuntimeError: It is not open.
        """
        if len(self.starts[key]) != len(self.ends[key]) + 1:
            raise RuntimeError(f"{key} is not started")
        self.ends[key].append(time.perf_counter())

    def get_time(self, key: Key) -> list[float]:
        """Seconds of each region."""
        return [end - start for start, end in zip(self.starts[key], self.ends[key], strict=True)]

    def reset(self) -> None:
        """Forget everything."""
        self.starts.clear()
        self.ends.clear()
