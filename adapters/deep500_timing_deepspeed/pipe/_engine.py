"""The engine: batches of micro-batches through the stages, timed."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from deep500_timing import Timer, TimeType
from deep500_timing_deepspeed.pipe import _checkpoint
from deep500_timing_deepspeed.pipe._data import DataEndedError, joined, shape_of, split_batch, to_device
from deep500_timing_deepspeed.pipe._ranks import Faults, Grid, Runner, check_order, clip, reduce_gradients, synchronise
from deep500_timing_torch.pipeline import Kind, PipelineError
from deep500_timing_torch.pipeline.engines import REGIONS, Recorder, TimedPipeline, exchange_of, rank_of_stage

if TYPE_CHECKING:
    from deep500_timing_deepspeed.pipe._config import PipelineConfig
    from deep500_timing_deepspeed.pipe._module import PipelineModule

_BACKWARD = ("backward", "backward input", "backward weight")
_OF_A_STEP = {
    "fwd": ("forward", "pipeline loss"),
    "bwd": _BACKWARD,
    "bwd_inner": _BACKWARD,
    "bwd_allreduce": ("pipeline reduce",),
    "step": ("pipeline step",),
}
DEEPSPEED_NAMES: dict[str, tuple[str, ...]] = {
    **{name + end: regions for name, regions in _OF_A_STEP.items() for end in ("_microstep", "")},
    "batch_input": ("pipeline load",),
    "train_batch": (TimeType.BATCH.name,),
    "pipe_send_output": ("pipeline send activation",),
    "pipe_send_grad": ("pipeline send gradient",),
    "pipe_recv_input": ("pipeline receive activation", "pipeline wait for activation"),
    "pipe_recv_grad": ("pipeline receive gradient", "pipeline wait for gradient"),
}
"""Which regions make up DeepSpeed's timer of a name; those of passes are of each stage of the rank."""
_CONTINUED = ("pipeline loss", "backward weight", "pipeline wait for activation", "pipeline wait for gradient")
"""Regions that are the rest of what another of the same name began: they add to its time, and are not one more."""


class NamedTimes:
    """A timer of DeepSpeed's name, read from the engine's regions. Times are in milliseconds, as there."""

    def __init__(self, name: str, regions: list[str], timer: Any) -> None:
        self.name_ = name
        self._regions = regions
        self._timer = timer
        self._read = 0.0

    def _total(self) -> float:
        return sum(sum(self._timer.get_time(region)) for region in self._regions)

    def elapsed(self, reset: bool = True) -> float:
        """The sum since it was last read with ``reset``, in milliseconds."""
        total = self._total() * 1e3
        since = total - self._read
        if reset:
            self._read = total
        return since

    def mean(self) -> float | None:
        count = self.count()
        return self._total() / count * 1e3 if count else None

    def count(self) -> int:
        begun = (region for region in self._regions if not region.endswith(_CONTINUED))
        return sum(len(self._timer.get_time(region)) for region in begun)


_OK, _ENDED, _FAILED, _UNEVEN = range(4)
_made = 0


class PipelineEngine(TimedPipeline):
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
        self._exchange = exchange_of(f"pipeline engine {_made}")
        self._runners: dict[bool, Runner] = {}
        self._at_boundary = False
        self._timers: dict[str, NamedTimes] = {}
        self._microbatch = -1

    # --- where this rank stands ---------------------------------------------------------------------------------------

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

    # --- settings -----------------------------------------------------------------------------------------------------

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
        for runner in self._runners.values():
            runner.close()
        self._runners = {}

    # --- data ---------------------------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Whether the first stage, which takes the inputs, is on this rank."""
        return 0 in self.module.stage_numbers

    def is_last_stage(self) -> bool:
        """Whether the last stage, which gives the loss, is on this rank."""
        return self.module.total_stages - 1 in self.module.stage_numbers

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a loader; its iterator ends when it does."""
        if self._loads():
            self.training_dataloader = loader
            self.data_iterator = iter(loader)

    def set_dataiterator(self, iterator: Iterator[Any] | None) -> None:
        """Take micro-batches from an iterator."""
        if self._loads():
            self.training_dataloader = None
            self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any] | None) -> None:
        """Call a function on each micro-batch that is loaded; it gives ``(inputs, labels)``."""
        self.batch_fn = fn

    def _loads(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    def _load(self, microbatches: int) -> tuple[list[Any] | None, list[Any] | None, tuple[int, int]]:
        # No rank begins a batch that another rank cannot feed; it would wait for a message that never comes.
        if self.faults.broken is not None:
            raise PipelineError(
                f"The engine cannot go on after a rank failed ({self.faults.broken}). Start the job again."
            )
        inputs: list[Any] = []
        labels: list[Any] = []
        code, shape = _OK, 0
        error: Exception | None = None
        try:
            if self._loads():
                self._take(microbatches, inputs, labels)
                shape = zlib.crc32(repr(shape_of(inputs[0])).encode())
                shapes = {shape_of(one) for one in inputs}
                if len(shapes) > 1:
                    code, error = _UNEVEN, ValueError(f"the shapes are {sorted(map(str, shapes))}")
        except StopIteration as ended:
            code, error = _ENDED, ended
        except Exception as failed:
            code, error = _FAILED, failed
        with self.faults.named("Beginning a batch"):
            answers = self.grid.agree([code, len(inputs), shape, microbatches])
        self._check(answers, microbatches, error)
        first = rank_of_stage(self.module.schedule, 0, self.num_stages) * self.grid.replicas + self.module.replica
        return (
            inputs if self.is_first_stage() else None,
            labels if self.is_last_stage() else None,
            (microbatches, answers[first][2]),
        )

    def _take(self, microbatches: int, inputs: list[Any], labels: list[Any]) -> None:
        if self.data_iterator is None:
            raise PipelineError("there is no data: pass train_batch(data_iter), or set_dataloader() first")
        for number in range(microbatches):
            self._microbatch = number
            start_ns = self.recorder.now_ns()
            batch = next(self.data_iterator)
            if self.batch_fn is not None:
                batch = self.batch_fn(batch)
            given, label = split_batch(batch)
            inputs.append(to_device(given, self.module.device) if self.is_first_stage() else given)
            labels.append(to_device(label, self.module.device) if self.is_last_stage() else label)
            stage = self.module.stage_numbers[0] if self.is_first_stage() else self.module.stage_numbers[-1]
            self.recorder.put(Kind.LOAD, stage, number, start_ns, self.recorder.now_ns())

    def _check(self, answers: list[list[int]], microbatches: int, error: Exception | None) -> None:
        asked = sorted({answer[3] for answer in answers})
        if len(asked) > 1:
            raise PipelineError(
                f"Ranks disagree on the number of micro-batches in a batch, {asked}. Set it on every one."
            )
        for rank, (code, count, _, _) in enumerate(answers):
            own = rank == self.grid.global_rank
            if code == _ENDED:
                raise DataEndedError(
                    f"The data of rank {rank} ended after {count} of the {microbatches} micro-batches of a batch. "
                    "Nothing was trained. Give longer data, a smaller batch, or a loader that repeats "
                    "(initialize(training_data=...))."
                )
            if code in (_FAILED, _UNEVEN):
                reason = f"{type(error).__name__}: {error}" if own else "its own error says how"
                what = "failed to load its data" if code == _FAILED else "has micro-batches of different shapes"
                raise PipelineError(f"Rank {rank} {what} ({reason}). Nothing was trained.") from (
                    error if own else None
                )

    # --- batches ------------------------------------------------------------------------------------------------------

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
        with self.recorder.batch(), self.timer.region(TimeType.BATCH, gpu=self.recorder.gpu):
            loss = self._train()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._samples.append(self.train_batch_size())
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
        with self.faults.named("Training a batch"):
            runner = self._runner(key, backward=True)
            with self._autocast():
                losses = runner.run(inputs, labels, outputs=False)
            self._at_boundary = True
            try:
                start_ns = self.recorder.now_ns()
                reduce_gradients(self.module, self.grid)
                reduced_ns = self.recorder.now_ns()
                self.recorder.put(Kind.REDUCE, -1, -1, start_ns, reduced_ns)
                if self.config.gradient_clipping:
                    self.gradient_norm = clip(self.module, self.grid, self.config.gradient_clipping)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
                if self.lr_scheduler is not None:
                    self.lr_scheduler.step()
                self.recorder.put(Kind.STEP, -1, -1, reduced_ns, self.recorder.now_ns())
            finally:
                self._at_boundary = False
            with torch.no_grad():
                return self._shared_loss([one.detach() for one in losses], self.micro_batches)

    def _evaluate(
        self, microbatches: int, return_logits: bool, compute_loss: bool, reduce_output: str | None, bcast_loss: bool
    ) -> Any:
        inputs, labels, key = self._load(microbatches)
        with self.faults.named("Evaluating a batch"):
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
            if compute_loss and reduce_output is not None:
                result = self._shared_loss(losses, microbatches, broadcast=bcast_loss)
            elif self.is_last_stage():
                result = losses if compute_loss else outputs
                if reduce_output is not None:
                    result = joined(outputs, lambda parts: self._average(torch.stack(parts).mean(0)))
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

    # --- parts of a batch ---------------------------------------------------------------------------------------------

    def _runner(self, key: tuple[int, int], *, backward: bool) -> Runner:
        runner = self._runners.get(backward)
        if runner is None or runner.key != key:
            if runner is not None:
                runner.close()
            loss = self.module.loss_fn if backward else None
            recorder = self.recorder if backward else self._evaluations
            runner = self._runners[backward] = Runner(
                self.module, self.grid.pipe, key, loss, recorder, backward=backward
            )
        return runner

    def _shared_loss(
        self, losses: Sequence[torch.Tensor], microbatches: int, *, broadcast: bool = True
    ) -> torch.Tensor:
        value = torch.zeros((), dtype=torch.float32, device=self.module.device)
        if self.is_last_stage():
            total = torch.stack([one.float() for one in losses]).sum().to(self.module.device)
            value = total.reshape(()) / microbatches
            self._average(value)
        if broadcast and self.num_stages > 1:
            last = rank_of_stage(self.module.schedule, self.module.total_stages - 1, self.num_stages)
            dist.broadcast(value, src=self.grid.pipe_ranks[last], group=self.grid.pipe)
        return value

    def _average(self, value: torch.Tensor) -> torch.Tensor:
        # Over the replicas, in place.
        if self.grid.data is not None:
            dist.all_reduce(value, group=self.grid.data)
            value /= self.grid.replicas
        return value

    def _autocast(self) -> Any:
        kind = self.config.autocast
        return torch.autocast(self.module.device.type, dtype=torch.bfloat16 if kind else None, enabled=kind is not None)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save_checkpoint(
        self, save_dir: str | PathLike[str], tag: str | None = None, client_state: Mapping[str, Any] | None = None
    ) -> Path:
        """Write everything that goes on from here bit by bit. Every rank calls it.

        Args:
            save_dir: A folder that all ranks see.
            tag: Its name in there; ``global_step<n>`` if None.
            client_state: Plain data of your own, such as where a data iterator stands.

        Returns:
            The folder that was written.
        """
        path = Path(save_dir) / (tag or f"global_step{self.global_steps}")
        with self.faults.named("Saving a checkpoint"):
            _checkpoint.save(self, path, client_state or {})
        return path

    def load_checkpoint(self, load_dir: str | PathLike[str], tag: str | None = None) -> tuple[Path, dict[str, Any]]:
        """Read a checkpoint, written by this or any other cut of the model into stages. Every rank calls it.

        Random states are those of the rank that has the same number; the engine's own loader goes on where it was, an
        iterator of your own is yours to set.

        Returns:
            The folder, and the ``client_state``.

        Raises:
            PipelineError: It is not there, or of another model.
        """
        if tag is None:
            latest = Path(load_dir) / "latest"
            if not latest.exists():
                raise PipelineError(f"Loading a checkpoint: {load_dir} has no file 'latest'. Pass a tag.")
            tag = latest.read_text(encoding="utf-8").strip()
        path = Path(load_dir) / tag
        return path, _checkpoint.load(self, path)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _group(self) -> Any:
        return self.grid.pipe

    def timers(self, name: str) -> NamedTimes:
        """The times that DeepSpeed's timer of a name would have; see ``DEEPSPEED_NAMES``.

        Raises:
            KeyError: DeepSpeed's pipeline engine has no such timer.
        """
        if name not in DEEPSPEED_NAMES:
            raise KeyError(f"timers({name!r}): DeepSpeed's engine has {', '.join(DEEPSPEED_NAMES)}.")
        if name not in self._timers:
            stages = [f"stage {stage} " for stage in self.module.stage_numbers]
            passes = set(REGIONS.values())
            regions = [stage + one for one in DEEPSPEED_NAMES[name] for stage in (stages if one in passes else [""])]
            self._timers[name] = NamedTimes(name, regions, self.timer)
        return self._timers[name]

    def samples_per_second(self) -> float | None:
        """Of the batches so far but the first, over all replicas; None before the second.

        Of a timer that keeps the last times alone, of those.
        """
        times = self.timer.get_time(TimeType.BATCH)
        if len(times) >= len(self._samples):
            times = times[1 - len(self._samples) :] if len(self._samples) > 1 else []
        return sum(self._samples[-len(times) :]) / sum(times) if times else None

    def memory(self) -> dict[str, int | None]:
        """Memory of this rank's stages in bytes: parameters, gradients, optimizer state, and the device's peak.

        The peak is that of the latest batch, None without a device.
        """
        parameters = list(self.module.parameters())
        states = [] if self.optimizer is None else list(self.optimizer.state.values())
        batches = self.recorder.batches
        return {
            "parameters_bytes": sum(one.nbytes for one in parameters),
            "gradients_bytes": sum(one.grad.nbytes for one in parameters if one.grad is not None),
            "optimizer_bytes": sum(
                one.nbytes for state in states for one in state.values() if isinstance(one, torch.Tensor)
            ),
            "peak_device_bytes": batches[-1].peak_bytes if batches else None,
        }

    def log_for_device(self, *msg: object) -> None:
        """Print a message with the place of this rank, if ``log_stage`` and ``log_data_parallel_id`` include it."""
        if self.log_stage in (-1, self.stage_id) and self.log_data_parallel_id in (-1, self.module.replica):
            print(
                f"RANK={self.grid.global_rank} PIPE-ID={self.stage_id} DATA-ID={self.module.replica} "
                f"MBATCH-ID={self._microbatch} STEP-ID={self.global_steps} ::",
                *msg,
                flush=True,
            )

    def tput_log(self, *msg: object) -> None:
        """Print a message on rank 0, in every ``steps_per_print``-th batch."""
        if self._is_print_step():
            print(*msg, flush=True)

    def _is_print_step(self) -> bool:
        steps = self.config.steps_per_print
        return self.grid.global_rank == 0 and bool(steps) and self.global_steps % (steps or 1) == 0

    def _print_progress(self, loss: torch.Tensor) -> None:
        if not self._is_print_step():
            return
        rate = self.samples_per_second()
        throughput = "" if rate is None else f" samples/sec: {rate:0.3f}"
        self.tput_log(f"steps: {self.global_steps} loss: {float(loss):0.4f}{throughput}")
        if self.config.wall_clock_breakdown:
            means = {name: self.timers(name).mean() for name in DEEPSPEED_NAMES if not name.endswith("inner_microstep")}
            self.tput_log(
                "time (ms) | " + " | ".join(f"{name}: {mean:.2f}" for name, mean in means.items() if mean is not None)
            )

    def close(self) -> None:
        """Stop timing the schedules; the times stay."""
        self.reset_activation_shape()

    def __repr__(self) -> str:
        return (
            f"<PipelineEngine: rank {self.stage_id} of {self.num_stages}, replica {self.module.replica} of "
            f"{self.grid.replicas}, {self.micro_batches} micro-batches of {self.micro_batch_size}>"
        )
