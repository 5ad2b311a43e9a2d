"""The data of a training: each wait for a batch, each copy to the device, and the contents of a batch."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torch.utils.data import dataloader

from deep500_timing_torch.trainers._fit import COPY, IO

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.trainers._fit import Fit


@dataclass(slots=True)
class Amounts:
    """The contents of one batch or of several. NaN is unknown, and makes a sum unknown."""

    samples: float = 0
    tokens: float = 0
    """Tokens that are no padding."""
    trained_tokens: float = 0
    """Tokens with a label, which is not -100."""
    lengths: float = 0
    """For each token the length of its padded sequence, added up."""

    def add(self, other: Amounts) -> None:
        """Add another's."""
        self.samples += other.samples
        self.tokens += other.tokens
        self.trained_tokens += other.trained_tokens
        self.lengths += other.lengths


def amounts_of(batch: Any) -> Amounts:
    """Count a batch. Waits for no device: what only the device could count is unknown."""
    has_names = hasattr(batch, "get")
    ids = batch.get("input_ids") if has_names else None
    if not isinstance(ids, Tensor):
        for one in batch.values() if has_names else batch if isinstance(batch, (list, tuple)) else [batch]:
            shape = one.shape if isinstance(one, Tensor) else ()
            if shape:
                return Amounts(shape[0], nan, nan, nan)
        return Amounts(nan, nan, nan, nan)
    tokens: float = ids.numel()
    trained: float = nan
    labels, mask = batch.get("labels"), batch.get("attention_mask")
    if isinstance(labels, Tensor) and labels.shape == ids.shape and labels.device.type == "cpu":
        trained = int(np.count_nonzero(labels.numpy() != -100))
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        tokens = int(mask.sum()) if mask.device.type == "cpu" else nan
    return Amounts(ids.shape[0], tokens, trained, tokens * ids.shape[-1])


class Data:
    """Sees each batch that a ``DataLoader`` of PyTorch fetches and that Accelerate copies, until the fit closes.

    Args:
        fit: The training.
        counts: Whether to count the contents of batches.
        each: Called before each wait.
    """

    def __init__(self, fit: Fit, *, counts: bool, each: Callable[[], object] | None = None) -> None:
        self.waits: list[tuple[int, int]] | None = None
        """While it is a list, waits are put there and not recorded."""
        self.look()
        self._fit = fit
        # Batches on the host are counted when they are taken. One that is copied is counted before that.
        self._counts = counts and fit.on_device
        self._known: dict[int, Amounts] = {}
        loaders = dataloader._BaseDataLoaderIter
        fit.wrap(loaders, "__next__", before=each, gets=self._fetched, failed=self._failed)
        accelerate = sys.modules.get("accelerate.data_loader")
        if accelerate is not None and fit.on_device:
            fit.wrap(accelerate, "send_to_device", COPY, gets=self._copied if counts else None)

    def look(self) -> None:
        """Forget which waits have been seen: when the first began, and whether one brought no batch."""
        self.first_ns, self.ended = 0, False

    def take(self, batch: Any) -> Amounts:
        """The contents of a batch, as counted on the host when it was fetched, else by its tensors on the device."""
        known = self._known.pop(id(batch), None) if self._known else None
        return amounts_of(batch) if known is None else known

    def _fetched(self, batch: Any, start_ns: int, iterator: Any) -> None:
        fit, now = self._fit, self._fit.timer.now_ns()
        self.first_ns = self.first_ns or start_ns
        if self.waits is None:
            fit.record(IO, start_ns, now)
            fit.marks.append((IO, start_ns, now))
            if len(fit.marks) > 1000:  # of a BATCH that does not end
                fit.flush()
        else:
            self.waits.append((start_ns, now))
        if self._counts:
            if len(self._known) > 1000:  # batches that were skipped, and not trained on
                self._known.clear()
            self._known[id(batch)] = amounts_of(batch)

    def _failed(self, error: BaseException) -> None:
        if isinstance(error, StopIteration):
            self.ended = True

    def _copied(self, copied: Any, _start_ns: int, batch: Any = None, *args: Any, **kwargs: Any) -> None:
        known = self._known.pop(id(batch), None)
        if known is not None:
            self._known[id(copied)] = known
