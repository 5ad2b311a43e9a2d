"""FORWARD and BACKWARD on torch, where each step runs as Python.

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
from deep500_timing.adapters import Watch
from deep500_timing_tensorflow._keras import warn_no_phases

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_tensorflow._epoch import Execution
    from deep500_timing_tensorflow._regions import FitRegions

FORWARD, BACKWARD = TimeType.FORWARD, TimeType.BACKWARD

_local = threading.local()


class TorchPhases:
    """Times the steps of one fit on torch.

    Steps that ask for no gradient, or for several, have no passes that could be told apart. The first step shows which
    kind a model's steps are; its passes are not timed.
    """

    def __init__(self, regions: FitRegions) -> None:
        self._regions = regions
        self._can_tell = False
        self._calls = 0
        self._inside: TimeType | None = None
        self._joined = True
        _WATCHED_GRADIENTS.__enter__()

    def leave(self) -> None:
        if self._joined:
            self._joined = False
            _WATCHED_GRADIENTS.__exit__()
        self._forget()

    def prepare_step(self, number: int) -> None:
        """The execution of that number is next."""

    def step_begins(self) -> None:
        self._calls = 0
        _steps().append(self)
        if self._can_tell:
            self._begin(FORWARD)

    def step_ends(self) -> None:
        if self not in _steps():
            return
        self._can_tell = self._calls == 1
        if self._inside is not None or not self._can_tell:
            self._regions.drop(self._inside or FORWARD)  # It has no known end.
            warn_no_phases()
        self._forget()

    def executed(self, execution: Execution) -> None:
        """An execution is over; its passes are recorded."""

    def settle(self) -> None:
        """Nothing: there are no stamps to be read."""

    def around_gradient(self, call: Callable[[], Any]) -> Any:
        """Ask PyTorch for a gradient, which is the backward pass if there is no other."""
        self._calls += 1
        if self._calls > 1 or self._inside is not FORWARD:
            return call()
        self._regions.end_and_add(FORWARD)
        self._begin(BACKWARD)
        result = call()
        self._regions.end_and_add(BACKWARD)
        self._inside = None
        return result

    def acts(self) -> bool:
        """Whether the step is running; after an exception no hook has ended it."""
        return self._joined and self._regions.is_running()

    def _begin(self, key: TimeType) -> None:
        self._inside = key
        self._regions.start(key, self._regions.gpu)

    def _forget(self) -> None:
        self._inside = None
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
        call = functools.partial(original, *args, **kwargs)
        for step in [step for step in _steps() if step.acts()]:
            call = functools.partial(step.around_gradient, call)
        return call()

    return gradient


_WATCHED_GRADIENTS = Watch(lambda: [(sys.modules["torch"].autograd, name, _watched) for name in ("backward", "grad")])
