"""FORWARD and BACKWARD: the stamps of a graph, which become intervals of the timer, and the passes on torch.

On torch each step runs as Python. The passes run one after the other on the calling thread and the current stream, so
the timer's own regions serve, on the GPU as well if the timer has a clock of the torch adapter. The forward pass goes
from the train function's entry to the call of ``backward``, which is the backward pass. That call is watched, in
PyTorch and not on the model. Stamps on TensorFlow are in ``_phases_graph``, which has the methods of ``TorchPhases``.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

from deep500_timing import TimeType
from deep500_timing.adapters import Watch
from deep500_timing_tensorflow._execution import Execution, Stamps, first
from deep500_timing_tensorflow._keras import warn_no_phases, warn_traced_before

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from deep500_timing_tensorflow._regions import FitRegions

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD

TOLERANCE_NS = 50_000
"""Tolerance of stamps, which are whole microseconds, at the two ends of an execution."""

_SETTLE_EVERY = 256
"""Batches after which the stamps are read."""


class PhaseMatcher:
    """Turns stamps into intervals of one callback's timer."""

    def __init__(self, regions: FitRegions, withheld: Callable[[int], None] = lambda batches: None) -> None:
        self.regions = regions
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

    def executed(self, execution: Execution, phases: Any) -> None:
        self._executions.append(execution)
        if len(self._executions) * execution.steps >= _SETTLE_EVERY:
            self.settle(phases)

    def settle(self, phases: Any) -> None:
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
        for stamps in batches:
            if math.isnan(stamps.loss_s) or math.isnan(stamps.gradients_s):
                warn_no_phases()
            elif _contradicts(stamps, execution):
                self._withhold(1)
            else:
                data_ns, loss_ns, gradients_ns = (
                    _place_ns(at_s, execution) for at_s in (stamps.data_s, stamps.loss_s, stamps.gradients_s)
                )
                self._record(FORWARD, data_ns, loss_ns, execution.steady)
                self._record(BACKWARD, loss_ns, gradients_ns, execution.steady)

    def _record(self, key: TimeType, began_ns: int, ended_ns: int, steady: bool) -> None:
        self.regions.record(key if steady else first(key), began_ns, ended_ns)

    def _withhold(self, batches: int) -> None:
        self._withheld(batches)
        for key in (FORWARD, BACKWARD) * batches:
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


_local = threading.local()


class TorchPhases:
    """Times the steps of one fit on torch.

    Steps that ask for no gradient, or for several, have no passes that could be told apart. The first step shows which
    kind a model's steps are; its passes are not timed.
    """

    has_stamps = False
    """Whether the passes come as stamps, and not as regions of the timer."""

    def __init__(self) -> None:
        self._joined = False
        self._can_tell = False
        self._calls = 0
        self._inside: TimeType | None = None
        self._matcher: PhaseMatcher | None = None

    def join(self, matcher: PhaseMatcher) -> None:
        if not self._joined:
            self._joined = True
            _WATCHED_GRADIENTS.__enter__()

    def leave(self, matcher: PhaseMatcher) -> None:
        if self._joined:
            self._joined = False
            _WATCHED_GRADIENTS.__exit__()
        self._forget()

    def prepare_step(self, number: int) -> None:
        """The execution of that number is next."""

    def drain(self) -> int:
        """Hand over the stamps that were taken, and return how many were lost."""
        return 0

    def step_begins(self, matcher: PhaseMatcher) -> None:
        self._calls = 0
        self._matcher = matcher
        _steps().append(self)
        if self._can_tell:
            self._inside = FORWARD
            matcher.pass_begins(FORWARD)

    def step_ends(self, matcher: PhaseMatcher) -> None:
        if self._matcher is None:
            return
        self._can_tell = self._calls == 1
        if self._inside is not None or not self._can_tell:
            self._matcher.pass_is_unknown(self._inside or FORWARD)
        self._forget()

    def around_gradient(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Ask PyTorch for a gradient, which is the backward pass if there is no other."""
        self._calls += 1
        if self._calls > 1 or self._inside is not FORWARD or self._matcher is None:
            return call(*args, **kwargs)
        matcher = self._matcher
        self._inside = BACKWARD
        matcher.regions.end_and_add(FORWARD)
        matcher.pass_begins(BACKWARD)
        result = call(*args, **kwargs)
        matcher.regions.end_and_add(BACKWARD)
        self._inside = None
        return result

    def acts(self) -> bool:
        """Whether the step is running; after an exception no hook has ended it."""
        return self._matcher is not None and self._matcher.regions.is_running()

    def _forget(self) -> None:
        self._matcher = self._inside = None
        if self in _steps():
            _steps().remove(self)


def _steps() -> list[TorchPhases]:
    # Those of the fit that runs on this thread: one for each callback that wants phases.
    found: list[TorchPhases] | None = getattr(_local, "steps", None)
    if found is None:
        found = _local.steps = []
    return found


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = original
        for step in [step for step in _steps() if step.acts()]:
            call = functools.partial(_around, step, call)
        return call(*args, **kwargs)

    return gradient


def _around(step: TorchPhases, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return step.around_gradient(call, args, kwargs)


_WATCHED_GRADIENTS = Watch(lambda: [(sys.modules["torch"].autograd, name, _watched) for name in ("backward", "grad")])
