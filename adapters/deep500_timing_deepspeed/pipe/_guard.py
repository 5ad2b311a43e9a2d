"""Context managers around the parts of a batch: their times, and one error for every failure."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from deep500_timing_torch.pipeline._actions import Kind
    from deep500_timing_torch.pipeline._recorder import Recorder

__all__ = ["Guard", "Timed"]


class Timed:
    """Times a part of a batch."""

    def __init__(self, recorder: Recorder, kind: Kind) -> None:
        self._recorder, self._kind = recorder, kind
        self._start_ns = 0

    def __enter__(self) -> None:
        self._start_ns = self._recorder.now_ns()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if error is None:
            self._recorder.put(self._kind, -1, -1, self._start_ns, self._recorder.now_ns())


class Guard:
    """Turns every failure in a batch into one error that names the rank at fault."""

    def __init__(self, engine: Any, doing: str) -> None:
        self._engine, self._doing = engine, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        explained = self._engine.faults.explain(self._doing, error, own=not came_from_others(error))
        self._engine.broken = str(explained)
        raise explained from error


_WORDS = ("timed out", "timeout", "connect", "broken pipe", "gloo", "nccl", "socket")
_TALKS = ("torch.distributed", "deep500_timing_torch.pipeline._calls", "deep500_timing_torch.comm")


def came_from_others(error: BaseException) -> bool:
    """Whether an operation between ranks failed, rather than this rank's own layers, loss or data.

    Backends raise plain ``RuntimeError``, so its text is asked; but only where the operation itself raised it. A
    layer's own "could not connect" is the layer's.
    """
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_in = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and raised_in.startswith(_TALKS) and any(word in text for word in _WORDS)
