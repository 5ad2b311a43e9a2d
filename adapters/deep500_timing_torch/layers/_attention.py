"""Finds attention by its operators, not by the names of modules."""

from __future__ import annotations

import re

_OPERATORS = frozenset(
    {
        # Composite: torch.nn.functional.scaled_dot_product_attention and the operators below it.
        "aten::scaled_dot_product_attention",
        "aten::_scaled_dot_product_attention_math",
        "aten::_scaled_dot_product_attention_math_for_mps",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "aten::_transformer_encoder_layer_fwd",
        "aten::_native_multi_head_attention",
        # Their backward passes.
        "aten::_scaled_dot_product_flash_attention_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "aten::_scaled_dot_product_efficient_attention_backward",
        "aten::_scaled_dot_product_cudnn_attention_backward",
        "aten::_flash_attention_backward",
        "aten::_efficient_attention_backward",
        "aten::_cudnn_attention_backward",
    }
)
# The flash-attn and xformers packages, and kernels by themselves.
_NAMES = re.compile(
    r"flash_attn|flash_fwd|flash_bwd|FlashAttn|fmha|memory_efficient_attention|xformers.*attention", re.IGNORECASE
)


def is_attention(name: str) -> bool:
    """Whether an operator or a kernel of that name computes attention."""
    return name in _OPERATORS or _NAMES.search(name) is not None
