"""The stamps of phases, which become intervals of the timer."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from deep500_timing import TimeType
from deep500_timing_tensorflow._execution import IO, Execution, Stamps, first
from deep500_timing_tensorflow._keras import warn_no_phases, warn_traced_before

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing_tensorflow._regions import FitRegions

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD

TOLERANCE_NS = 50_000
"""Tolerance of stamps, which are whole microseconds, at the two ends of an execution."""

_SETTLE_EVERY = 256
"""Batches after which the stamps are read."""


class Phases:
    """Times the passes inside an execution; the matcher of each fit that wants them joins it."""

    has_stamps = False
    """Whether the passes come as stamps, and not as regions of the timer."""

    def join(self, matcher: PhaseMatcher) -> None:
        raise NotImplementedError

    def leave(self, matcher: PhaseMatcher) -> None:
        raise NotImplementedError

    def prepare_step(self, number: int) -> None:
        """The execution of that number is next."""

    def step_begins(self, matcher: PhaseMatcher) -> None:
        raise NotImplementedError

    def step_ends(self, matcher: PhaseMatcher) -> None:
        raise NotImplementedError

    def drain(self) -> int:
        """Hand over the stamps that were taken, and return how many were lost."""
        return 0


class PhaseMatcher:
    """Turns stamps into intervals of one callback's timer."""

    def __init__(self, regions: FitRegions, withheld: Callable[[int], None] = lambda batches: None) -> None:
        self.regions = regions
        self.stamps_io = False
        """Whether IO is taken from the stamps."""
        self._withheld = withheld
        self._executions: deque[Execution] = deque()
        self._stamps: deque[Stamps] = deque()

    def forget(self) -> None:
        self._executions.clear()
        self._stamps.clear()

    def take(self, stamps: Iterable[Stamps]) -> None:
        """Take the stamps of a graph, in order."""
        self._stamps.extend(stamps)

    def pass_begins(self, key: TimeType) -> None:
        self.regions.start(key, self.regions.gpu)

    def pass_is_unknown(self, key: TimeType) -> None:
        """The step ended inside a pass, so the pass has no known end."""
        self.regions.drop(key)
        warn_no_phases()

    def executed(self, execution: Execution, phases: Phases) -> None:
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
            # Another callback's steps before the next execution carry the same number, and come after its own.
            own = stamps.get(execution.number, [])[: execution.steps]
            if len(own) < execution.steps:
                if lost or own:
                    self._withhold(execution.steps - len(own))
                elif phases.has_stamps:
                    warn_traced_before()
            self.match(execution, own)

    def match(self, execution: Execution, batches: list[Stamps]) -> None:
        free_ns = execution.began_ns
        wait_ns = 0
        for position, stamps in enumerate(batches):
            untold = math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s)
            if untold:
                warn_no_phases()
            elif _contradicts(stamps, execution):
                self._withhold(1)
                continue
            data_ns = _place_ns(stamps.data_s, execution)
            if not untold:
                loss_ns, gradients_ns = (_place_ns(at_s, execution) for at_s in (stamps.loss_s, stamps.gradients_s))
                self._record(FORWARD, data_ns, loss_ns, execution.steady)
                self._record(BACKWARD, loss_ns, gradients_ns, execution.steady)
            if self.stamps_io and (position > 0 or execution.steady):
                # The part of a fetch that overlaps with the training on the batch before is no wait.
                waited_ns = max(data_ns - free_ns, 0)
                self._record(IO, data_ns - waited_ns, data_ns, True)
                wait_ns += waited_ns
            free_ns = _place_ns(stamps.end_s, execution)
        if self.stamps_io and batches and not execution.steady:
            self._record_first_wait(execution, wait_ns)

    def _record_first_wait(self, execution: Execution, others_ns: int) -> None:
        # The trace lies between the begin of the execution and the first stamp, so that wait is tf.data's sum without
        # the other waits; where fetches overlap with training it is at most that.
        if execution.wait_ns is None:
            self._fail(IO)
            return
        waited_ns = min(max(execution.wait_ns - others_ns, 0), execution.took_ns)
        self._record(IO, execution.began_ns, execution.began_ns + waited_ns, True)

    def _record(self, key: TimeType, began_ns: int, ended_ns: int, steady: bool) -> None:
        self.regions.record(key if steady else first(key), began_ns, ended_ns)

    def _withhold(self, batches: int) -> None:
        self._withheld(batches)
        for _ in range(batches):
            self._fail(FORWARD)
            self._fail(BACKWARD)
            if self.stamps_io:
                self._fail(IO)

    def _fail(self, key: TimeType) -> None:
        self.regions.timer.start(key)
        self.regions.timer.fail(key)


def _place_ns(stamp_s: float, execution: Execution) -> int:
    """The moment of a stamp on the timer's clock, within its execution.

    A float of seconds since 1970 is 238 ns coarse and a stamp is a whole number of microseconds, so it is rounded to
    one. A place outside the execution comes from that rounding and from reading two clocks.
    """
    place_ns = round(stamp_s * 1e6) * 1_000 - execution.began_unix_ns + execution.began_ns
    return min(max(place_ns, execution.began_ns), execution.began_ns + execution.took_ns)


def _contradicts(stamps: Stamps, execution: Execution) -> bool:
    slack_s = TOLERANCE_NS / 1e9
    inside = stamps.data_s >= execution.began_unix_ns / 1e9 - slack_s and (
        stamps.gradients_s <= execution.ended_unix_ns / 1e9 + slack_s
    )
    in_order = stamps.data_s <= stamps.loss_s <= stamps.gradients_s
    room_s = execution.took_ns / 1e9 + slack_s
    return not (inside and in_order and stamps.gradients_s - stamps.data_s <= room_s)
