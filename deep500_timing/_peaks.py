"""Peak FLOP/s of devices, read from ``peaks.csv``: dense, without the sparsity that data sheets like to count."""

from __future__ import annotations

import csv
import os
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeakRow:
    """The peak of one device."""

    device: str
    pattern: str
    """A regular expression that matches the whole name that the framework gives the device."""
    dtypes: dict[str, float]
    """Dense peak in FLOP/s by data type; 16-bit types with accumulation in 32 bits."""
    source: str
    """Where the numbers stand."""


def _read() -> tuple[PeakRow, ...]:
    with open(os.path.join(os.path.dirname(__file__), "peaks.csv"), encoding="utf-8", newline="") as file:
        rows = []
        for row in csv.DictReader(file):
            device, pattern, source = (row.pop(name) for name in ("device", "pattern", "source"))
            rows.append(
                PeakRow(device, pattern, {dtype: float(f"{peak}e12") for dtype, peak in row.items() if peak}, source)
            )
    return tuple(rows)


# The name must match as a whole: an A10G is not an "NVIDIA A10", and a slice of a GPU ("... MIG 3g.40gb") has another
# peak than the GPU.
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
    own_name = getattr(dtype, "name", None)  # TensorFlow's and numpy's data types have one.
    text = own_name if isinstance(own_name, str) else str(dtype)
    name = text.rpartition(".")[2].strip("'<> ").lower().removeprefix("mixed_")
    if name.startswith("float8"):
        return "float8"
    return _ALIASES.get(name, name)


def row_of(device_name: str) -> PeakRow | None:
    name = device_name.strip()
    for row in PEAKS:
        if name == row.device or re.fullmatch(row.pattern, name):
            return row
    return None
