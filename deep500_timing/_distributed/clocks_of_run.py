"""The clocks of a run's ranks: which of its logs can be laid side by side, and how exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing._distributed.clocks import (
    IDENTICAL,
    TABLE,
    ClockExchange,
    ClockFit,
    Reading,
    UncalibratedError,
    fit_clock,
)
from deep500_timing._distributed.gather import find_transport

if TYPE_CHECKING:
    from deep500_timing._distributed.transport import Transport
    from deep500_timing.runs import Run

_APART_NS = 1_000_000_000
"""Two processes that find a clock this far apart in Unix time do not read one clock."""


@dataclass(frozen=True)
class Clocks:
    """How the clocks of a run lie to the reference's, rank 0's where it is there."""

    reference: int
    session: int
    fits: dict[int, ClockFit]
    """The known ones, by rank."""
    uncalibrated: dict[int, str]
    """Ranks with times that cannot be compared with the reference's, and the reason."""

    def of(self, rank: int) -> ClockFit:
        """A rank's clock.

        Raises:
            UncalibratedError: It is not known how it lies to the reference's.
        """
        fit = self.fits.get(rank)
        if fit is None:
            why = self.uncalibrated.get(rank, "the run has no such rank")
            raise UncalibratedError(
                f"Comparing the clock of rank {rank} with that of rank {self.reference}: {why}. "
                "Call deep500_timing.ranks.keep_clocks on every rank of the next run."
            )
        return fit


def clocks_of(run: Run, *, session: int | None = None) -> Clocks:
    """How the clocks of a run's ranks lie to each other.

    Ranks of one host share a clock, if their timers have the system's and it shows about the same Unix time. Those of
    others need the round trips that ``keep_clocks`` has written; Unix time is not trusted for it, as nothing says how
    well hosts agree on it.

    Args:
        run: The run.
        session: Which start of the ranks; the last one if None.
    """
    logs = run.table("logs").rows()
    last = max(int(row["session"]) for row in logs) if session is None else session
    here = [row for row in logs if row["session"] == last and row["host"] is not None]
    hosts = {int(row["rank"]): (row["host"], row["clock"]) for row in here}
    unix_ns = {int(row["rank"]): row["unix_offset_ns"] for row in here}
    reference = min(hosts, default=0)

    def is_one(rank: int, other: int) -> bool:
        # Machines may have one name, such as containers; their clocks have not begun at one moment.
        offsets = unix_ns[rank], unix_ns[other]
        apart = 0 if None in offsets else abs(offsets[0] - offsets[1])
        return hosts[rank] == hosts[other] and hosts[rank][1] == "perf_counter_ns" and apart < _APART_NS

    readings: dict[int, list[Reading]] = {}
    if TABLE in run.tables:
        for row in run.table(TABLE).rows():
            if row["session"] == last and row["reference"] == reference:
                trip = Reading(row["time_ns"], row["reference_ns"], row["received_ns"])
                readings.setdefault(int(row["rank"]), []).append(trip)
    fits, unknown = {}, {}
    for rank in sorted(hosts):
        if rank == reference or is_one(rank, reference):
            fits[rank] = IDENTICAL
            continue
        try:
            fits[rank] = fit_clock(readings.get(rank, ()))
        except UncalibratedError as error:
            # Another rank of the same host has the same clock.
            unknown[rank] = str(error)
    for rank in list(unknown):
        for other, fit in fits.items():
            if is_one(rank, other):
                fits[rank] = fit
                del unknown[rank]
                break
    return Clocks(reference, last, dict(sorted(fits.items())), unknown)


def keep_clocks(timer: Any, *, transport: Transport | None = None, every_s: float = 60.0) -> ClockExchange | None:
    """Compare this rank's clock with rank 0's now and then, and write it into the timer's run. Every rank calls it.

    Args:
        timer: One with a run.
        transport: What connects the ranks, for this alone; found out if None.
        every_s: Seconds between comparisons.

    Returns:
        The running comparison, with a method to stop it; None for a single process.

    Raises:
        ValueError: The timer has no run, or nothing connects the ranks.
    """
    log = timer.run
    if log is None:
        raise ValueError("keep_clocks: the timer has no run to write to; Timer(run='folder') has one.")
    transport = find_transport() if transport is None else transport
    if transport is None:
        raise ValueError("keep_clocks: nothing connects the ranks; pass transport=.")
    if transport.world_size == 1:
        return None
    clone = getattr(transport, "clone", None)
    log.declare(TABLE, time_ns="time", received_ns="int", reference_ns="int", burst="int", reference="int")

    def record(reading: Reading, burst: int) -> None:
        log.add(TABLE, (reading.sent_ns, reading.received_ns, reading.reference_ns, burst, 0))

    return ClockExchange(transport if clone is None else clone(), timer.now_ns, record, every_s=every_s)
