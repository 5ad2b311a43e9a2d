"""Times ``transformers.Trainer`` and the trainers built on it: TRL, PEFT, sentence-transformers.

::

    from deep500_timing_torch.trainers.huggingface import TimerCallback

    trainer = Trainer(model, args, train_dataset=data, callbacks=[TimerCallback()])
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import Trainer, TrainerCallback

from deep500_timing.loop import BACKWARD, COPY, FORWARD, STEP
from deep500_timing_torch._autolog._engine import hide
from deep500_timing_torch.trainers._data import Amounts, Data, Throughput, model_of, peak_of, throughput_of
from deep500_timing_torch.trainers._fit import CLIP, FIT, Fit, Means, TrainerTimer, guarded

if TYPE_CHECKING:
    from deep500_timing import Timer

__all__ = ["TimerCallback"]

_OF_TRL = (("_generate", "generate"), ("_calculate_rewards", "reward"))
"""Methods of TRL's online trainers, and their regions."""


class TimerCallback(TrainerTimer, TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Times a ``Trainer``: EPOCH, BATCH, IO, copies, FORWARD, BACKWARD, optimizer, logging, evaluation, checkpoints.

    A BATCH is one optimizer step with all its micro-batches. It begins where the Trainer asks for their data. The
    callback may serve several trainings, one after the other; ``timer`` keeps the times of all.

    Args:
        timer: The timer to record with; None makes one.
        prefix: Begins the names of the values that are added to the Trainer's log: ``time/BATCH_s``. None adds
            none.
        peak_flops: The dense peak of one device in FLOP/s, for the MFU; None looks the device up.
        flops_per_token: What one token costs, forward and backward, in FLOPs; None counts from the model's config.
    """

    def __init__(
        self,
        timer: Timer | None = None,
        *,
        prefix: str | None = "time",
        peak_flops: float | None = None,
        flops_per_token: float | None = None,
    ) -> None:
        super().__init__(timer)
        self.prefix = prefix
        self.peak_flops = peak_flops
        self.flops_per_token = flops_per_token
        self._last: Throughput | None = None

    @property
    def throughput(self) -> Throughput | None:
        """The rates of this rank in the last training, or the current one; None before the first."""
        return self._last if self._training is None else self._training.throughput()

    # --- the hooks of transformers -----------------------------------------------------------------------------------

    @guarded
    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Have the training begin and end here, however it ends."""
        trainer = _trainer_of(self)
        if trainer is not None:
            trainer._inner_training_loop = functools.partial(_run, self, trainer)

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training begins."""
        trainer = _trainer_of(self)
        if self._training is not None and self._training.trainer is not trainer:
            self._training.fit.close(failed=True)  # it has ended by an exception, unseen: the callback was added later
            self._training = None
        if self._training is None and trainer is not None:
            self._training = _Training(self, trainer)
        if self._training is not None:
            self._training.begin(state)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The training has ended."""
        self._end(failed=False)

    def _end(self, *, failed: bool) -> None:
        self._last = self.throughput
        if self._training is not None and self._last is not None and self.timer.run is not None:
            for name, value in self._last.per_rank().items():
                self.timer.run.sample(f"throughput.{name.removesuffix('_per_rank')}", value)
        super()._end(failed=failed)


def _run(callback: TimerCallback, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return type(trainer)._inner_training_loop(trainer, *args, **kwargs)
    except BaseException as error:
        hide(error)
        callback._end(failed=True)
        raise


def _trainer_of(callback: TimerCallback) -> Any:
    # Trainer hands itself to no callback, so it is found among the callers.
    frame = sys._getframe(2)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Trainer) and any(one is callback for one in found.callback_handler.callbacks):
            return found
        frame = frame.f_back  # type: ignore[assignment]
    return None


class _Training:
    """One call of ``Trainer.train``."""

    def __init__(self, callback: TimerCallback, trainer: Any) -> None:
        self.trainer = trainer
        self.logged, self.unlogged = Amounts(), Amounts()
        """The amounts up to the last log, and since then."""
        self.logged_ns = 0
        self.settings = callback
        self.means = Means(callback.prefix or "")
        args = trainer.args
        fit = self.fit = Fit(callback.timer, args.device.type)
        self.data = Data(fit)
        hooks = trainer.callback_handler
        fit.wrap(hooks, "on_epoch_begin", before=fit.begin_epoch)
        fit.wrap(hooks, "on_step_end", before=fit.loop.complete_step)
        fit.wrap(hooks, "on_epoch_end", after=fit.end_epoch)
        fit.wrap(trainer, "get_batch_samples", gets=self._got)
        if fit.on_device:
            fit.wrap(trainer, "_prepare_inputs", COPY)
        fit.wrap(trainer, "compute_loss", FORWARD)
        # DeepSpeed's engine steps its optimizer inside `accelerator.backward`.
        engine = getattr(getattr(trainer.accelerator, "deepspeed_engine_wrapped", None), "engine", None)
        fit.wrap(engine or trainer.accelerator, "backward", BACKWARD)
        fit.wrap(trainer.optimizer if engine is None else engine, "step", STEP)
        fit.wrap(trainer.accelerator, "clip_grad_norm_", CLIP)
        fit.wrap(trainer, "log", "logging", sees=self._log)
        fit.wrap_checkpoint(trainer, "_save_checkpoint")
        fit.wrap_evaluation(trainer, "evaluate")
        for name, region in _OF_TRL:
            fit.wrap(trainer, name, region)
        fit.wrap(getattr(trainer, "vllm_generation", None), "sync_weights", "weight sync")
        model = trainer.accelerator.unwrap_model(trainer.model)
        self.model = model_of(model, args, callback.flops_per_token)
        self.peak = peak_of(args, model, callback.peak_flops)
        self.shared_by = 1
        """How many ranks share one batch."""
        for name in ("get_tp_size", "get_cp_size", "get_sp_size"):
            if hasattr(trainer, name):
                self.shared_by *= int(getattr(trainer, name)())

    def begin(self, state: Any) -> None:
        """The loop begins; a resumed one skips its first batches."""
        self.fit.begin(FIT)
        self.fit.restored(state.global_step)
        self.fit.skips = state.global_step > 0

    def throughput(self) -> Throughput:
        """The rates of this rank, from the start of the training."""
        total = replace(self.logged)
        total.add(self.unlogged)
        return self._rates(total, self.fit.loop.batches_ns)

    def _rates(self, amounts: Amounts, time_ns: int) -> Throughput:
        devices = max(1, self.trainer.args.n_gpu)
        return throughput_of(amounts, time_ns / 1e9, self.model, self.peak, devices, self.shared_by)

    # --- data --------------------------------------------------------------------------------------------------------

    def _got(self, result: Any, start_ns: int, *args: Any, **kwargs: Any) -> None:
        fit, data, batches = self.fit, self.data, len(result[0])
        if fit.skips and batches:
            # One batch is fetched ahead, unless the data has ended.
            skipped = max(0, len(data.waits) - batches - (not data.ended))
            if skipped:
                fit.begin_data(data.waits[0][0])
                fit.loops.record("skip batches", data.waits[0][0], data.waits[skipped - 1][1])
            for wait in data.waits[skipped:]:
                fit.add_wait(*wait)
            fit.skips = False
        elif batches and not (data.waited or data.ended):  # no loader of PyTorch
            fit.add_wait(start_ns, fit.timer.now_ns())
        for batch in result[0]:
            self.unlogged.add(data.take(batch))
        data.waited = data.ended = False

    # --- logging -----------------------------------------------------------------------------------------------------

    def _log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        if self.settings.prefix is None or "loss" not in logs:
            return
        time_ns = self.fit.loop.batches_ns
        means = self.means.since_last(self.fit.timer, self.trainer.state.global_step)
        rates = self._rates(self.unlogged, time_ns - self.logged_ns)
        self.logged.add(self.unlogged)
        self.unlogged, self.logged_ns = Amounts(), time_ns
        logs.update(means)
        logs.update({f"{self.settings.prefix}/{name}": value for name, value in rates.per_rank().items()})
