"""Floating-point operations as PyTorch counts them, for :mod:`deep500_timing.flops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from deep500_timing.adapters import warn_once
from deep500_timing.flops import ModelFlops, Peak, given_flops, peak_flops
from deep500_timing_torch._clock import accelerator

__all__ = ["count_flops", "device_peak_flops"]


def count_flops(
    function: Callable[..., Any],
    *args: Any,
    units: float = 1,
    unit: str = "step",
    recompute: bool = False,
    **kwargs: Any,
) -> ModelFlops | None:
    """Run a step once and count its operations with ``torch.utils.flop_counter.FlopCounterMode``.

    It counts matrix products, convolutions and attention, and no element-wise operations; the work of a custom kernel,
    such as one from Triton, it cannot see.

    Args:
        function: Forward and backward of one step. It really runs, outside of any timing.
        *args: For the function.
        units: How many units of input the step processes, such as its tokens, on this device.
        unit: The unit that is counted.
        recompute: Whether the step recomputes activations: PyTorch counts these operations too, so that what comes
            out is HFU.
        **kwargs: For the function.

    Returns:
        The operations per unit, or None with one message if none were counted.

    Raises:
        ValueError: ``units`` is not above 0.
    """
    if not units > 0:
        raise ValueError(
            f"count_flops(units={units!r}): the operations of a step are divided by it; it must be above 0."
        )
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    total = counter.get_total_flops()
    if total == 0:
        warn_once(
            f"Counting the FLOPs of {getattr(function, '__name__', function)!r}: FlopCounterMode saw no matrix "
            "product, convolution or attention, so there is no MFU. Count a whole step, or give the number by "
            "given_flops()."
        )
        return None
    formula = f"torch {torch.__version__} FlopCounterMode: {total:.6g} per step of {units:g} {unit}(s)"
    return given_flops(total / units, unit, formula=formula, recompute=recompute)


def device_peak_flops(
    device: torch.device | str | None = None, dtype: object = torch.bfloat16, *, given: float | None = None
) -> Peak | None:
    """The dense peak of a device by the name that PyTorch gives it, see :func:`deep500_timing.flops.peak_flops`.

    Args:
        device: The device; the current one of the accelerator that is there if None.
        dtype: What matrix products are computed in. float32 is looked up as ``"tf32"`` where PyTorch may use it.
        given: The peak in FLOP/s, if you know it.

    Returns:
        The peak, or None with one message if there is no device or the table does not have it.
    """
    kind = accelerator() if device is None else torch.device(device).type
    name = "cpu"
    if kind is not None and kind != "cpu":
        module = torch.get_device_module(kind)
        get_name = getattr(module, "get_device_name", None)
        name = kind if get_name is None else str(get_name(device))
    uses_tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    if uses_tf32 and dtype in (torch.float32, "float32", "fp32"):
        dtype = "tf32"
    return peak_flops(name, dtype, given=given)
