"""The host clock. What any clock must do stands in ``protocols.py``."""

from __future__ import annotations

from time import perf_counter_ns


class HostClock:
    """The monotonic clock of highest resolution that the system has: that of :func:`time.perf_counter_ns`."""

    @staticmethod
    def now_ns() -> int:
        """The time in nanoseconds since an arbitrary moment."""
        return perf_counter_ns()

    def __repr__(self) -> str:
        """Name the clock."""
        return "HostClock()"
