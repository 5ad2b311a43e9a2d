"""The times of each range of a profile, as plain data; attention is found by its operators."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

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


@dataclass(frozen=True, slots=True)
class RangeTime:
    """One run through a range: a call of a block, or of a function that was recorded."""

    name: str
    """The block's path, or the name that the user gave."""
    start_us: float
    """When it began, on the profiler's clock, in microseconds."""
    cpu_us: float
    """Its time on the CPU, in microseconds."""
    device_us: float | None
    """The time of the kernels that it launched, in microseconds; None if it launched none."""
    attention_us: float | None
    """The part of that in attention (of the CPU's time, where there were no kernels), in microseconds; None if no
    attention operator was found."""

    holds_others: bool = False
    """Whether other ranges lie within it."""

    @property
    def time_us(self) -> float:
        """The device's time where there is one, else the CPU's."""
        return self.cpu_us if self.device_us is None else self.device_us


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory after one run through a range; None where it cannot be known."""

    name: str
    """The block's path, or the name that the user gave."""
    allocated_bytes: int | None
    """What tensors occupied on the device."""
    reserved_bytes: int | None
    """Bytes that the device's allocator held."""
    host_bytes: int | None
    """The resident set of the process. Not the device's memory, and not shown as it."""


def ranges_of(events: Iterable[Any], names: frozenset[str]) -> list[RangeTime]:
    """The ranges of a profile, in the order in which they began."""
    found = []
    for event in events:
        # On a GPU each range comes twice; the second, on the device's timeline, has no operators within.
        if event.name in names and event.device_type.name == "CPU":
            device_us = float(event.device_time_total) or None
            found.append(
                RangeTime(
                    event.name,
                    float(event.time_range.start),
                    float(event.cpu_time_total),
                    device_us,
                    _attention_us(event, on_device=device_us is not None),
                    _holds(event, names),
                )
            )
    return sorted(found, key=lambda one: (one.start_us, one.name))


def _holds(event: Any, names: frozenset[str]) -> bool:
    return any(inner.name in names or _holds(inner, names) for inner in event.cpu_children)


def _attention_us(event: Any, *, on_device: bool) -> float | None:
    total: float | None = None
    for inner in event.cpu_children:
        found: float | None
        if is_attention(inner.name):
            # The operators that it dispatches to lie within it.
            found = float(inner.device_time_total if on_device else inner.cpu_time_total)
        else:
            found = _attention_us(inner, on_device=on_device)
        if found is not None:
            total = (total or 0.0) + found
    return total
