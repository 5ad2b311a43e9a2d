"""The use of a thread's time: on a processor, waiting for one, or blocked; and what the machine did meanwhile."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deep500_timing._base.arrays import Floats
from deep500_timing._base.sql import array_of
from deep500_timing._summary.nesting import distinct
from deep500_timing.runs._checks import FAR
from deep500_timing.runs._machine import LEVELS, RATES


class ClockParts(NamedTuple):
    """Times in seconds that add up to the wall clock."""

    wall_s: float
    ran_s: float
    waited_s: float
    """Ready to run, and without a processor."""

    @property
    def blocked_s(self) -> float:
        """Neither: waiting for a disk, a network, a lock, a device, another thread."""
        return max(self.wall_s - self.ran_s - self.waited_s, 0.0)

    @property
    def waited(self) -> float:
        """The share of the time in which it waited for a processor."""
        return self.waited_s / self.wall_s if self.wall_s else 0.0

    @property
    def blocked(self) -> float:
        """The share of the time in which it was blocked."""
        return self.blocked_s / self.wall_s if self.wall_s else 0.0


class ThreadTimes:
    """The readings of one thread of one rank, and what lies between them by interpolation."""

    def __init__(self, run: Any, rank: int, thread: int, session: int | None = None) -> None:
        self._of: dict[int, NDArray[np.int64]] = {}
        """By session: times, sums on a processor and sums of waiting, in ns; shape ``(3, n)``."""
        only = "" if session is None else f"and session = {int(session)} "
        table = run.sql(
            f"select session, time_ns, ran_ns, waited_ns from processor where rank = {int(rank)} "
            f"and thread = {int(thread)} {only}order by session, time_ns"
        ).arrow()
        sessions = np.asarray(array_of(table["session"]), np.int64)
        rows = np.stack([np.asarray(array_of(table[name]), np.int64) for name in ("time_ns", "ran_ns", "waited_ns")])
        # The sums of a thread only rise: where they fall, another thread goes on in its place. They seem to fall a
        # little where a reader lost the processor between the clock and the sums. A kernel that does not count tells
        # zeros.
        for one in distinct(sessions):
            times, *sums = rows[:, sessions == one]
            later = np.minimum.accumulate(np.flip(sums, axis=1), axis=1)[:, ::-1]
            if later[0, -1] > 0 and (sums - later).max() <= _LATE_NS:
                self._of[one] = np.stack((times, *later))

    def __bool__(self) -> bool:
        return any(rows.shape[1] > 1 for rows in self._of.values())

    @property
    def whole(self) -> ClockParts:
        """From the first reading to the last, without the time between sessions."""
        wall, ran, waited = sum((rows[:, -1] - rows[:, 0] for rows in self._of.values()), np.zeros(3)) / 1e9
        return ClockParts(float(wall), float(ran), float(waited))

    @property
    def longest(self) -> tuple[int, int, int]:
        """The session with most readings, and the times of its first and its last one in ns."""
        session = max(self._of, key=lambda one: self._of[one].shape[1])
        return session, int(self._of[session][0, 0]), int(self._of[session][0, -1])

    def between(self, sessions: NDArray[np.int64], starts_s: Floats, ends_s: Floats) -> tuple[Floats, Floats]:
        """Seconds on a processor and seconds waiting for one in spans of time; NaN where there are no readings."""
        ran, waited = np.full((2, len(starts_s)), np.nan)
        for session, (times, *sums) in self._of.items():
            spans = np.flatnonzero(sessions == session)
            spans = spans[ends_s[spans] * 1e9 > times[0]]
            for found, total in zip((ran, waited), sums, strict=True):
                at = [np.interp(ends[spans] * 1e9, times, total) for ends in (starts_s, ends_s)]
                found[spans] = (at[1] - at[0]) / 1e9
        return ran, waited

    def parts(self, session: int, start_ns: int, end_ns: int) -> ClockParts | None:
        """The parts of one span; None without readings."""
        ran, waited = self.between(np.array([session]), np.array([start_ns / 1e9]), np.array([end_ns / 1e9]))
        if np.isnan(ran[0]):
            return None
        return ClockParts((end_ns - start_ns) / 1e9, float(ran[0]), float(waited[0]))


class Machine(NamedTuple):
    """Means over a time; None where nothing told them."""

    cores: int | None
    """Processors that the process may use."""
    of_machine: int | None
    rates: dict[str, float]
    """The columns of the table ``machine`` that are known."""
    not_told: tuple[str, ...] = ()
    """The sources of the kernel that were missing."""

    def sum_of(self, *names: str) -> float | None:
        """The sum of some columns; None if one is unknown."""
        return sum(self.rates[name] for name in names) if all(name in self.rates for name in names) else None

    @property
    def wanted(self) -> float | None:
        """Processors that the process and its workers ran on or waited for."""
        return self.sum_of("process_cores", "process_waiting", "workers_cores", "workers_waiting")

    @property
    def others(self) -> float | None:
        """Processors that other processes used."""
        busy, own = self.sum_of("busy_cores"), self.sum_of("process_cores", "workers_cores")
        return None if busy is None or own is None else max(busy - own, 0.0)

    def neighbours(self) -> str:
        """As ``"other processes use 1.7 of 2 cores"``; empty if unknown."""
        others, cores = self.others, self.of_machine
        return "" if others is None or not cores else f"other processes use {others:.1f} of {cores} cores"


def machine_of(run: Any, rank: int, span_ns: tuple[int, int] | None = None, session: int | None = None) -> Machine:
    """The work of a rank's machine: means over the rows in a span of time on the timers' clock, or else around it."""
    only = "" if session is None else f"and session = {int(session)} "
    header = run.sql(f"select header from logs where rank = {int(rank)} {only}order by session, segment limit 1").rows()
    about: Any = json.loads(header[0]["header"]).get("machine", {}) if header else {}
    first, last = map(int, span_ns or (-FAR, FAR))
    # A row is about the time since the one before it. Most of that is to lie in the span.
    inside = f"least(time_ns, {last}) - greatest(before_ns, {first}) >= 0.8 * (time_ns - before_ns)"
    means = ", ".join(f"coalesce(avg(case when {inside} then {of} end), avg({of})) as {of}" for of in (*RATES, *LEVELS))
    row = run.sql(
        f"with spans as (select *, coalesce(lag(time_ns) over (partition by session order by time_ns), "
        f"time_ns - {_ROW_NS}) as before_ns from machine where rank = {int(rank)} {only}) "
        f"select {means} from spans where time_ns between {first + 1} and {last + _ROW_NS}"
    ).rows()[0]
    rates = {name: float(value) for name, value in row.items() if value is not None}
    return Machine(about.get("usable_cpus"), about.get("cpus"), rates, tuple(about.get("not_told") or ()))


_LATE_NS = 1_000_000_000
"""How long a reader may have had no processor between the clock and the sums."""
_ROW_NS = 1_200_000_000
"""The time from one row to the next, and a little."""
