"""The clocks of a run's ranks: which of its logs can be laid side by side, and how exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deep500_timing._across.clocks import (
    IDENTICAL,
    TABLE,
    ClockExchange,
    ClockFit,
    Reading,
    UncalibratedError,
    fit_clock,
)
from deep500_timing._across.gather import find_transport

if TYPE_CHECKING:
    from deep500_timing._across.transport import Transport
    from deep500_timing.runs import Run


@dataclass(frozen=True)
class Clocks:
    """How the clocks of a run lie to the reference's, rank 0's where it is there."""

    reference: int
    session: int
    fits: dict[int, ClockFit]
    """By rank, those that are known."""
    uncalibrated: dict[int, str]
    """Ranks whose times cannot be laid beside the reference's, and why."""

    def of(self, rank: int) -> ClockFit:
        """A rank's clock.

        Raises:
            UncalibratedError: It is not known how it lies to the reference's.
        """
        fit = self.fits.get(rank)
        if fit is None:
            why = self.uncalibrated.get(rank, "the run has no such rank")
            raise UncalibratedError(
                f"Laying rank {rank} beside rank {self.reference}: {why}. Call deep500_timing.ranks.keep_clocks on "
                "every rank of the next run."
            )
        return fit


def clocks_of(run: Run, *, session: int | None = None) -> Clocks:
    """How the clocks of a run's ranks lie to each other.

    Ranks of one host share a clock, if their timers have the system's. Those of others need the round trips that
    ``keep_clocks`` has written; Unix time is not trusted for it, as nothing says how well hosts agree on it.

    Args:
        run: The run.
        session: Which start of the ranks; the last one if None.
    """
    logs = run.table("logs").rows()
    last = max(int(row["session"]) for row in logs) if session is None else session
    hosts = {int(r["rank"]): (r["host"], r["clock"]) for r in logs if r["session"] == last and r["host"] is not None}
    reference = min(hosts, default=0)
    readings: dict[int, list[Reading]] = {}
    if TABLE in run.tables:
        for row in run.table(TABLE).rows():
            if row["session"] == last and row["reference"] == reference:
                trip = Reading(row["time_ns"], row["reference_ns"], row["received_ns"])
                readings.setdefault(int(row["rank"]), []).append(trip)
    fits, unknown = {}, {}
    for rank, place in sorted(hosts.items()):
        if rank == reference or (place == hosts[reference] and place[1] == "perf_counter_ns"):
            fits[rank] = IDENTICAL
            continue
        try:
            fits[rank] = fit_clock(readings.get(rank, ()))
        except UncalibratedError as error:
            # Another rank of the same host has the same clock.
            unknown[rank] = str(error)
    for rank in list(unknown):
        for other, fit in fits.items():
            if hosts[other] == hosts[rank] and hosts[rank][1] == "perf_counter_ns":
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
        What does it, to be stopped; None for a process by itself.

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
