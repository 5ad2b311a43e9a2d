"""The data of a training: waits for batches, copies to the device, what a batch holds, and the rates of a rank."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import dataloader

from deep500_timing.flops import ModelFlops, Peak, Utilization, given_flops, utilization
from deep500_timing.loop import COPY, IO
from deep500_timing_torch.flop_counter import device_peak_flops

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.trainers._fit import Fit

    TokenFlops = Callable[[float], ModelFlops]

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


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
        fit: The training, which counts the contents of batches.
    """

    def __init__(self, fit: Fit) -> None:
        self.waits: list[tuple[int, int]] = []
        """The waits while the fit skips data."""
        self.waited = self.ended = False
        """Whether batches were fetched since the last step's, and whether there are no more."""
        self._fit = fit
        # Batches on the host are counted when they are taken. One that is copied is counted before that.
        self._known: dict[int, Amounts] = {}
        fit.wrap(dataloader._BaseDataLoaderIter, "__next__", IO, gets=self._fetched, failed=self._failed)
        accelerate = sys.modules.get("accelerate.data_loader")
        if accelerate is not None and fit.on_device:
            fit.wrap(accelerate, "send_to_device", COPY, gets=self._copied)

    def take(self, batch: Any) -> Amounts:
        """The contents of a batch, as counted on the host when it was fetched, else by its tensors on the device."""
        known = self._known.pop(id(batch), None) if self._known else None
        return amounts_of(batch) if known is None else known

    def _fetched(self, batch: Any, start_ns: int, iterator: Any) -> None:
        self.waited = True
        if self._fit.skips:
            self.waits.append((start_ns, self._fit.timer.now_ns()))
        if self._fit.on_device:
            if len(self._known) > 1000:  # batches that were skipped, and not trained on
                self._known.clear()
            self._known[id(batch)] = amounts_of(batch)

    def _failed(self, error: BaseException) -> None:
        self.ended = isinstance(error, StopIteration)

    def _copied(self, copied: Any, _start_ns: int, batch: Any = None, *args: Any, **kwargs: Any) -> None:
        known = self._known.pop(id(batch), None)
        if known is not None:
            self._known[id(copied)] = known


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of one rank over its BATCHes; evaluation and checkpoints are left out. None is unknown."""

    samples_per_s: float | None
    tokens_per_s: float | None
    """Tokens that are no padding."""
    trained_tokens_per_s: float | None
    """Tokens with a label, which is not -100."""
    utilization: Utilization | None
    """The MFU of the rank's devices; None where the model's FLOPs or the peak are unknown."""

    def per_rank(self) -> dict[str, float]:
        """The known rates by the names under which they are logged."""
        values = {
            "samples_per_s_per_rank": self.samples_per_s,
            "tokens_per_s_per_rank": self.tokens_per_s,
            "trained_tokens_per_s_per_rank": self.trained_tokens_per_s,
            "mfu": None if self.utilization is None else self.utilization.ratio,
        }
        return {name: value for name, value in values.items() if value is not None}


def throughput_of(
    amounts: Amounts, time_s: float, model: TokenFlops | None, peak: Peak | None, devices: int, shared_by: int
) -> Throughput:
    """The rates of a rank with its devices. Under tensor parallelism ranks share a batch, and each counts its part."""

    def rate(amount: float) -> float | None:
        return amount / shared_by / time_s if amount > 0 and time_s > 0 else None

    tokens = rate(amounts.tokens)
    flops = model(amounts.lengths / amounts.tokens) if model is not None and amounts.tokens > 0 else None
    used = utilization(tokens, flops, peak, devices=devices)
    return Throughput(rate(amounts.samples), tokens, rate(amounts.trained_tokens), used)


def model_of(model: Any, args: Any, given: float | None) -> TokenFlops | None:
    """The FLOPs of a token by the mean length of its sequence; None if the model's config does not tell.

    They are 4·N + 2·(trained N) + 12·L·H·Q·T. Source: PaLM, arXiv 2204.02311, appendix B, where all parameters are
    trained. A frozen parameter has no gradient, which is a third of the work.

    The config does not tell for encoder-decoders and mixtures of experts, nor where a rank sees only its shard of the
    parameters.
    """
    if given is not None:
        return lambda _length: given_flops(given)
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS) or getattr(config, "is_encoder_decoder", False):
        return None
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    # FSDP 1 flattens parameters and leaves each rank its shard; FSDP 2 keeps their global shapes.
    fsdp = getattr(args, "fsdp_config", None) or {}
    is_sharded = bool(getattr(args, "fsdp", None)) and str(fsdp.get("version", fsdp.get("fsdp_version", 1))) == "1"
    if not (layers and heads and hidden) or is_sharded:
        return None
    sizes = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()]
    count, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    head_dim = getattr(config, "head_dim", None) or hidden // heads

    def flops_of(length: float) -> ModelFlops:
        formula = (
            f"4·N + 2·M + 12·L·H·Q·T, N={count}, trained M={trained}, L={layers}, H={heads}, Q={head_dim}, "
            f"mean T={length:.6g} (PaLM, appendix B)"
        )
        return given_flops(4.0 * count + 2.0 * trained + 12.0 * layers * heads * head_dim * length, formula=formula)

    return flops_of


def peak_of(args: Any, model: Any, given: float | None) -> Peak | None:
    """The peak of one device, or None if it is not known."""
    if given is None and args.device.type != "cuda":
        return None
    dtype = "bfloat16" if args.bf16 else "float16" if args.fp16 else getattr(model, "dtype", torch.float32)
    return device_peak_flops(args.device, dtype, given=given)
