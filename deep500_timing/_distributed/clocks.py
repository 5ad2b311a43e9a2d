"""One clock for the hosts of a job: the offset of each rank's clock from the reference's, with its uncertainty.

A rank reads its clock, asks the reference for its own, and reads again. The reference answered between the two
readings, so the offset lies between ``reference - received`` and ``reference - sent``. These are bounds; symmetric
delays are not assumed. In a burst of such round trips clocks hardly drift, so all bounds hold at once: the middle of
what they leave is the offset, half its width the uncertainty (Cristian, "Probabilistic clock synchronization", 1989).
Between bursts the offset is interpolated, which removes a constant drift. A changing drift widens the uncertainty.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deep500_timing._base.warn import warn_once
from deep500_timing._distributed.connection import pauses
from deep500_timing._distributed.exchange import DEADLINE_S
from deep500_timing._distributed.launchers import rank_and_world
from deep500_timing._distributed.transport import Transport, find_transport

if TYPE_CHECKING:
    from deep500_timing.runs import Run

TABLE = "clock_readings"
"""The table of a run that has the round trips: ``time_ns`` (of the first reading), ``received_ns``, ``reference_ns``,
``burst``, ``reference``."""
MOST_DRIFT = 1e-4
"""By how much two clocks may drift apart where only one burst is known: 50 ppm each, of opposite signs."""
BURST = 8
_APART_NS = 1_000_000_000
"""Round trips that lie closer together than this are one burst."""
_ONE_CLOCK_NS = 1_000_000_000
"""Two processes that find a clock this far apart in Unix time do not read one clock."""
_QUICK_S = 0.0005
_PAUSE_S = 1.0
"""After a fault of the transport; twice as long after each further one."""
_LONGEST_PAUSE_S = 600.0
_PACKED = struct.Struct("<q")
_ASK, _ANSWER = "clock/ask", "clock/answer"


class Reading(NamedTuple):
    """One round trip, in nanoseconds."""

    sent_ns: int
    """On this rank's clock, before asking."""
    reference_ns: int
    """On the reference's, while it answered."""
    received_ns: int
    """On this rank's clock, after the answer."""


class UncalibratedError(ValueError):
    """A clock's offset from the reference is unknown."""


@dataclass(frozen=True, slots=True)
class ClockFit:
    """How a clock lies to the reference's. Times are in nanoseconds of the clock itself."""

    at_ns: tuple[int, ...]
    offset_ns: tuple[float, ...]
    """The reference's time minus this clock's, then."""
    half_width_ns: tuple[float, ...]
    """By how much each may be wrong."""

    @property
    def drift(self) -> float | None:
        """By how much the reference runs faster, as a share (1e-6 is 1 ppm); None if one burst is all that is known."""
        if len(self.at_ns) < 2:
            return None
        return (self.offset_ns[-1] - self.offset_ns[0]) / (self.at_ns[-1] - self.at_ns[0])

    def on_reference(self, times_ns: ArrayLike) -> NDArray[np.int64]:
        """Times of this clock on the reference's, in ns, of the same shape."""
        times = np.asarray(times_ns, dtype=np.int64)
        moved = times - self.at_ns[0]  # Doubles hold no nanoseconds since 1970.
        return np.asarray(times + np.rint(self._offsets(moved)).astype(np.int64))

    def uncertainty_ns(self, times_ns: ArrayLike) -> NDArray[np.float64]:
        """By how much :meth:`on_reference` may be wrong, in ns, of the same shape."""
        moved = np.asarray(times_ns, dtype=np.int64) - self.at_ns[0]
        at = np.array(self.at_ns, dtype=np.int64) - self.at_ns[0]
        widths = np.array(self.half_width_ns)
        inside = np.interp(moved, at, widths)
        beyond = np.maximum(np.maximum(at[0] - moved, moved - at[-1]), 0)
        if len(at) == 1:
            return np.asarray(inside + MOST_DRIFT * beyond)
        slopes = np.diff(self.offset_ns) / np.diff(at)
        # The drift may change between two bursts as much as from one stretch to the next.
        change = float(np.abs(np.diff(slopes)).max(initial=0.0))
        distance = np.abs(moved[..., None] - at).min(axis=-1)
        slope_error = float((widths[:-1] + widths[1:]).min() / np.diff(at).max())
        return np.asarray(inside + change * np.minimum(distance, np.diff(at).max()) + (slope_error + change) * beyond)

    def _offsets(self, moved: Any) -> Any:
        at = np.array(self.at_ns, dtype=np.int64) - self.at_ns[0]
        offsets = np.array(self.offset_ns)
        base = offsets[0]
        found = np.interp(moved, at, offsets - base)
        drift = self.drift or 0.0
        found = np.where(moved < 0, drift * moved, found)
        found = np.where(moved > at[-1], offsets[-1] - base + drift * (moved - at[-1]), found)
        return found + base


IDENTICAL = ClockFit((0, 1), (0.0, 0.0), (0.0, 0.0))


def fit_clock(readings: Iterable[Reading]) -> ClockFit:
    """How a clock lies to the reference's, from round trips in any order."""
    ordered = sorted(readings)
    if not ordered:
        raise UncalibratedError("no round trip to the reference is known")
    bursts = [[ordered[0]]]
    for before, reading in pairwise(ordered):
        if reading.sent_ns - before.received_ns > _APART_NS:
            bursts.append([])
        bursts[-1].append(reading)
    at, offsets, widths = [], [], []
    for burst in bursts:
        low = max(reading.reference_ns - reading.received_ns for reading in burst)
        high = min(reading.reference_ns - reading.sent_ns for reading in burst)
        length = burst[-1].received_ns - burst[0].sent_ns
        slack = MOST_DRIFT * length
        if low > high + slack:
            raise UncalibratedError(
                f"round trips within {length / 1e9:.1f} s contradict each other by {(low - high) / 1e6:.3f} ms: "
                "a clock was stepped"
            )
        at.append(burst[0].sent_ns + length // 2)
        offsets.append((low + high) / 2)
        widths.append(abs(high - low) / 2 + slack)
    return ClockFit(tuple(at), tuple(offsets), tuple(widths))


class ClockExchange:
    """Reads the reference's clock now and then, on its own thread, and hands on the round trips.

    Rank 0 is the reference and answers; every rank makes one.

    Args:
        transport: What connects the ranks; this thread has it to itself.
        now_ns: The clock: ``timer.now_ns``.
        record: Called with each round trip and the number of its burst, on this thread.
        every_s: Seconds between bursts.
    """

    def __init__(
        self,
        transport: Transport,
        now_ns: Callable[[], int],
        record: Callable[[Reading, int], object],
        *,
        every_s: float = 60.0,
    ) -> None:
        self._transport, self._now_ns, self._record = transport, now_ns, record
        self._every_s = every_s
        self._stop = threading.Event()
        self.bursts = 0
        work = self._answer if transport.rank == 0 else self._ask
        self._thread = threading.Thread(target=self._run, args=(work,), name="deep500-timing clock", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End it."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self, work: Callable[[], None]) -> None:
        pause_s = _PAUSE_S
        while not self._stop.is_set():
            try:
                work()
            except Exception as error:
                warn_once(
                    f"Comparing the clocks of hosts failed and is tried again in {pause_s:g} s, later each time: "
                    f"{type(error).__name__}: {error}. The training goes on.",
                    key="clock exchange",
                )
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _answer(self) -> None:
        others = range(1, self._transport.world_size)
        quick_until = 0.0
        pause_s = _QUICK_S
        while not self._stop.is_set():
            asked = self._transport.take(_ASK, 0, others)
            for sender, number in asked.items():
                answer = _PACKED.pack(self._now_ns()) + number[: _PACKED.size].ljust(_PACKED.size)
                self._transport.send(_ANSWER, sender, answer)
            if asked:
                quick_until = time.monotonic() + 0.2
            # A client that has asked once asks again at once. Without any, the pauses grow.
            pause_s = _QUICK_S if time.monotonic() < quick_until else min(pause_s * 1.5, 0.1)
            self._stop.wait(pause_s)

    def _ask(self) -> None:
        while not self._stop.is_set():
            for number in range(BURST):
                reading = self._round_trip(self.bursts * BURST + number)
                if reading is not None:
                    self._record(reading, self.bursts)
            self.bursts += 1
            self._stop.wait(self._every_s)

    def _round_trip(self, number: int) -> Reading | None:
        sent_ns = self._now_ns()
        self._transport.send(_ASK, 0, _PACKED.pack(number))
        for _ in pauses(time.monotonic() + DEADLINE_S):
            answer = self._transport.take(_ANSWER, self._transport.rank, [0]).get(0)
            received_ns = self._now_ns()
            # One that was given up may be answered later.
            if answer is not None and answer[_PACKED.size :] == _PACKED.pack(number):
                return Reading(sent_ns, _PACKED.unpack_from(answer)[0], received_ns)
            if self._stop.wait(_QUICK_S):
                return None
        return None


@dataclass(frozen=True)
class Clocks:
    """How the clocks of a run lie to the reference's, rank 0's where it is there."""

    reference: int
    session: int
    fits: dict[int, ClockFit]
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
        return hosts[rank] == hosts[other] and hosts[rank][1] == "perf_counter_ns" and apart < _ONE_CLOCK_NS

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
            unknown[rank] = str(error)
    for rank in list(unknown):
        # Another rank of the same host has the same clock.
        same = next((fit for other, fit in fits.items() if is_one(rank, other)), None)
        if same is not None:
            fits[rank] = same
            del unknown[rank]
    return Clocks(reference, last, dict(sorted(fits.items())), unknown)


def keep_clocks(timer: Any, *, transport: Transport | None = None, every_s: float = 60.0) -> ClockExchange | None:
    """Compare this rank's clock with rank 0's now and then, and write it into the timer's run. Every rank calls it.

    Args:
        timer: One with a run.
        transport: What connects the ranks, for this alone; the job's store if None.
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
    if (rank_and_world()[1] if transport is None else transport.world_size) == 1:
        return None
    if transport is None:
        raise ValueError(
            "keep_clocks: nothing connects the ranks. Call it after torch.distributed.init_process_group, or pass "
            "transport=StoreTransport(store, rank, world_size)."
        )
    clone = getattr(transport, "clone", None)
    log.declare(TABLE, time_ns="time", received_ns="int", reference_ns="int", burst="int", reference="int")

    def record(reading: Reading, burst: int) -> None:
        log.add(TABLE, (reading.sent_ns, reading.received_ns, reading.reference_ns, burst, 0))

    return ClockExchange(transport if clone is None else clone(), timer.now_ns, record, every_s=every_s)
