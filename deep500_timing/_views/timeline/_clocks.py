"""Puts the times of all ranks on one clock, if the clocks were compared."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.clocks_of_run import clocks_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing._distributed.clocks import ClockFit
    from deep500_timing._distributed.clocks_of_run import Clocks
    from deep500_timing.runs import Run

NOT_COMPARED = "clock not compared"


class Place:
    """Converts times of one rank's clock to Unix time of the reference clock."""

    def __init__(self, offset_ns: int, fit: ClockFit | None = None, said: str = "") -> None:
        self._offset_ns, self._fit, self.said = offset_ns, fit, said

    def __call__(self, times_ns: Iterable[int]) -> list[int]:
        """Times of the clock as Unix time in ns."""
        if self._fit is None:
            return [time + self._offset_ns for time in times_ns]
        placed: list[int] = (self._fit.on_reference(list(times_ns)) + self._offset_ns).tolist()
        return placed


class Places:
    """The conversions of a run's ranks."""

    def __init__(self, run: Run, sessions: list[dict[str, Any]]) -> None:
        self._logs = {(row["rank"], row["session"]): row for row in run.table("logs").rows()}
        self._hosts = {row["host"] for row in sessions}
        self._clocks = cache(lambda session: clocks_of(run, session=session))

    def first_ns(self, logs: list[dict[str, Any]]) -> int:
        """The earliest start in these rows of the table of logs, in Unix time; 0 if unknown."""
        known = [log for log in logs if log["first_unix_ns"] is not None]
        return min((self.of(log)([log["first_unix_ns"] - log["unix_offset_ns"]])[0] for log in known), default=0)

    def of(self, log: dict[str, Any]) -> Place:
        """The conversion for one rank's session."""
        own = Place(log["unix_offset_ns"] or 0)
        if len(self._hosts) < 2:
            # One host has one Unix time.
            return own
        clocks: Clocks = self._clocks(log["session"])
        reference = self._logs[clocks.reference, log["session"]]
        if log["host"] == reference["host"]:
            return own
        fit = clocks.fits.get(log["rank"])
        if fit is None or reference["unix_offset_ns"] is None:
            own.said = NOT_COMPARED
            return own
        return Place(reference["unix_offset_ns"], fit, f"clock ± {_width(fit, log)}")


def say_what_is_not_compared(run: Run, places: Places, sessions: list[dict[str, Any]]) -> None:
    """Warn of ranks on other hosts without compared clocks."""
    apart = sorted({log["rank"] for log in sessions if places.of(log).said == NOT_COMPARED})
    if apart:
        shown = ", ".join(map(str, apart[:8])) + (f" and {len(apart) - 8} more" if len(apart) > 8 else "")
        warn_once(
            f"The clock of rank {shown} was not compared with that of the first rank, which is on another host. The "
            "timeline uses each host's Unix time; ranks may be shifted by the difference of the hosts' clocks. Call "
            "deep500_timing.ranks.keep_clocks on every rank of the next run.",
            key=f"clocks {run.folders[0]} {shown}",
        )


def _width(fit: ClockFit, log: dict[str, Any]) -> str:
    import numpy as np

    from deep500_timing._summary.text import format_time

    ends = [time for time in (log["first_unix_ns"], log["last_unix_ns"]) if time is not None]
    times = [time - (log["unix_offset_ns"] or 0) for time in ends] or list(fit.at_ns)
    return format_time(float(np.max(fit.uncertainty_ns(times))) / 1e9)
