"""FORWARD and BACKWARD on Keras's torch backend, where each step runs as Python.

The passes run one after the other on the calling thread and the current stream, so the timer's own regions serve, on
the GPU as well if the timer has a clock of the torch adapter. The forward pass goes from the train function's entry to
the call of ``backward``, which is the backward pass. That call is watched, in PyTorch and not on the model.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import TYPE_CHECKING, Any

from deep500_timing import TimeType
from deep500_timing_tensorflow._checkpoints import Watch
from deep500_timing_tensorflow._phases import Phases

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._phases import PhaseMatcher

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD

_local = threading.local()


class TorchPhases(Phases):
    """Times the steps of one fit on torch.

    Steps that ask for no gradient, or for several, have no passes that could be told apart. The first step shows which
    kind a model's steps are; its passes are not timed.
    """

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
