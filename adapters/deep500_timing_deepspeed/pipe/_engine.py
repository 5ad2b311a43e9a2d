"""The engine: batches of micro-batches through the stages, timed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing import TimeType
from deep500_timing.adapters import Exchange
from deep500_timing_deepspeed.pipe._checkpoint import Saving
from deep500_timing_deepspeed.pipe._data import Loading, Losses, joined
from deep500_timing_deepspeed.pipe._faults import Faults, Guard, Timed
from deep500_timing_deepspeed.pipe._ranks import Grid, Runner, check_order, clip, reduce_gradients, synchronise
from deep500_timing_deepspeed.pipe._reports import Reports
from deep500_timing_torch.pipeline._actions import Kind, PipelineError
from deep500_timing_torch.pipeline._recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from deep500_timing import Timer
    from deep500_timing_deepspeed.pipe._config import PipelineConfig
    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_deepspeed.pipe._reports import NamedTimes

_made = 0


class PipelineEngine(Loading, Losses, Reports, Saving):
    """Trains a :class:`PipelineModule`; :func:`initialize` makes it, on every rank.

    Attributes:
        module: The model.
        optimizer: Its optimizer; None where there is only evaluation.
        lr_scheduler: Its schedule, stepped after each batch; None without one.
        timer: Where all times are. A batch is a ``BATCH``.
        config: Its settings.
        micro_batches: In a batch, for each replica.
        micro_batch_size: Samples of one.
        stage_id: This rank in the pipeline.
        num_stages: Ranks of the pipeline.
        global_steps: Batches trained.
        global_samples: Samples trained, over all replicas.
        gradient_norm: Of the latest batch before clipping; None without clipping.
        log_stage: Which rank of the pipeline :meth:`log_for_device` prints on; -1 for all.
        log_data_parallel_id: Which replica it prints on; -1 for all.
    """

    def __init__(
        self,
        module: PipelineModule,
        config: PipelineConfig,
        optimizer: Any,
        lr_scheduler: Any,
        loader: Any,
        timer: Timer,
        *,
        timeout_s: float,
        keep: int,
    ) -> None:
        global _made
        _made += 1
        self.module = module
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.timer: Any = timer
        self.timeout_s = timeout_s
        self.micro_batches = config.gradient_accumulation_steps
        self.micro_batch_size = config.train_micro_batch_size_per_gpu
        self.stage_id, self.num_stages = module.pipe_rank, module.num_stages
        self.global_steps = self.global_samples = 0
        self._samples = array("q")
        """Of each batch that this process has trained."""
        self.gradient_norm: torch.Tensor | None = None
        self.log_stage = self.log_data_parallel_id = -1
        check_order(module, self.micro_batches)
        self.grid = Grid(module, timeout_s)
        synchronise(module, self.grid)
        self.training_dataloader: Any = loader
        self.data_iterator: Iterator[Any] | None = None if loader is None or not self._loads() else iter(loader)
        self.batch_fn: Callable[[Any], Any] | None = None
        settings: dict[str, Any] = {"replica": module.replica, "keep": keep, "gpu": module.device.type == "cuda"}
        self.recorder = Recorder(timer, module.schedule, module.pipe_rank, **settings)
        self._evaluations = Recorder(timer, None, module.pipe_rank, **settings, evaluation=True)
        self.faults = Faults(_made)
        self._exchange = Exchange(f"pipeline engine {_made}")
        self._runners: dict[bool, tuple[tuple[int, int], Runner]] = {}
        self.broken: str | None = None
        self._at_boundary = False
        self._additional: dict[str, torch.Tensor] | None = None
        self._totals: dict[str, torch.Tensor] | None = None
        self._timers: dict[str, NamedTimes] = {}
        self._microbatch = -1

    # --- where this rank stands --------------------------------------------------------------------------------------

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether gradients are being reduced or the optimizer is stepping: all micro-batches have gone through."""
        return self._at_boundary

    def train_batch_size(self) -> int:
        """Samples of a batch, over all replicas."""
        return self.micro_batch_size * self.micro_batches * self.grid.replicas

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self.micro_batch_size

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a batch, for each replica."""
        return self.micro_batches

    def get_lr(self) -> list[float]:
        """The learning rate of each group of parameters."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_pipeline_parallel_rank(self) -> int:
        """This rank in the pipeline."""
        return self.stage_id

    # --- settings ----------------------------------------------------------------------------------------------------

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the batch by the number of its micro-batches; their size stays. Every rank calls it.

        The next batch exchanges shapes once more, and is marked as warm-up.

        Raises:
            ValueError: It does not divide into micro-batches, or the schedule cannot have so many. Nothing is changed.
        """
        each = self.micro_batch_size * self.grid.replicas
        microbatches, rest = divmod(train_batch_size, each)
        if rest or microbatches < 1:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): the batch does not divide into micro-batches of "
                f"{self.micro_batch_size} for {self.grid.replicas} replicas. Take a multiple of {each}."
            )
        check_order(self.module, microbatches)
        self.micro_batches = microbatches

    def reset_activation_shape(self) -> None:
        """Exchange shapes again before the next batch.

        Never needed: the engine notices a change of the inputs' shape.
        """
        for _, runner in self._runners.values():
            runner.close()
        self._runners = {}

    # --- batches -----------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train on the next batch: ``gradient_accumulation_steps()`` micro-batches for each replica.

        Args:
            data_iter: Gives ``(inputs, labels)``, on the ranks of the first and the last stage; where the batches come
                from before if None.

        Returns:
            The mean loss over all micro-batches and replicas, on every rank.

        Raises:
            DataEndedError: On every rank, if the data of one end early. Nothing was trained, and what that rank took
                is lost.
            PipelineError: A rank failed, or did not answer within ``timeout_s``: on every rank, with the name of that
                rank where it is known. The engine cannot go on.
            RuntimeError: Gradients are switched off.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients; under torch.no_grad() call eval_batch().")
        if self.optimizer is None:
            raise PipelineError("train_batch(): the engine has no optimizer. Pass initialize(optimizer=...).")
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        self.module.train()
        recorder = self.recorder
        recorder.begin()
        try:
            with self.timer.region(TimeType.BATCH, gpu=recorder.gpu):
                loss = self._train()
        except BaseException:
            recorder.drop()
            raise
        recorder.commit()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._samples.append(self.train_batch_size())
        if self.config.steps_per_print:
            self._print_progress(loss)
        return loss

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Evaluate a batch.

        Args:
            data_iter: Gives ``(inputs, labels)``; the iterator of training stays as it is.
            return_logits: Whether to give the outputs of the last stage as well.
            compute_loss: Whether to compute the loss; otherwise the outputs are reduced.
            reduce_output: ``"avg"`` over micro-batches and replicas; None for a list by micro-batch.
            bcast_loss: Whether every rank gets the loss, or the last stage's alone.
            num_micro_batches: Of this batch; as many as in training if None.

        Returns:
            The loss, or the reduced outputs on the last stage and None elsewhere; with ``return_logits`` a pair of that
            and the outputs, joined, on the last stage and None elsewhere.

        Raises:
            DataEndedError: As :meth:`train_batch`.
            PipelineError: As :meth:`train_batch`.
            ValueError: ``reduce_output`` is another one.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"eval_batch(reduce_output={reduce_output!r}): it is 'avg' or None.")
        iterator = self.data_iterator
        self.data_iterator = data_iter if self._loads() else None
        self.module.eval()
        microbatches = self.micro_batches if num_micro_batches is None else num_micro_batches
        try:
            with torch.no_grad(), self.timer.region("pipeline evaluation"):
                return self._evaluate(microbatches, return_logits, compute_loss, reduce_output, bcast_loss)
        finally:
            self.data_iterator = iterator

    def _train(self) -> torch.Tensor:
        inputs, labels, key = self._load(self.micro_batches)
        self._totals = None
        with self._guarded("Training a batch"):
            runner = self._runner(key, backward=True)
            with self._autocast():
                losses = runner.run(inputs, labels, outputs=False)
            self._at_boundary = True
            try:
                with self._timed(Kind.REDUCE):
                    reduce_gradients(self.module, self.grid)
                with self._timed(Kind.STEP):
                    if self.config.gradient_clipping:
                        self.gradient_norm = clip(self.module, self.grid, self.config.gradient_clipping)
                    self.optimizer.step()
                    self.optimizer.zero_grad(set_to_none=True)
                    if self.lr_scheduler is not None:
                        self.lr_scheduler.step()
            finally:
                self._at_boundary = False
            with torch.no_grad():
                return self._shared_loss([one.detach() for one in losses], self.micro_batches)

    def _evaluate(
        self, microbatches: int, return_logits: bool, compute_loss: bool, reduce_output: str | None, bcast_loss: bool
    ) -> Any:
        inputs, labels, key = self._load(microbatches)
        with self._guarded("Evaluating a batch"):
            with self._autocast():
                runner = self._runner(key, backward=False)
                runner.run(inputs, None, outputs=True)
                outputs = runner.outputs() if self.is_last_stage() else []
                losses = []
                if compute_loss and self.is_last_stage():
                    losses = [
                        one if self.module.loss_fn is None else self.module.loss_fn(one, label)
                        for one, label in zip(outputs, labels or [None] * microbatches, strict=True)
                    ]
            result: Any = None
            if compute_loss and reduce_output is None:
                result = losses if self.is_last_stage() else None
            elif compute_loss:
                result = self._shared_loss(losses, microbatches, broadcast=bcast_loss)
            elif self.is_last_stage():
                result = outputs if reduce_output is None else self._mean_output(outputs)
        if not return_logits:
            return result
        return result, joined(outputs) if self.is_last_stage() else None

    def forward(self, *_: Any, **__: Any) -> Any:
        """A pipeline trains whole batches only, as in DeepSpeed.

        Raises:
            PipelineError: Always.
        """
        raise PipelineError("Only train_batch() and eval_batch() are accessible in pipeline mode.")

    __call__ = backward = step = forward

    # --- parts of a batch --------------------------------------------------------------------------------------------

    def _runner(self, key: tuple[int, int], *, backward: bool) -> Runner:
        known = self._runners.get(backward)
        if known is not None and known[0] == key:
            return known[1]
        if known is not None:
            known[1].close()
        loss = None if not backward or self.module.loss_fn is None else self._loss
        recorder = self.recorder if backward else self._evaluations
        runner = Runner(self.module, self.grid.pipe, key[0], loss, recorder, backward=backward)
        self._runners[backward] = (key, runner)
        return runner

    def _autocast(self) -> Any:
        kind = self.config.autocast
        return torch.autocast(self.module.device.type, dtype=torch.bfloat16 if kind else None, enabled=kind is not None)

    def _guarded(self, doing: str) -> Guard:
        return Guard(self, doing)

    def _timed(self, kind: Kind) -> Timed:
        return Timed(self.recorder, kind)

    def close(self) -> None:
        """Stop timing the schedules; the times stay."""
        self.reset_activation_shape()

    def __repr__(self) -> str:
        return (
            f"<PipelineEngine: rank {self.stage_id} of {self.num_stages}, replica {self.module.replica} of "
            f"{self.grid.replicas}, {self.micro_batches} micro-batches of {self.micro_batch_size}>"
        )
