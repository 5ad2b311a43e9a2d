"""What came in since a reset."""

from __future__ import annotations

from collections import deque

KEPT_SINCE_RESET = 65_536
"""Times that a mean stands on at most, the latest ones; sums and counts stand on all."""


class Totals:
    """What came in since a reset: the sum exactly, and the latest times one by one."""

    __slots__ = ("count", "durations_ns", "expected", "missing", "total_ns")

    def __init__(self, kept: int = KEPT_SINCE_RESET) -> None:
        """Start empty; keep so many times one by one."""
        self.durations_ns: deque[int] = deque(maxlen=kept)
        self.total_ns = 0
        self.count = 0
        """Times that have arrived."""
        self.expected = 0
        """Times that were stopped, and have arrived or will."""
        self.missing = 0
        """Those of them that the device could not give."""

    def add(self, duration_ns: int) -> None:
        """Take in one time."""
        self.durations_ns.append(duration_ns)
        self.total_ns += duration_ns
        self.count += 1

    @property
    def complete(self) -> bool:
        """Whether nothing is on its way any more."""
        return self.count + self.missing >= self.expected

    def copy(self) -> Totals:
        """The same, which nothing is added to."""
        copied = Totals()
        copied.durations_ns = self.durations_ns.copy()
        copied.total_ns, copied.count = self.total_ns, self.count
        copied.expected, copied.missing = self.expected, self.missing
        return copied
