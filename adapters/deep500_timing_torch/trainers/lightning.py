"""Times Lightning's ``Trainer``, of ``lightning`` and of ``pytorch_lightning``.

::

    from deep500_timing_torch.trainers.lightning import TimerCallback

    trainer = Trainer(callbacks=[TimerCallback()])      # or Trainer(profiler=TimerProfiler())
"""

from __future__ import annotations

import functools
import sys
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

from deep500_timing.loop import BACKWARD, COPY, FORWARD, IO, STEP
from deep500_timing_torch.trainers._fit import CLIP, FIT, Fit, TrainerTimer, guarded

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.profilers import Profiler

    from deep500_timing import Timer
else:
    # Lightning asks a callback for its hooks, not for its class: a callback of either package serves both.
    _names = ["lightning.pytorch", "pytorch_lightning"]
    _names.sort(key=lambda name: name not in sys.modules)
    _package = _names[0] if find_spec(_names[0].partition(".")[0]) else _names[1]
    Callback = import_module(_package).Callback
    Profiler = import_module(f"{_package}.profilers").Profiler

__all__ = ["TimerCallback", "TimerProfiler"]

_FOLDED = {"run_training_epoch", "run_training_batch", "optimizer_step", "save_checkpoint"}
_FOLDED |= {"backward", "batch_to_device", "configure_gradient_clipping", "train_dataloader_next", "training_step"}
"""Actions of Lightning, or the ends of their names, that the regions of the callback cover."""


class TimerCallback(TrainerTimer, Callback):  # type: ignore[misc, unused-ignore]
    """Times ``fit``: EPOCH, BATCH, IO, copies, FORWARD, BACKWARD, optimizer, logging, validation, checkpoints.

    A BATCH is one optimizer step with all its micro-batches. Under manual optimization it is one ``training_step``,
    and FORWARD is the time before each ``manual_backward``. The callback may serve several trainings, one after the
    other; ``timer`` keeps the times of all.

    Args:
        timer: The timer to record with; None makes one.
    """

    @guarded
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """The training begins."""
        self._end(failed=True)  # one that ended unseen
        self._training = _Training(self.timer, trainer)

    @guarded
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The training has ended."""
        self._end(failed=False)

    @guarded
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """An exception has ended it, or Ctrl-C."""
        self._end(failed=True)

    @guarded
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """A tuner has ended it."""
        self._end(failed=False)


class TimerProfiler(TrainerTimer, Profiler):  # type: ignore[misc, unused-ignore]
    """Times ``fit`` as :class:`TimerCallback` does, and actions that the program names itself.

    Args:
        timer: The timer to record with; None makes one.
        actions: Whether each other action of Lightning is a region too, by its name, such as
            ``[Callback]ModelCheckpoint.on_train_epoch_end``.
    """

    _lightning_module: Any

    def __init__(self, timer: Timer | None = None, *, actions: bool = False) -> None:
        super().__init__(timer)
        Profiler.__init__(self)
        self.actions = actions
        self._callback = TimerCallback(self.timer)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its own timer."""
        return {name: value for name, value in super().__getstate__().items() if name != "_lightning_module"}

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Time the training that is about to begin."""
        super().setup(stage, local_rank, log_dir)
        self._add_callback()

    @guarded
    def _add_callback(self) -> None:
        callbacks = self._lightning_module.trainer.callbacks
        if not any(isinstance(one, TimerCallback) for one in callbacks):
            callbacks.insert(0, self._callback)

    @guarded
    def start(self, action_name: str) -> None:
        """An action begins."""
        if self._is_region(action_name):
            self.timer.start(action_name)

    @guarded
    def stop(self, action_name: str) -> None:
        """It ends."""
        if self._is_region(action_name):
            self.timer.end(action_name)

    def summary(self) -> str:
        """The table of all times, which Lightning logs at the end."""
        table = StringIO()
        self.timer.print_all_time_stats(table)
        return table.getvalue()

    def _is_region(self, action: str) -> bool:
        if action.startswith("[") or action in _FOLDED:
            return self.actions and action.rpartition(".")[2] not in _FOLDED
        return True


class _Training:
    """One call of ``Trainer.fit``."""

    def __init__(self, timer: Timer, trainer: Any) -> None:
        self.trainer = trainer
        strategy, loop = trainer.strategy, trainer.fit_loop
        epoch, precision = loop.epoch_loop, strategy.precision_plugin
        fit = self.fit = Fit(timer, strategy.root_device.type)
        fit.wrap_evaluation(trainer, "_run_sanity_check", "sanity check")
        fit.wrap_evaluation(epoch.val_loop, "run")
        fit.wrap(loop, "on_advance_start", before=fit.begin_epoch)
        fit.wrap(loop, "on_advance_end", after=fit.end_epoch, failed=lambda _error: fit.end_epoch())
        fit.wrap(epoch, "advance", before=self._ask)
        fit.wrap(epoch, "_broadcast_sigterm_tensor", "signal check")
        fit.wrap(epoch, "_on_before_fetch", after=lambda: fit.begin(IO))
        # Called in a `finally` clause: there may be no data.
        fit.wrap(epoch, "_on_after_fetch", before=lambda: fit.end(IO, sys.exc_info()[1]))
        if fit.on_device:
            fit.wrap(strategy, "batch_to_device", COPY)
        # An optimizer calls what computes the gradients: its own time begins after that.
        fit.wrap(precision, "_after_closure", after=lambda: self._begin(STEP))
        if trainer.lightning_module.automatic_optimization:
            fit.wrap(epoch.automatic_optimization, "run", after=self._stepped)
            fit.wrap(strategy, "training_step", FORWARD, before=lambda: fit.end(STEP))
            fit.wrap(strategy, "backward", BACKWARD)
            fit.wrap(strategy, "optimizer_step", after=lambda: fit.end(STEP))
        else:
            # What follows a backward pass or a step may be the forward pass of another loss.
            forward = functools.partial(self._begin, FORWARD)
            fit.wrap(epoch.manual_optimization, "run", after=self._stepped)
            fit.wrap(strategy, "training_step", before=forward, after=lambda: fit.cancel(FORWARD))
            fit.wrap(strategy, "backward", BACKWARD, before=self._end, after=forward)
            fit.wrap(strategy, "optimizer_step", after=forward)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            fit.wrap(precision, name, CLIP)
        fit.wrap(trainer._logger_connector, "log_metrics", "logging")
        fit.wrap_checkpoint(trainer, "save_checkpoint")
        fit.begin(FIT)

    def _ask(self) -> None:
        fit = self.fit
        if fit.loops.first_step is None:
            fit.restored(self.trainer.fit_loop.epoch_loop._batches_that_stepped)
        fit.begin_data(fit.timer.now_ns())

    def _stepped(self) -> None:
        if self.trainer.accumulate_grad_batches == 1 or not self.trainer.fit_loop._should_accumulate():
            self.fit.loop.complete_step()

    def _begin(self, part: int) -> None:
        self.fit.cancel(FORWARD)  # no backward pass has followed
        self.fit.end(STEP)
        self.fit.begin(part)

    def _end(self) -> None:
        self.fit.end(STEP)  # of an optimizer that computes its gradients again
        self.fit.end(FORWARD)
