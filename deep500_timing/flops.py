"""How much of the hardware's arithmetic a training run uses: model FLOP/s, MFU and HFU.

::

    from deep500_timing.flops import peak_flops, transformer_flops, utilization

    model = transformer_flops(540.35e9, layers=118, heads=48, head_dim=256, sequence_length=2048)
    used = utilization(238.3e3, model, peak_flops("TPU v4", "bfloat16"), devices=6144)
    print(used)          # MFU 46.2 % (...)

The rate may come from ``ThroughputTimer.average("tokens")``; where it is None, or the peak is, there is no result.
"""

from __future__ import annotations

import csv
import math
import os
import re
from dataclasses import dataclass
from typing import NamedTuple

from deep500_timing._base.warn import warn_once
from deep500_timing._summary.text import format_utilization

__all__ = ["ModelFlops", "Peak", "Utilization", "given_flops", "peak_flops", "transformer_flops", "utilization"]


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a model for one unit of its input, forward and backward."""

    flops: float
    """Floating-point operations per unit; a multiplication with an addition is two."""
    unit: str
    """The unit: ``"token"``, ``"sample"``, ``"step"``."""
    formula: str
    recompute: bool = False
    """Whether operations that are done a second time are in it, as by activation checkpointing: then what comes out
    is HFU (hardware FLOP utilization) and not MFU (model FLOP utilization)."""


@dataclass(frozen=True, slots=True)
class Peak:
    """What one device can compute at most."""

    flops_per_s: float
    device: str
    dtype: str
    source: str


@dataclass(frozen=True, slots=True)
class Utilization:
    """The share of the peak that a run reaches, with all that it is made of."""

    ratio: float
    """Achieved over peak; 1.0 is all of it."""
    kind: str
    """``"MFU"``, or ``"HFU"`` where recomputed operations are counted."""
    achieved_flops_per_s: float
    peak_flops_per_s: float
    devices: int
    device: str
    dtype: str
    formula: str
    peak_source: str

    @property
    def above_peak(self) -> bool:
        """Whether it is more than there can be: the formula, the rate, the number of devices or the dtype is wrong."""
        return self.ratio > 1.0

    def __str__(self) -> str:
        flag = " IMPOSSIBLE: above the peak" if self.above_peak else ""
        return (
            f"{self.kind} {format_utilization(self.ratio)}{flag} ({self.achieved_flops_per_s:.4g} FLOP/s of "
            f"{self.devices} × {self.device} {self.dtype}, peak {self.peak_flops_per_s:.4g} FLOP/s; {self.formula})"
        )


def transformer_flops(
    parameters: float,
    *,
    layers: int = 0,
    heads: int = 0,
    head_dim: int = 0,
    sequence_length: int = 0,
    attention: bool = True,
    recomputed: float = 0.0,
) -> ModelFlops:
    """FLOPs of a dense decoder-only transformer for one token in training: 6·N + 12·L·H·Q·T.

    Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B. The attention is counted in full, without half of it
    for a causal mask. For a mixture of experts, N is what one token passes through.

    Args:
        parameters: N, how many the model has.
        layers: L.
        heads: H, query heads per layer.
        head_dim: Q, the size of one head.
        sequence_length: T, in tokens.
        attention: Count the second term; without it L, H, Q and T are not needed.
        recomputed: Share of the forward pass that is computed again in the backward pass, 0 to 1. Above 0 what comes
            out is HFU.

    Raises:
        ValueError: A size is negative or not finite, or the attention is asked for and one is 0.
    """
    sizes = {"layers": layers, "heads": heads, "head_dim": head_dim, "sequence_length": sequence_length}
    for name, value in {"parameters": parameters, **sizes}.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"transformer_flops({name}={value!r}): it must be finite and 0 or more.")
    if not 0.0 <= recomputed <= 1.0:
        raise ValueError(f"transformer_flops(recomputed={recomputed!r}): it is a share of the forward pass, 0 to 1.")
    flops = 6.0 * parameters
    formula = f"6·N, N={parameters:.6g}"
    if attention:
        missing = [name for name, value in sizes.items() if not value]
        if missing:
            raise ValueError(
                f"transformer_flops() without {', '.join(missing)}: the attention's share depends on them. Give "
                "them, or leave it out by attention=False."
            )
        flops += 12.0 * layers * heads * head_dim * sequence_length
        formula = (
            f"6·N + 12·L·H·Q·T, N={parameters:.6g}, L={layers}, H={heads}, Q={head_dim}, T={sequence_length} "
            "(PaLM, appendix B)"
        )
    if recomputed:
        # Forward is a third of it, backward two.
        flops *= (3.0 + recomputed) / 3.0
        formula += f", and {recomputed * 100:g} % of the forward pass again"
    return ModelFlops(flops, "token", formula, recompute=recomputed > 0.0)


def given_flops(flops: float, unit: str = "token", *, formula: str = "given", recompute: bool = False) -> ModelFlops:
    """A count that you bring.

    Args:
        flops: Per unit, forward and backward.
        unit: The unit.
        formula: How the number was obtained.
        recompute: Whether recomputed operations are in it.

    Raises:
        ValueError: ``flops`` is negative or not finite.
    """
    if not 0.0 <= flops < math.inf:
        raise ValueError(f"given_flops({flops!r}): it must be finite and 0 or more.")
    return ModelFlops(float(flops), unit, formula, recompute)


def peak_flops(device: str, dtype: object = "bfloat16", *, given: float | None = None) -> Peak | None:
    """The dense peak of one device, or None with one message if the table does not have it.

    Args:
        device: The name that the framework gives it, such as ``torch.cuda.get_device_name()``.
        dtype: The data type of the matrix products: a name, or the framework's object. ``"tf32"`` is not float32.
        given: The peak in FLOP/s, if you know it; the table is not asked then.

    Raises:
        ValueError: ``given`` is not above 0.
    """
    name = dtype_name(dtype)
    if given is not None:
        if not 0.0 < given < math.inf:
            raise ValueError(f"peak_flops(given={given!r}): a peak is a finite number above 0, in FLOP/s.")
        return Peak(float(given), device, name, "given")
    known_as = device.strip()
    row = next((row for row in PEAKS if known_as == row.device or re.fullmatch(row.pattern, known_as)), None)
    if row is not None and name in row.dtypes:
        return Peak(row.dtypes[name], row.device, name, row.source)
    what = repr(device) if row is None else f"{row.device} for {name}"
    known = [known.device for known in PEAKS] if row is None else row.dtypes
    warn_once(
        f"The peak FLOP/s of {what} is not known here, so there is no MFU. Pass it: peak_flops({device!r}, {name!r}, "
        f"given=...). Known are: {', '.join(known)}.",
        key=f"peak {device} {row and name}",
    )
    return None


def utilization(
    units_per_s: float | None, model: ModelFlops | None, peak: Peak | None, *, devices: int = 1
) -> Utilization | None:
    """The share of the peak that a run reaches; None if any part of it is not known.

    Args:
        units_per_s: The rate of the whole job, in units of ``model`` per second.
        model: What one unit costs.
        peak: What one device can do.
        devices: How many devices the job runs on.

    Raises:
        ValueError: ``devices`` is not above 0, or the rate is negative or not finite.
    """
    if devices < 1:
        raise ValueError(f"utilization(devices={devices!r}): a job runs on at least one.")
    if units_per_s is None or model is None or peak is None:
        return None
    if not 0.0 <= units_per_s < math.inf:
        raise ValueError(f"utilization({units_per_s!r}): a rate is finite and 0 or more, per second.")
    achieved = units_per_s * model.flops
    whole_peak = peak.flops_per_s * devices
    result = Utilization(
        ratio=achieved / whole_peak,
        kind="HFU" if model.recompute else "MFU",
        achieved_flops_per_s=achieved,
        peak_flops_per_s=whole_peak,
        devices=devices,
        device=peak.device,
        dtype=peak.dtype,
        formula=model.formula,
        peak_source=peak.source,
    )
    if result.above_peak:
        warn_once(
            f"{result}. Check the rate (of the whole job, in {model.unit}s per second), the formula, the number of "
            "devices and the data type.",
            key=f"above peak {peak.device} {peak.dtype} {model.formula}",
        )
    return result


class PeakRow(NamedTuple):
    """The peaks of one device: FLOP/s by data type, dense; 16-bit types with accumulation in 32 bits."""

    device: str
    pattern: str
    dtypes: dict[str, float]
    source: str


def _read() -> tuple[PeakRow, ...]:
    rows = []
    with open(os.path.join(os.path.dirname(__file__), "peaks.csv"), encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            device, pattern, source = (row.pop(name) for name in ("device", "pattern", "source"))
            dtypes = {dtype: float(f"{peak}e12") for dtype, peak in row.items() if peak}
            rows.append(PeakRow(device, pattern, dtypes, source))
    return tuple(rows)


# A pattern matches the whole name that the framework gives: an A10G is not an "NVIDIA A10", and a slice of a GPU
# ("... MIG 3g.40gb") has another peak than the GPU.
PEAKS = _read()

_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "float": "float32",
    "fp8": "float8",
    "tensorfloat32": "tf32",
}


def dtype_name(dtype: object) -> str:
    """The table's name of a data type: of a string, or of a framework's own object, such as ``torch.bfloat16``.

    Of a mixed policy, such as Keras's ``mixed_bfloat16``, the type that it computes in.
    """
    dtype = getattr(dtype, "compute_dtype", dtype)
    text = str(getattr(dtype, "name", dtype))  # TensorFlow's and numpy's data types have a name.
    name = text.rpartition(".")[2].strip("'<> ").lower().removeprefix("mixed_")
    if name.startswith("float8"):
        return "float8"
    return _ALIASES.get(name, name)
