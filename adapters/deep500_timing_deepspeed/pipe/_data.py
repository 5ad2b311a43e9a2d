"""Micro-batches in and losses out: loaders, the agreement of all ranks that a batch can begin, the loss of a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from deep500_timing_torch.pipeline import PipelineError


class RepeatingLoader:
    """Repeats a data set in micro-batches of this replica's share, in the order of the data set.

    Args:
        dataset: The data set, with a length.
        size: Samples of a micro-batch.
        replicas: Of the pipeline.
        replica: This one.
        drop_last: Whether a last micro-batch that is not full is left out.
        collate_fn: As for ``DataLoader``.
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
    ) -> None:
        self._dataset = dataset
        self._collate = collate_fn
        share: Any = DistributedSampler(
            dataset, num_replicas=replicas, rank=replica, shuffle=False, drop_last=drop_last
        )
        self._batches: Any = BatchSampler(share, size, drop_last)
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
            self._source = itertools.chain.from_iterable(self._passes())
        batch = next(self._source)
        self.taken += 1
        return batch

    def _passes(self) -> Iterator[Any]:
        first, skipped = divmod(self.taken, len(self))
        for number in itertools.count(first):
            indices = list(self._batches)[skipped:]
            skipped = 0
            # Its own generator: a loader takes a seed for its workers from the global one otherwise.
            generator = torch.Generator()
            generator.manual_seed(number)
            yield DataLoader(self._dataset, batch_sampler=indices, collate_fn=self._collate, generator=generator)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """The inputs and the labels of a micro-batch; labels are None if it has inputs alone."""
    if isinstance(batch, torch.Tensor):
        return batch, None
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, labels = (tuple(part) if isinstance(part, list) else part for part in batch)
        return inputs, labels
    raise ValueError(
        f"A micro-batch is {type(batch).__name__}: the engine takes (inputs, labels). Make it so with set_batch_fn()."
    )


def to_device(value: Any, device: torch.device) -> Any:
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


def joined(outputs: Sequence[Any], join: Callable[[list[torch.Tensor]], torch.Tensor] | None = None) -> Any:
    """Join the outputs of micro-batches, one after the other or by a function; for tuples, each element."""
    if not isinstance(outputs[0], torch.Tensor):
        return tuple(joined(parts, join) for parts in zip(*outputs, strict=True))
    return (join or (torch.cat if outputs[0].dim() else torch.stack))(list(outputs))
