"""Tokens per second and MFU of one rank under a trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from deep500_timing.flops import ModelFlops, Peak, Utilization, given_flops, peak_flops, utilization

if TYPE_CHECKING:
    from collections.abc import Callable

    from deep500_timing_torch.trainers._data import Amounts

    TokenFlops = Callable[[float], ModelFlops]

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
    dtype: Any = "bfloat16" if args.bf16 else "float16" if args.fp16 else getattr(model, "dtype", torch.float32)
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        dtype = "tf32"
    device = args.device.type
    if given is not None:
        return peak_flops(device, dtype, given=given)
    if device != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(args.device), dtype)
