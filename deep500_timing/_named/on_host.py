"""The times of a named timer on the host's clock."""

from __future__ import annotations

from collections import deque
from threading import RLock
from typing import TYPE_CHECKING

from deep500_timing._named.totals import Totals

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing._recording.recorder import Region

_UNDRAINED = 1024
"""Stops that may wait to be added up before a stop does it itself."""


class HostTimes:
    """Adds up what a named timer's stops have left, for the thread that reads, whichever it is.

    A stop leaves its interval in ``fresh``, in one step, and goes on. Readers add up under a lock that no stop waits
    for. A timer that is running is read without stopping it: what it has run so far is counted, and left out of its
    interval when that comes.
    """

    __slots__ = (
        "_counted_from",
        "_drained",
        "_ended_ns",
        "_inside",
        "_lifetime",
        "_lock",
        "_recorded",
        "_totals",
        "fresh",
    )

    def __init__(self) -> None:
        """Nothing has come yet."""
        self.fresh: deque[tuple[int, int, bool]] = deque()
        """Intervals that are not added up yet: start and end in ns, and whether ``stop(record=True)`` left it."""
        self._totals = Totals()
        self._lifetime = Totals(kept=0)
        self._recorded = Totals()
        self._lock = RLock()
        self._inside = False
        self._drained: tuple[int, int, bool] | None = None  # The interval that was added up last.
        self._ended_ns = 0
        # Start of the running interval that was read, and up to where it is counted. One that was forgotten since is
        # known by its start.
        self._counted_from: tuple[int, int] | None = None

    def add(self, start_ns: int, end_ns: int, record: bool) -> None:
        """Take in an interval. Never waits."""
        self.fresh.append((start_ns, end_ns, record))
        self.tidy()

    def tidy(self) -> None:
        """Add up if much has gathered and nobody else does."""
        if len(self.fresh) > _UNDRAINED and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        # A signal handler or finalizer may come in between on this thread; what it finds undone is done after it.
        if self._inside:
            return
        self._inside = True
        try:
            fresh = self.fresh
            while fresh:
                interval = fresh[0]
                # An interrupt may have come between adding it up and taking it away.
                if interval is not self._drained:
                    self._count(*interval)
                    self._drained = interval
                fresh.popleft()
        finally:
            self._inside = False

    def _count(self, start_ns: int, end_ns: int, record: bool) -> None:
        self._ended_ns = max(self._ended_ns, end_ns)
        counted, self._counted_from = self._counted_from, None
        if counted is None or counted[0] != start_ns:
            duration_ns = max(end_ns - start_ns, 0)  # a clock of the user's own may run backwards
            self._add(duration_ns)
        else:
            # The reader's clock may have been read after the stop's: then it has counted too much.
            duration_ns = end_ns - counted[1]
            self._add(duration_ns)
        if record:
            self._recorded.add(duration_ns)
            self._recorded.expected += 1

    def _add(self, duration_ns: int) -> None:
        for totals in (self._totals, self._lifetime):
            totals.add(duration_ns)
            totals.expected += 1

    def _count_running(
        self, region: Region, now: Callable[[], int], before_restart: Callable[[], object] | None
    ) -> None:
        start_ns, counted = region._opened_ns(), self._counted_from
        known = counted is not None and counted[0] == start_ns
        if not region.is_open or (start_ns < self._ended_ns and not known):
            return
        now_ns = now()
        self._add(max(now_ns - (counted[1] if counted is not None and known else start_ns), 0))
        if before_restart is not None:
            before_restart()
            now_ns = now()
        self._counted_from = (start_ns, now_ns)

    def read(
        self,
        region: Region,
        now: Callable[[], int],
        *,
        reset: bool = False,
        before_restart: Callable[[], object] | None = None,
    ) -> Totals:
        """What came since the last reset, with what a running timer has run so far.

        Args:
            region: The timer's.
            now: The host's clock.
            reset: Begin anew from zero, in the same step.
            before_restart: Called before the time of a running timer goes on.
        """
        with self._lock:
            self._drain()
            self._count_running(region, now, before_restart)
            return self.take() if reset else self._totals.copy()

    def take(self) -> Totals:
        """What came since the last reset, beginning anew; a running timer's time so far is not in it."""
        with self._lock:
            self._drain()
            totals, self._totals = self._totals, Totals()
            return totals

    def ended_ns(self) -> int:
        """The latest end of an interval, 0 if none has come."""
        with self._lock:
            self._drain()
            return self._ended_ns

    def lifetime(self) -> Totals:
        """What ever came; only its sums."""
        with self._lock:
            self._drain()
            return self._lifetime

    def recorded(self, *, reset: bool = False) -> Totals:
        """What ``stop(record=True)`` kept."""
        with self._lock:
            self._drain()
            totals = self._recorded.copy()
            if reset:
                self._recorded = Totals()
            return totals
