"""Peak FLOP/s of devices: dense, without the sparsity that data sheets like to count, each row with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PeakRow:
    """The peak of one device."""

    device: str
    """The name for people."""
    pattern: str
    """A regular expression that matches the whole name that the framework gives the device."""
    dtypes: dict[str, float]
    """Dense peak in FLOP/s by data type; 16-bit types with accumulation in 32 bits."""
    source: str
    """Where the numbers stand."""


_UNCHECKED = " (from other listings, not checked at the source)"

# The name must match as a whole: an A10G is not an "NVIDIA A10", and a slice of a GPU ("... MIG 3g.40gb") has another
# peak than the GPU. Data sheets of NVIDIA often list twice the dense figure, with sparsity.
# fmt: off
_ROWS: tuple[tuple[Any, ...], ...] = (
    # device, pattern, TFLOP/s of bfloat16, float16, tf32, float8, float32, source
    ("NVIDIA V100 SXM", r"Tesla V100-SXM[23]-\d+GB(-LS)?", None, 125, None, None, 15.7,
     "NVIDIA Tesla V100 GPU Accelerator data sheet, V100 for NVLink"),
    ("NVIDIA V100 PCIe", r"Tesla V100-PCIE-\d+GB", None, 112, None, None, 14,
     "NVIDIA Tesla V100 GPU Accelerator data sheet, V100 for PCIe"),
    ("NVIDIA T4", "(NVIDIA |Tesla )T4", None, 65, None, None, 8.1, "NVIDIA T4 data sheet"),
    ("NVIDIA A100", r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|(NVIDIA )?A100-SXM-80GB|NVIDIA A100 80GB PCIe",
     312, 312, 156, None, 19.5,
     "NVIDIA A100 Tensor Core GPU data sheet"),
    ("NVIDIA A800", "NVIDIA A800-SXM4-(40|80)GB|NVIDIA A800 (40|80)GB (PCIe|Active)", 312, 312, 156, None, 19.5,
     "NVIDIA A100 Tensor Core GPU data sheet: an A100 with slower links" + _UNCHECKED),
    ("NVIDIA A10", "NVIDIA A10", 125, 125, 62.5, None, 31.2, "NVIDIA A10 Tensor Core GPU data sheet"),
    ("NVIDIA A10G", "NVIDIA A10G", 70, 70, 35, None, 35, "NVIDIA A10G data sheet as published by AWS" + _UNCHECKED),
    ("NVIDIA A30", "NVIDIA A30", 165, 165, 82, None, 10.3, "NVIDIA A30 Tensor Core GPU data sheet" + _UNCHECKED),
    ("NVIDIA A40", "NVIDIA A40", 149.7, 149.7, 74.8, None, 37.4, "NVIDIA A40 data sheet" + _UNCHECKED),
    ("NVIDIA L4", "NVIDIA L4", 121, 121, 60, 242.5, 30.3, "NVIDIA L4 Tensor Core GPU data sheet"),
    ("NVIDIA L40", "NVIDIA L40", 181.05, 181.05, 90.5, 362, 90.5, "NVIDIA L40 GPU data sheet" + _UNCHECKED),
    ("NVIDIA L40S", "NVIDIA L40S", 362.05, 362.05, 183, 733, 91.6, "NVIDIA L40S GPU data sheet"),
    ("NVIDIA H100 SXM", "NVIDIA H100 80GB HBM3", 989.4, 989.4, 494.7, 1978.9, 66.9,
     "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 SXM5"),
    ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", 756, 756, 378, 1513, 51.2,
     "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 PCIe"),
    ("NVIDIA H100 NVL", "NVIDIA H100 NVL", 835.5, 835.5, 417.5, 1670.5, 60,
     "NVIDIA H100 Tensor Core GPU data sheet, H100 NVL" + _UNCHECKED),
    ("NVIDIA H800 SXM", "NVIDIA H800", 989.4, 989.4, 494.7, 1978.9, 66.9,
     "NVIDIA H100 Tensor Core GPU Architecture white paper: an H100 SXM5 with slower links" + _UNCHECKED),
    ("NVIDIA H800 PCIe", "NVIDIA H800 PCIe", 756, 756, 378, 1513, 51.2,
     "NVIDIA H100 Tensor Core GPU Architecture white paper: an H100 PCIe with slower links" + _UNCHECKED),
    ("NVIDIA H20", "NVIDIA H20(-3e)?", 148, 148, 74, 296, 44, "NVIDIA publishes no data sheet of it" + _UNCHECKED),
    ("NVIDIA GH200", "NVIDIA GH200 (480GB|120GB|144G HBM3e)", 990, 990, 494, 1979, 67,
     "NVIDIA GH200 Grace Hopper Superchip data sheet" + _UNCHECKED),
    ("NVIDIA H200 NVL", "NVIDIA H200 NVL", 835.5, 835.5, 417.5, 1670.5, 60,
     "NVIDIA H200 Tensor Core GPU data sheet, H200 NVL" + _UNCHECKED),
    ("NVIDIA H200 SXM", "NVIDIA H200", 989.5, 989.5, 494.5, 1979, 67,
     "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM"),
    ("NVIDIA B200", "NVIDIA B200", 2250, 2250, 1125, 4500, None,
     "NVIDIA Blackwell Architecture Technical Brief, HGX B200"),
    ("NVIDIA B300", "NVIDIA B300( SXM6 AC)?", 2250, 2250, 1125, 4500, 75,
     "NVIDIA HGX B300 specifications, an eighth of the board" + _UNCHECKED),
    ("NVIDIA GB200", "NVIDIA GB200", 2500, 2500, 1250, 5000, 80,
     "NVIDIA GB200 NVL72 specifications, a 72nd of the rack" + _UNCHECKED),
    ("NVIDIA GB300", "NVIDIA GB300", 2500, 2500, 1250, 5000, None,
     "NVIDIA GB300 NVL72 specifications, a 72nd of the rack" + _UNCHECKED),
    ("NVIDIA RTX A6000", "NVIDIA RTX A6000", 154.8, 154.8, 77.4, None, 38.7,
     "NVIDIA Ampere GA102 GPU Architecture white paper, RTX A6000, FP32 accumulate" + _UNCHECKED),
    ("NVIDIA RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 364.2, 364.2, 182.1, 728.5, 91.1,
     "NVIDIA Ada GPU Architecture white paper (ProViz), RTX 6000, FP32 accumulate" + _UNCHECKED),
    ("NVIDIA GeForce RTX 3090", "(NVIDIA )?GeForce RTX 3090", 71, 71, 35.6, None, 35.6,
     "NVIDIA Ampere GA102 GPU Architecture white paper, FP32 accumulate"),
    ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 165.2, 165.2, 82.6, None, 82.6,
     "NVIDIA Ada GPU Architecture white paper, FP32 accumulate"),
    ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090", 209.5, 209.5, 104.8, 419, 104.8,
     "NVIDIA RTX Blackwell GPU Architecture white paper, FP32 accumulate" + _UNCHECKED),
    ("AMD Instinct MI210", "AMD Instinct MI210", 181, 181, None, None, None,
     "AMD Instinct MI210 Accelerator data sheet" + _UNCHECKED),
    ("AMD Instinct MI250X, one of its two dies", "AMD Instinct MI250X", 191.5, 191.5, None, None, None,
     "AMD Instinct MI250X data sheet, half of the card's number: frameworks show each die as a device"),
    ("AMD Instinct MI300X", "AMD Instinct MI300X( VF)?", 1307.4, 1307.4, 653.7, 2614.9, 163.4,
     "AMD Instinct MI300X Accelerator data sheet"),
    ("AMD Instinct MI325X", "AMD Instinct MI325X( VF)?", 1307.4, 1307.4, 653.7, 2614.9, 163.4,
     "AMD Instinct MI325X Accelerator data sheet" + _UNCHECKED),
    ("AMD Instinct MI355X", "AMD Instinct MI355X( VF)?", 2516.6, 2516.6, None, 5033.2, 157.3,
     "AMD Instinct MI355X GPU data sheet" + _UNCHECKED),
    ("Google TPU v4", "TPU v4", 275, None, None, None, None,
     "Google Cloud TPU documentation, TPU v4; PaLM, arXiv 2204.02311"),
    ("Google TPU v5e", "TPU (v5e|v5 lite)", 197, None, None, None, None, "Google Cloud TPU documentation, TPU v5e"),
    ("Google TPU v5p", "TPU v5p?", 459, None, None, None, None, "Google Cloud TPU documentation, TPU v5p"),
    ("Google TPU v6e", "TPU (v6e|v6 lite)", 918, None, None, None, None, "Google Cloud TPU documentation, TPU v6e"),
    ("Google TPU7x, one of its two TensorCores", "TPU ?(v?7x)", 1153.5, None, None, 2307, None,
     "Google Cloud TPU documentation, TPU7x, half of the chip's number: JAX shows each TensorCore as a device"),
)
# fmt: on

PEAKS = tuple(
    PeakRow(
        device,
        pattern,
        {
            name: peak * 1e12
            for name, peak in zip(("bfloat16", "float16", "tf32", "float8", "float32"), peaks, strict=True)
            if peak is not None
        },
        source,
    )
    for device, pattern, *peaks, source in _ROWS
)

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
