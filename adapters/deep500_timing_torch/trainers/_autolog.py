"""The plug-ins of ``deep500-timing run`` for the trainers: the callback in each Trainer that has none."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch._autolog._patches import followed
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.trainers._fit import _logs

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Autolog


def install_transformers(log: Autolog) -> Callable[[], None]:
    """Add the callback to each ``transformers.Trainer`` from now on. The Trainer's log stays unchanged."""

    def add(trainer: Any) -> None:
        from deep500_timing_torch.trainers.huggingface import TimerCallback

        if not any(isinstance(one, TimerCallback) for one in trainer.callback_handler.callbacks):
            callback = TimerCallback(log.timer(CPUGPUTimer), prefix=None)
            trainer.add_callback(callback)
            callback.on_init_end(trainer.args, trainer.state, trainer.control)

    return _after_init(log, sys.modules["transformers.trainer"].Trainer, add)


def install_lightning(log: Autolog) -> Callable[[], None]:
    """Add the callback to each ``lightning.Trainer`` from now on."""
    return _install_lightning(log, "lightning.pytorch.trainer.trainer")


def install_pytorch_lightning(log: Autolog) -> Callable[[], None]:
    """As :func:`install_lightning`, for ``pytorch_lightning``."""
    return _install_lightning(log, "pytorch_lightning.trainer.trainer")


def _install_lightning(log: Autolog, module: str) -> Callable[[], None]:
    def add(trainer: Any) -> None:
        from deep500_timing_torch.trainers.lightning import TimerCallback, TimerProfiler

        given = [*trainer.callbacks, trainer.profiler]
        if not any(isinstance(one, (TimerCallback, TimerProfiler)) for one in given):
            trainer.callbacks.insert(0, TimerCallback(log.timer(CPUGPUTimer)))

    return _after_init(log, sys.modules[module].Trainer, add)


def _after_init(log: Autolog, kind: Any, add: Callable[[Any], None]) -> Callable[[], None]:
    def made(_result: None, _start_ns: int, trainer: Any, *_: Any) -> None:
        if log.closed:
            return
        try:
            add(trainer)
        except Exception as error:
            warn_once(
                f"Adding the timer's callback to {kind.__name__} failed: {type(error).__name__}: {error}. Its training "
                "is timed as any other loop."
            )

    replaced = Replaced()
    replaced.put(kind, "__init__", followed(kind.__init__, made))
    _logs.append(log)

    def undo() -> None:
        _logs.remove(log)
        replaced.undo()

    return undo
