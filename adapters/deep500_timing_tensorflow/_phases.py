"""Stamps of phases, matched to the executions that they were taken in, and checked against them."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from deep500_timing import TimeType
from deep500_timing_tensorflow._capabilities import say_no_passes, say_traced_before
from deep500_timing_tensorflow._open_regions import first

if TYPE_CHECKING:
    from collections.abc import Iterable

    from deep500_timing import Timer
    from deep500_timing_tensorflow._epoch_totals import EpochTotals
    from deep500_timing_tensorflow._phases_contract import Phases, Stamps
    from deep500_timing_tensorflow._wishes import Wishes

FORWARD, BACKWARD, IO = TimeType.FORWARD, TimeType.BACKWARD, TimeType.IO

TOLERANCE_NS = 50_000
"""How far stamps in a graph, in whole microseconds, may lie outside of what the host saw of the execution."""

_SETTLE_EVERY = 256
"""Executions after which the stamps are read."""


class PhaseTimes(Protocol):
    """Where the passes go: a fit, or a loop of one's own."""

    timer: Timer
    totals: EpochTotals | None


class Execution(NamedTuple):
    """One call of a train function, as the host saw it."""

    number: int
    """Which of a fit's it is."""
    began_ns: int
    """On the timer's clock."""
    ended_ns: int
    began_unix_ns: int
    """On the system's clock, which the stamps are of."""
    ended_unix_ns: int
    steps: int
    """Batches in it."""
    steady: bool
    """Whether it neither traced nor compiled."""


class PhaseMatcher:
    """Turns stamps into intervals of one callback's timer.

    Args:
        times: Where they go.
        wishes: The callback's, which counts over all its fits.
    """

    def __init__(self, times: PhaseTimes, wishes: Wishes | None = None) -> None:
        """Nothing is waiting."""
        self.withheld = 0
        self._wishes = wishes
        self.stamps_io = False
        self._times = times
        self._executions: deque[Execution] = deque()
        self._stamps: deque[Stamps] = deque()

    def forget(self) -> None:
        """Forget what waits to be matched: the fit was broken off."""
        self._executions.clear()
        self._stamps.clear()

    def take(self, stamps: Iterable[Stamps]) -> None:
        """Stamps that a graph has taken, in order."""
        self._stamps.extend(stamps)

    def executed(self, execution: Execution, phases: Phases) -> None:
        """An execution is over."""
        self._executions.append(execution)
        if len(self._executions) * execution.steps >= _SETTLE_EVERY:
            self.settle(phases)

    def settle(self, phases: Phases | None) -> None:
        """Read the stamps, and record the phases of every execution that is over."""
        if phases is None or not self._executions:
            return
        lost = phases.drain()
        stamps: dict[int, list[Stamps]] = {}
        for row in self._stamps:
            stamps.setdefault(row.number, []).append(row)
        self._stamps.clear()
        while self._executions:
            execution = self._executions.popleft()
            # Steps that somebody else ran before the next execution come after this one's own.
            own = stamps.get(execution.number, [])[: execution.steps]
            if len(own) < execution.steps:
                if lost or own:
                    self._withhold(execution.steps - len(own))
                elif phases.has_stamps:
                    say_traced_before()
            self.match(execution, own)

    def match(self, execution: Execution, batches: list[Stamps]) -> None:
        """Record the phases of the batches of one execution; an anchor that was not passed leaves them out."""
        free_ns = execution.began_ns
        for position, stamps in enumerate(batches):
            if math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s):
                say_no_passes()
                continue
            if _contradicts(stamps, execution):
                self._withhold(1)
                continue
            data_ns, loss_ns, gradients_ns = (
                _place_ns(stamp_s, execution) for stamp_s in (stamps.data_s, stamps.loss_s, stamps.gradients_s)
            )
            self._keep(FORWARD, data_ns, loss_ns, execution.steady)
            self._keep(BACKWARD, loss_ns, gradients_ns, execution.steady)
            if self.stamps_io and (position > 0 or execution.steady):
                # What was fetched while the batch before it ran was not waited for.
                self._keep(IO, min(free_ns, data_ns), data_ns, True)
            free_ns = _place_ns(stamps.end_s, execution)

    def _keep(self, key: TimeType, began_ns: int, ended_ns: int, steady: bool) -> None:
        kept_as = key if steady else first(key)
        self._times.timer.record(kept_as, began_ns, ended_ns)
        if self._times.totals is not None:
            self._times.totals.add(kept_as, ended_ns - began_ns)

    def _withhold(self, batches: int) -> None:
        self.withheld += batches
        if self._wishes is not None:
            self._wishes.withheld += batches
        for key in (FORWARD, BACKWARD) * batches:
            self._times.timer.start(key)
            self._times.timer.fail(key)


def _place_ns(stamp_s: float, execution: Execution) -> int:
    """Where a stamp lies on the timer's clock.

    Seconds since 1970 tell moments 238 ns apart as a float, and a stamp is of whole microseconds: it is made one again,
    so that all edges are told from one integer. What lies outside of the execution is not of it but of that rounding,
    and of the time between the two readings of the host's clocks; the phases of a batch never lie outside of BATCH.
    """
    place_ns = round(stamp_s * 1e6) * 1_000 - execution.began_unix_ns + execution.began_ns
    return min(max(place_ns, execution.began_ns), execution.ended_ns)


def _contradicts(stamps: Stamps, execution: Execution) -> bool:
    slack_s = TOLERANCE_NS / 1e9
    inside = stamps.data_s >= execution.began_unix_ns / 1e9 - slack_s and (
        stamps.gradients_s <= execution.ended_unix_ns / 1e9 + slack_s
    )
    in_order = stamps.data_s <= stamps.loss_s <= stamps.gradients_s
    room_s = (execution.ended_ns - execution.began_ns) / 1e9 + slack_s
    return not (inside and in_order and stamps.gradients_s - stamps.data_s <= room_s)
