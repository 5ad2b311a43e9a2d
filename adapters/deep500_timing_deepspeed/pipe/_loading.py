"""Where an engine's micro-batches come from, and the agreement of all ranks that a batch can begin."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

from deep500_timing_deepspeed.pipe._data import shape_of, split_batch, to_device
from deep500_timing_deepspeed.pipe._guard import Guard
from deep500_timing_torch.pipeline._actions import Kind
from deep500_timing_torch.pipeline._errors import PipelineError
from deep500_timing_torch.pipeline._orders import rank_of_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from deep500_timing_deepspeed.pipe._grid import Grid
    from deep500_timing_deepspeed.pipe._module import PipelineModule
    from deep500_timing_torch.pipeline._recorder import Recorder

__all__ = ["DataEndedError", "Loading"]


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
