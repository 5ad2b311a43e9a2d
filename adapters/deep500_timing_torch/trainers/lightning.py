"""Times Lightning's ``Trainer``, of ``lightning`` and of ``pytorch_lightning``.

::

    from deep500_timing_torch.trainers.lightning import TimerCallback

    trainer = Trainer(callbacks=[TimerCallback()])      # or Trainer(profiler=TimerProfiler())
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from typing import TYPE_CHECKING, Any

from deep500_timing_torch.trainers._fit import BACKWARD, FIT, FORWARD, IO, OPTIMIZER, Fit, TrainerTimer, guarded

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
        self.begun_ns = 0
        self.tentative = False
        """Whether FORWARD is open, and is none unless a backward pass follows."""
        strategy, loop = trainer.strategy, trainer.fit_loop
        epoch, precision = loop.epoch_loop, strategy.precision_plugin
        fit = self.fit = Fit(timer, strategy.root_device.type)
        fit.wrap_evaluation(trainer, "_run_sanity_check", "sanity check")
        fit.wrap_evaluation(epoch.val_loop, "run")
        fit.wrap(loop, "on_advance_start", before=fit.begin_epoch)
        fit.wrap(loop, "on_advance_end", after=fit.end_epoch, failed=lambda _error: fit.end_epoch())
        fit.wrap(epoch, "advance", before=self._ask, failed=self._no_batch)
        fit.wrap(epoch, "_broadcast_sigterm_tensor", "signal check")
        fit.wrap(epoch, "_on_before_fetch", after=lambda: fit.start(IO))
        fit.wrap(epoch, "_on_after_fetch", before=self._fetched)
        if fit.on_device:
            fit.wrap(strategy, "batch_to_device", "copy")
        # An optimizer calls what computes the gradients: its own time begins after that.
        fit.wrap(precision, "_after_closure", after=self._begin_optimizer)
        if trainer.lightning_module.automatic_optimization:
            fit.wrap(epoch.automatic_optimization, "run", before=self._begin, after=self._stepped)
            fit.wrap(strategy, "training_step", FORWARD, before=lambda: fit.end(OPTIMIZER))
            fit.wrap(strategy, "backward", BACKWARD)
            fit.wrap(strategy, "optimizer_step", after=lambda: fit.end(OPTIMIZER))
        else:
            fit.wrap(epoch.manual_optimization, "run", before=self._begin, after=self._stepped)
            fit.wrap(strategy, "training_step", before=lambda: fit.start(FORWARD), after=self._end_of_step)
            fit.wrap(strategy, "backward", BACKWARD, before=self._end_forward, after=self._begin_tentative)
            fit.wrap(strategy, "optimizer_step", after=self._begin_tentative)
        for name in ("clip_grad_by_norm", "clip_grad_by_value"):
            fit.wrap(precision, name, "clip")
        fit.wrap(trainer._logger_connector, "log_metrics", "logging")
        fit.wrap_checkpoint(trainer, "save_checkpoint")
        fit.start(FIT)

    # --- batches -----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        self.begun_ns = self.fit.timer.now_ns()
        self.fit.begin_data(self.begun_ns)

    def _no_batch(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            self.fit.batch_ns = 0

    def _fetched(self) -> None:
        # Called in a `finally` clause: there may be no data.
        error = sys.exc_info()[1]
        if isinstance(error, StopIteration):
            self.fit.cancel(IO)
        else:
            self.fit.end(IO, failed=error is not None)

    def _begin(self) -> None:
        if not self.fit.batch_ns:
            step = self.trainer.fit_loop.epoch_loop._batches_that_stepped
            if step and not self.fit.batches_ns:
                self.fit.restored(step)
            self.fit.begin_batch(self.begun_ns, step)
        if not self.fit.marks or self.fit.marks[-1][1] < self.begun_ns:
            self.fit.mark(IO)  # it was fetched ahead

    def _stepped(self) -> None:
        if self.trainer.accumulate_grad_batches == 1 or not self.trainer.fit_loop._should_accumulate():
            self.fit.end_batch()

    # --- steps -------------------------------------------------------------------------------------------------------

    def _begin_optimizer(self) -> None:
        self._drop_tentative()
        self.fit.start(OPTIMIZER)

    def _begin_tentative(self) -> None:
        # Under manual optimization, what follows may be the forward pass of another loss.
        self.fit.end(OPTIMIZER)
        self.fit.start(FORWARD)
        self.tentative = True

    def _end_forward(self) -> None:
        self.tentative = False
        self.fit.end(OPTIMIZER)  # one that computes its gradients again
        self.fit.end(FORWARD)

    def _drop_tentative(self) -> None:
        if self.tentative:
            self.fit.cancel(FORWARD)
            self.tentative = False

    def _end_of_step(self) -> None:
        self._drop_tentative()
        self.fit.end(FORWARD)
