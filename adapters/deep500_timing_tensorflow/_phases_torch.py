"""FORWARD and BACKWARD on torch, where each step runs as Python.

The passes run one after the other on the calling thread and the current stream, so the timer's own regions serve, on
the GPU as well if the timer has a clock of the torch adapter. The forward pass goes from the train function's entry to
the call of ``backward``, which is the backward pass. That call is watched, in PyTorch and not on the model.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deep500_timing import TimeType
from deep500_timing.adapters import Watch
from deep500_timing_tensorflow._keras import warn_no_phases

if TYPE_CHECKING:
    from deep500_timing_tensorflow._regions import Execution, Regions

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD


class _Running(threading.local):
    def __init__(self) -> None:
        self.steps: list[TorchPhases] = []
        """Those of the fit that runs on this thread: one for each callback that wants phases."""


_running = _Running()


class TorchPhases:
    """Times the steps of one fit on torch.

    Steps that ask for no gradient, or for several, have no passes that could be told apart. The first step shows which
    kind a model's steps are; its passes are not timed.
    """

    def __init__(self, fit: Regions) -> None:
        self.fit = fit
        self._can_tell = False
        self._calls = 0
        _WATCHED_GRADIENTS.__enter__()

    def leave(self) -> None:
        _WATCHED_GRADIENTS.__exit__()
        self._forget()

    def step_begins(self) -> None:
        self._calls = 0
        _running.steps.append(self)
        if self._can_tell:
            self.fit.start(FORWARD, self.fit.gpu)

    def step_ends(self) -> None:
        if self not in _running.steps:
            return
        self._can_tell = self._calls == 1
        for key in (FORWARD, BACKWARD):
            self.fit.drop(key)  # One that is still open has no known end.
        if not self._can_tell:
            warn_no_phases()
        self._forget()

    def executed(self, execution: Execution) -> None:
        """The passes are recorded already."""

    def settle(self) -> None:
        pass

    def around_gradient(self, call: Callable[[], Any]) -> Any:
        """Ask PyTorch for a gradient, which is the backward pass if there is no other."""
        self._calls += 1
        if FORWARD not in self.fit.open:
            return call()
        self.fit.end(FORWARD)
        self.fit.start(BACKWARD, self.fit.gpu)
        result = call()
        self.fit.end(BACKWARD)
        return result

    def _forget(self) -> None:
        if self in _running.steps:
            _running.steps.remove(self)


def _watched(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        call = functools.partial(original, *args, **kwargs)
        for phases in _running.steps:
            if phases.fit.is_running():  # After an exception no hook has ended the step.
                call = functools.partial(phases.around_gradient, call)
        return call()

    return gradient


_WATCHED_GRADIENTS = Watch(lambda: [(sys.modules["torch"].autograd, name, _watched) for name in ("backward", "grad")])
