"""Micro-batches in and losses out: loaders, the agreement of all ranks that a batch can begin, the loss of a batch."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deep500_timing_deepspeed.pipe._faults import Guard
from deep500_timing_torch.pipeline._actions import Kind, PipelineError
from deep500_timing_torch.pipeline._schedules import rank_of_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_deepspeed.pipe._ranks import Grid, Runner
    from deep500_timing_torch.pipeline._recorder import Recorder


class RepeatingLoader:
    """Repeats a data set in micro-batches of this replica's share.

    Args:
        dataset: The data set, with a length.
        size: Samples of a micro-batch.
        replicas: Of the pipeline.
        replica: This one.
        drop_last: Whether a last micro-batch that is not full is left out.
        collate_fn: As for ``DataLoader``.
        seed: For shuffling.
        shuffle: Whether to shuffle each pass, alike on the first and the last stage.
    """

    def __init__(
        self,
        dataset: Any,
        size: int,
        replicas: int,
        replica: int,
        *,
        drop_last: bool = True,
        collate_fn: Callable[[Any], Any] | None = None,
        seed: int = 0,
        shuffle: bool = False,
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        self._sampler: Any = DistributedSampler(
            dataset, num_replicas=replicas, rank=replica, shuffle=shuffle, seed=seed, drop_last=drop_last
        )
        self._batches: Any = BatchSampler(self._sampler, size, drop_last)
        if len(self) == 0:
            raise ValueError(
                f"A data set of {len(dataset)} samples for {replicas} replicas has no whole micro-batch of {size}."
            )
        self.taken = 0
        """Micro-batches so far, over all passes."""
        self._source: Iterator[Any] | None = None

    def __len__(self) -> int:
        return len(self._batches)

    def go_to(self, taken: int) -> None:
        """Resume after so many micro-batches without reading the earlier ones."""
        self.taken, self._source = taken, None

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        if self._source is None:
            done, skipped = divmod(self.taken, len(self))
            self._sampler.set_epoch(done)
            indices = list(self._batches)[skipped:]
            # Its own generator: a loader takes a seed for its workers from the global one otherwise.
            generator = torch.Generator()
            generator.manual_seed(done)
            self._source = iter(
                DataLoader(self._dataset, batch_sampler=indices, collate_fn=self._collate, generator=generator)
            )
        try:
            batch = next(self._source)
        except StopIteration:
            self._source = None
            return next(self)
        self.taken += 1
        return batch


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a micro-batch; labels are None if it has inputs alone."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = batch
        return tuple(inputs) if isinstance(inputs, list) else inputs, tuple(labels) if isinstance(
            labels, list
        ) else labels
    raise ValueError(
        f"A micro-batch is {type(batch).__name__}: the engine takes (inputs, labels). Make it so with set_batch_fn()."
    )


def to_device(value: Any, device: torch.device) -> Any:
    """The same tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(to_device(one, device) for one in value)
    return value


def shape_of(value: Any) -> tuple[Any, ...]:
    """What tells micro-batches of different shapes apart."""
    if isinstance(value, torch.Tensor):
        return (tuple(value.shape), str(value.dtype))
    if isinstance(value, tuple):
        return tuple(shape_of(one) for one in value)
    return (type(value).__name__,)


class DataEndedError(PipelineError, StopIteration):
    """An iterator had fewer micro-batches left than a batch needs. Every rank raises it, and nothing was trained."""


_OK, _ENDED, _FAILED, _UNEVEN = range(4)


class Loading:
    """The part of the engine that takes data."""

    module: PipelineModule
    recorder: Recorder
    grid: Grid
    num_stages: int
    training_dataloader: Any
    data_iterator: Iterator[Any] | None
    batch_fn: Callable[[Any], Any] | None
    broken: str | None
    _microbatch: int

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
        if self.broken is not None:
            raise PipelineError(f"The engine cannot go on after a rank failed ({self.broken}). Start the job again.")
        inputs: list[Any] = []
        labels: list[Any] = []
        code, shape = _OK, 0
        error: Exception | None = None
        if self._loads():
            try:
                self._take(microbatches, inputs, labels)
            except StopIteration as ended:
                code, error = _ENDED, ended
            except Exception as failed:
                code, error = _FAILED, failed
            shapes = {shape_of(one) for one in inputs}
            if code == _OK and len(shapes) > 1:
                code, shape = _UNEVEN, 0
                error = ValueError(f"micro-batches of one batch have different shapes: {sorted(map(str, shapes))}")
            elif inputs:
                shape = zlib.crc32(repr(shape_of(inputs[0])).encode())
        with Guard(self, "Beginning a batch"):
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


class Losses:
    """The part of the engine that adds up losses."""

    module: PipelineModule
    grid: Grid
    num_stages: int
    _runners: dict[bool, tuple[tuple[int, int], Runner]]
    _additional: dict[str, torch.Tensor] | None
    _totals: dict[str, torch.Tensor] | None

    def is_last_stage(self) -> bool:
        """Whether the last stage is on this rank."""
        raise NotImplementedError

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """The model's ``get_additional_losses``, averaged over the latest batch, on every rank."""
        return self._additional

    def _loss(self, output: Any, label: Any) -> Any:
        assert self.module.loss_fn is not None
        loss = self.module.loss_fn(output, label)
        if not self._runners[True][1].in_setup:
            found = self.module.get_additional_losses()
            if found is not None:
                totals = self._totals or {}
                for name, one in found.items():
                    totals[name] = totals.get(name, 0) + one.detach()
                self._totals = totals
        return loss

    def _shared_loss(
        self, losses: Sequence[torch.Tensor], microbatches: int, *, broadcast: bool = True
    ) -> torch.Tensor:
        names = list(self.module.get_additional_losses() or {}) if self.module.training else []
        device = self.module.device
        values = torch.zeros(1 + len(names), dtype=torch.float32, device=device)
        if self.is_last_stage():
            totals = [torch.stack([one.float() for one in losses]).sum()]
            totals += [torch.as_tensor((self._totals or {})[name]).float() for name in names]
            values = torch.stack([one.to(device).reshape(()) for one in totals]) / microbatches
            if self.grid.data is not None:
                dist.all_reduce(values, group=self.grid.data)
                values /= self.grid.replicas
        if broadcast and self.num_stages > 1:
            last = rank_of_stage(self.module.schedule, self.module.total_stages - 1, self.num_stages)
            dist.broadcast(values, src=self.grid.pipe_ranks[last], group=self.grid.pipe)
        if names:
            self._additional = dict(zip(names, values[1:], strict=True))
        return values[0]

    def _mean_output(self, outputs: Sequence[Any]) -> Any:
        if not isinstance(outputs[0], torch.Tensor):
            return tuple(self._mean_output(parts) for parts in zip(*outputs, strict=True))
        mean = torch.stack(list(outputs)).mean(0)
        if self.grid.data is not None:
            dist.all_reduce(mean, group=self.grid.data)
            mean /= self.grid.replicas
        return mean


def joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of micro-batches; for tuples, each element."""
    if not isinstance(outputs[0], torch.Tensor):
        return tuple(joined(parts) for parts in zip(*outputs, strict=True))
    return torch.cat(list(outputs)) if outputs[0].dim() else torch.stack(list(outputs))
