"""Stamps of phases, matched to the executions that they were taken in, and checked against them."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from deep500_timing import TimeType
from deep500_timing_tensorflow._choices import say_no_passes
from deep500_timing_tensorflow._regions import first

if TYPE_CHECKING:
    from collections.abc import Iterable

FORWARD, BACKWARD, IO = TimeType.FORWARD, TimeType.BACKWARD, TimeType.IO

TOLERANCE_NS = 50_000
"""How far stamps in a graph, in whole microseconds, may lie outside of what the host saw of the execution."""

_SETTLE_EVERY = 256
"""Executions after which the stamps are read."""


class Execution(NamedTuple):
    """One call of a train function, as the host saw it."""

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


class Stamps(NamedTuple):
    """When a batch passed the anchors, in seconds since 1970; NaN for one that it did not pass."""

    data_s: float
    """The batch is there."""
    loss_s: float
    """The loss is there."""
    gradients_s: float
    """The gradients are there."""
    end_s: float
    """The step is done."""


class PhaseMatcher:
    """Turns stamps into intervals of one callback's timer.

    Args:
        timing: The callback's ``FitTiming``.
    """

    def __init__(self, timing: Any) -> None:
        """Nothing is waiting."""
        self.withheld = 0
        self.stamps_io = False
        self._timing = timing
        self._executions: deque[Execution] = deque()
        self._stamps: deque[Stamps] = deque()

    def forget(self) -> None:
        """Forget what waits to be matched: the fit was broken off."""
        self._executions.clear()
        self._stamps.clear()

    def take(self, stamps: Iterable[Stamps]) -> None:
        """Stamps that a graph has taken, in order."""
        self._stamps.extend(stamps)

    def executed(self, execution: Execution, phases: Any) -> None:
        """An execution is over."""
        self._executions.append(execution)
        if len(self._executions) * execution.steps >= _SETTLE_EVERY:
            self.settle(phases)

    def settle(self, phases: Any) -> None:
        """Read the stamps, and record the phases of every execution that is over."""
        if phases is None or not self._executions:
            return
        phases.drain()
        while self._executions:
            execution = self._executions.popleft()
            limit_ns = execution.ended_unix_ns + TOLERANCE_NS
            if self._executions:
                limit_ns = min(limit_ns, self._executions[0].began_unix_ns)
            limit_s = limit_ns / 1e9
            mine = []
            while self._stamps and not self._stamps[0].data_s > limit_s:
                mine.append(self._stamps.popleft())
            self.match(execution, mine)
        self._stamps.clear()

    def match(self, execution: Execution, batches: list[Stamps]) -> None:
        """Record the phases of the batches of one execution; an anchor that was not passed leaves them out."""
        offset_ns = execution.began_ns - execution.began_unix_ns
        before_s = execution.began_unix_ns / 1e9
        for position, stamps in enumerate(batches):
            if math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s):
                say_no_passes()
                continue
            if _contradicts(stamps, before_s, execution):
                self._withhold()
                continue
            self._keep(FORWARD, stamps.data_s, stamps.loss_s, offset_ns, execution.steady)
            self._keep(BACKWARD, stamps.loss_s, stamps.gradients_s, offset_ns, execution.steady)
            if self.stamps_io and (position > 0 or execution.steady):
                # What was fetched while the batch before it ran was not waited for.
                self._keep(IO, min(before_s, stamps.data_s), stamps.data_s, offset_ns, True)
            before_s = stamps.end_s

    def _keep(self, key: TimeType, began_s: float, ended_s: float, offset_ns: int, steady: bool) -> None:
        # The length comes from the two stamps; only the place on the timer's clock from the offset.
        took_ns = round((ended_s - began_s) * 1e9)
        began_ns = round(began_s * 1e9) + offset_ns
        kept_as = key if steady else first(key)
        self._timing.timer.record(kept_as, began_ns, began_ns + took_ns)
        if self._timing.tally is not None:
            self._timing.tally.add(kept_as, took_ns)

    def _withhold(self) -> None:
        self.withheld += 1
        for key in (FORWARD, BACKWARD):
            self._timing.timer.start(key)
            self._timing.timer.fail(key)


def _contradicts(stamps: Stamps, earliest_s: float, execution: Execution) -> bool:
    slack_s = TOLERANCE_NS / 1e9
    inside = stamps.data_s >= execution.began_unix_ns / 1e9 - slack_s and (
        stamps.gradients_s <= execution.ended_unix_ns / 1e9 + slack_s
    )
    in_order = stamps.data_s <= stamps.loss_s <= stamps.gradients_s
    room_s = (execution.ended_ns - execution.began_ns) / 1e9 + slack_s
    return not (inside and in_order and stamps.gradients_s - stamps.data_s <= room_s)
