"""The plug-ins of ``deep500-timing run`` for the trainers: the callback in each Trainer that has none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import Replaced, warn_once
from deep500_timing_torch._autolog._patches import followed
from deep500_timing_torch._timer import CPUGPUTimer
from deep500_timing_torch.trainers._fit import _logs

if TYPE_CHECKING:
    from deep500_timing import Autolog


def _add_to_transformers(log: Autolog, trainer: Any) -> None:
    # The Trainer's own log stays unchanged.
    from deep500_timing_torch.trainers.huggingface import TimerCallback

    if not any(isinstance(one, TimerCallback) for one in trainer.callback_handler.callbacks):
        callback = TimerCallback(log.timer(CPUGPUTimer), prefix=None)
        trainer.add_callback(callback)
        callback.on_init_end(trainer.args, trainer.state, trainer.control)


def _add_to_lightning(log: Autolog, trainer: Any) -> None:
    from deep500_timing_torch.trainers.lightning import TimerCallback, TimerProfiler

    if not any(isinstance(one, (TimerCallback, TimerProfiler)) for one in (*trainer.callbacks, trainer.profiler)):
        trainer.callbacks.insert(0, TimerCallback(log.timer(CPUGPUTimer)))


def _install(module: str, add: Callable[[Autolog, Any], None], log: Autolog) -> Callable[[], None]:
    kind: Any = sys.modules[module].Trainer

    def made(_result: None, _start_ns: int, trainer: Any, *_: Any) -> None:
        if log.closed:
            return
        try:
            add(log, trainer)
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


install_transformers = partial(_install, "transformers.trainer", _add_to_transformers)
install_lightning = partial(_install, "lightning.pytorch.trainer.trainer", _add_to_lightning)
install_pytorch_lightning = partial(_install, "pytorch_lightning.trainer.trainer", _add_to_lightning)
