"""Records the checkpoints of Keras's own callbacks, ``ModelCheckpoint`` and ``BackupAndRestore``, while a fit lasts."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import Replaced
from deep500_timing_tensorflow import _keras

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing import Timer


_KINDS = {"ModelCheckpoint", "BackupAndRestore"}
_METHODS = {"_save_model": "CHECKPOINT", "_backup": "CHECKPOINT", "_load_model": "load checkpoint"}
"""The methods of Keras 3 and tf_keras that save and restore, and their regions."""


def time_checkpoints(timer: Timer, callbacks: Any) -> Callable[[], object]:
    """Time the saves and restores of a list's callbacks, and mark them in the run for goodput."""
    replaced = Replaced()
    for callback in () if callbacks is None else callbacks.callbacks:
        if _KINDS.isdisjoint(kind.__name__ for kind in type(callback).__mro__):
            continue
        for name, region in _METHODS.items():
            if callable(getattr(callback, name, None)) and name not in vars(callback):
                replaced.put(callback, name, _timed(timer, callback, getattr(callback, name), region))
    return replaced.undo


def _timed(timer: Timer, callback: Any, original: Callable[..., Any], region: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        best, begun_ns = getattr(callback, "best", None), timer.now_ns()
        with timer.region(region):
            result = original(*args, **kwargs)
        is_saved = not getattr(callback, "save_best_only", False) or callback.best != best
        if timer.run is not None and is_saved:
            what = "checkpoint_saved" if region == "CHECKPOINT" else "checkpoint_restored"
            timer.run.mark(what, step=_last_step(callback), dur_s=(timer.now_ns() - begun_ns) / 1e9)
        return result

    return call


def _last_step(callback: Any) -> int | None:
    # Of the optimizer's count, which a restored checkpoint sets; -1 before the first step.
    try:
        model = callback.model  # On JAX this brings the model's variables up to date.
        return int(model.optimizer.iterations) // _keras.steps_per_execution(model) - 1
    except Exception:
        return None
