"""Tokens per second and MFU of one rank under a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing.flops import ModelFlops, Peak, Utilization, given_flops, peak_flops, utilization

if TYPE_CHECKING:
    from deep500_timing_torch.trainers._data import Amounts

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True)
class Throughput:
    """Rates of one rank over its BATCHes; evaluation, logging and checkpoints are left out. None is unknown."""

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


@dataclass(frozen=True, slots=True)
class Model:
    """The numbers that determine the FLOPs of a token: 4·N + 2·(trained N) + 12·L·H·Q·T.

    Source: PaLM, arXiv 2204.02311, appendix B, where all parameters are trained. A frozen parameter has no gradient of
    its own, which is a third of the work.
    """

    parameters: int
    trained: int
    """How many of the parameters are trained."""
    layers: int
    heads: int
    head_dim: int

    def flops(self, length: float) -> ModelFlops:
        """The FLOPs of a token in sequences of this mean length."""
        flops = 4.0 * self.parameters + 2.0 * self.trained + 12.0 * self.layers * self.heads * self.head_dim * length
        formula = (
            f"4·N + 2·M + 12·L·H·Q·T, N={self.parameters}, trained M={self.trained}, L={self.layers}, H={self.heads}, "
            f"Q={self.head_dim}, mean T={length:.6g} (PaLM, appendix B)"
        )
        return given_flops(flops, formula=formula)


def throughput_of(
    amounts: Amounts, time_s: float, model: Model | ModelFlops | None, peak: Peak | None, devices: int, shared_by: int
) -> Throughput:
    """The rates of a rank.

    Args:
        amounts: The contents of its batches.
        time_s: In how many seconds.
        model: The FLOPs of a token, or the numbers that determine them.
        peak: The peak of one device.
        devices: How many devices the rank has.
        shared_by: How many ranks share one batch, as under tensor parallelism. Each counts its part.
    """

    def rate(amount: int | None) -> float | None:
        return amount / shared_by / time_s if amount and time_s > 0 else None

    tokens = rate(amounts.tokens)
    if isinstance(model, Model):
        model = model.flops(amounts.lengths / amounts.tokens) if amounts.tokens else None
    used = utilization(tokens, model, peak, devices=devices)
    return Throughput(rate(amounts.samples), tokens, rate(amounts.trained_tokens), used)


def model_of(model: Any, args: Any, given: float | None) -> Model | ModelFlops | None:
    """The FLOPs of a token; None if the model's config does not tell.

    It does not for encoder-decoders and mixtures of experts, nor where a rank sees only its shard of the parameters.
    """
    if given is not None:
        return given_flops(given)
    config = getattr(model, "config", None)
    if config is None:
        return None
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if any((getattr(config, name, None) or 0) > 1 for name in _EXPERTS) or getattr(config, "is_encoder_decoder", False):
        return None
    layers, heads = getattr(config, "num_hidden_layers", None), getattr(config, "num_attention_heads", None)
    hidden = getattr(config, "hidden_size", None)
    if not (layers and heads and hidden) or _is_sharded(args):
        return None
    sizes = [(getattr(one, "ds_numel", one.numel()), one.requires_grad) for one in model.parameters()]
    trained = sum(size for size, is_trained in sizes if is_trained)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return Model(sum(size for size, _ in sizes), trained, layers, heads, head_dim)


def _is_sharded(args: Any) -> bool:
    # FSDP 1 flattens parameters and leaves each rank its shard; FSDP 2 keeps their global shapes.
    settings = getattr(args, "fsdp_config", None) or {}
    return bool(getattr(args, "fsdp", None)) and str(settings.get("version", settings.get("fsdp_version", 1))) == "1"


def peak_of(args: Any, model: Any, given: float | None) -> Peak | None:
    """The peak of one device, or None if it is not known."""
    dtype: Any = "bfloat16" if args.bf16 else "float16" if args.fp16 else getattr(model, "dtype", torch.float32)
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    device = args.device.type
    if given is not None:
        return peak_flops(device, dtype, given=given)
    if device != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(args.device), dtype)
