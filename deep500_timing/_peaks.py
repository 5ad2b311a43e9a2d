"""Peak FLOP/s of devices: dense, without the sparsity that data sheets like to count, each row with its source."""

from __future__ import annotations

import re
from dataclasses import dataclass


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


_T = 1e12

# The name must match as a whole: an A10G is not an "NVIDIA A10", and a slice of a GPU ("... MIG 3g.40gb") has another
# peak than the GPU.
PEAKS = (
    PeakRow(
        "NVIDIA V100 SXM",
        r"Tesla V100-SXM[23]-\d+GB(-LS)?",
        {"float16": 125 * _T, "float32": 15.7 * _T},
        "NVIDIA Tesla V100 GPU Accelerator data sheet, V100 for NVLink",
    ),
    PeakRow(
        "NVIDIA V100 PCIe",
        r"Tesla V100-PCIE-\d+GB",
        {"float16": 112 * _T, "float32": 14 * _T},
        "NVIDIA Tesla V100 GPU Accelerator data sheet, V100 for PCIe",
    ),
    PeakRow("NVIDIA T4", r"(NVIDIA |Tesla )T4", {"float16": 65 * _T, "float32": 8.1 * _T}, "NVIDIA T4 data sheet"),
    PeakRow(
        "NVIDIA A100",
        r"(NVIDIA )?A100-(SXM4|PCIE)-\d+GB|(NVIDIA )?A100-SXM-80GB|NVIDIA A100 80GB PCIe",
        {"bfloat16": 312 * _T, "float16": 312 * _T, "tf32": 156 * _T, "float32": 19.5 * _T},
        "NVIDIA A100 Tensor Core GPU data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA A10",
        r"NVIDIA A10",
        {"bfloat16": 125 * _T, "float16": 125 * _T, "tf32": 62.5 * _T, "float32": 31.2 * _T},
        "NVIDIA A10 Tensor Core GPU data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA A10G",
        r"NVIDIA A10G",
        {"bfloat16": 70 * _T, "float16": 70 * _T, "tf32": 35 * _T, "float32": 35 * _T},
        "NVIDIA A10G data sheet as published by AWS, without sparsity",
    ),
    PeakRow(
        "NVIDIA A30",
        r"NVIDIA A30",
        {"bfloat16": 165 * _T, "float16": 165 * _T, "tf32": 82 * _T, "float32": 10.3 * _T},
        "NVIDIA A30 Tensor Core GPU data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA A40",
        r"NVIDIA A40",
        {"bfloat16": 149.7 * _T, "float16": 149.7 * _T, "tf32": 74.8 * _T, "float32": 37.4 * _T},
        "NVIDIA A40 data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA L4",
        r"NVIDIA L4",
        {"bfloat16": 121 * _T, "float16": 121 * _T, "tf32": 60 * _T, "float8": 242.5 * _T, "float32": 30.3 * _T},
        "NVIDIA L4 Tensor Core GPU data sheet, half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA L40",
        r"NVIDIA L40",
        {"bfloat16": 181.05 * _T, "float16": 181.05 * _T, "tf32": 90.5 * _T, "float8": 362 * _T, "float32": 90.5 * _T},
        "NVIDIA L40 GPU data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA L40S",
        r"NVIDIA L40S",
        {"bfloat16": 362.05 * _T, "float16": 362.05 * _T, "tf32": 183 * _T, "float8": 733 * _T, "float32": 91.6 * _T},
        "NVIDIA L40S GPU data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA H100 SXM",
        r"NVIDIA H100 80GB HBM3",
        {
            "bfloat16": 989.4 * _T,
            "float16": 989.4 * _T,
            "tf32": 494.7 * _T,
            "float8": 1978.9 * _T,
            "float32": 66.9 * _T,
        },
        "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 SXM5, without sparsity",
    ),
    PeakRow(
        "NVIDIA H100 PCIe",
        r"NVIDIA H100 PCIe",
        {"bfloat16": 756 * _T, "float16": 756 * _T, "tf32": 378 * _T, "float8": 1513 * _T, "float32": 51.2 * _T},
        "NVIDIA H100 Tensor Core GPU Architecture white paper, H100 PCIe, without sparsity",
    ),
    PeakRow(
        "NVIDIA H100 NVL",
        r"NVIDIA H100 NVL",
        {"bfloat16": 835.5 * _T, "float16": 835.5 * _T, "tf32": 417.5 * _T, "float8": 1670.5 * _T, "float32": 60 * _T},
        "NVIDIA H100 Tensor Core GPU data sheet, H100 NVL, half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA GH200",
        r"NVIDIA GH200 (480GB|120GB|144G HBM3e)",
        {"bfloat16": 990 * _T, "float16": 990 * _T, "tf32": 494 * _T, "float8": 1979 * _T, "float32": 67 * _T},
        "NVIDIA GH200 Grace Hopper Superchip data sheet, without sparsity",
    ),
    PeakRow(
        "NVIDIA H200 NVL",
        r"NVIDIA H200 NVL",
        {"bfloat16": 835.5 * _T, "float16": 835.5 * _T, "tf32": 417.5 * _T, "float8": 1670.5 * _T, "float32": 60 * _T},
        "NVIDIA H200 Tensor Core GPU data sheet, H200 NVL, half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA H200 SXM",
        r"NVIDIA H200",
        {"bfloat16": 989.5 * _T, "float16": 989.5 * _T, "tf32": 494.5 * _T, "float8": 1979 * _T, "float32": 67 * _T},
        "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM, half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA B200",
        r"NVIDIA B200",
        {"bfloat16": 2250 * _T, "float16": 2250 * _T, "tf32": 1125 * _T, "float8": 4500 * _T},
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200, half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA B300",
        r"NVIDIA B300( SXM6 AC)?",
        {"bfloat16": 2250 * _T, "float16": 2250 * _T, "tf32": 1125 * _T, "float8": 4500 * _T, "float32": 75 * _T},
        "NVIDIA HGX B300 specifications, an eighth of the board and half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA GB200",
        r"NVIDIA GB200",
        {"bfloat16": 2500 * _T, "float16": 2500 * _T, "tf32": 1250 * _T, "float8": 5000 * _T, "float32": 80 * _T},
        "NVIDIA GB200 NVL72 specifications, a 72nd of the rack and half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA GB300",
        r"NVIDIA GB300",
        {"bfloat16": 2500 * _T, "float16": 2500 * _T, "tf32": 1250 * _T, "float8": 5000 * _T},
        "NVIDIA GB300 NVL72 specifications, a 72nd of the rack and half of the numbers with sparsity",
    ),
    PeakRow(
        "NVIDIA RTX A6000",
        r"NVIDIA RTX A6000",
        {"bfloat16": 154.8 * _T, "float16": 154.8 * _T, "tf32": 77.4 * _T, "float32": 38.7 * _T},
        "NVIDIA Ampere GA102 GPU Architecture white paper, RTX A6000, without sparsity, FP32 accumulate",
    ),
    PeakRow(
        "NVIDIA RTX 6000 Ada",
        r"NVIDIA RTX 6000 Ada Generation",
        {"bfloat16": 364.2 * _T, "float16": 364.2 * _T, "tf32": 182.1 * _T, "float8": 728.5 * _T, "float32": 91.1 * _T},
        "NVIDIA Ada GPU Architecture white paper (ProViz), RTX 6000, without sparsity, FP32 accumulate",
    ),
    PeakRow(
        "NVIDIA GeForce RTX 3090",
        r"(NVIDIA )?GeForce RTX 3090",
        {"bfloat16": 71 * _T, "float16": 71 * _T, "tf32": 35.6 * _T, "float32": 35.6 * _T},
        "NVIDIA Ampere GA102 GPU Architecture white paper, without sparsity, FP32 accumulate",
    ),
    PeakRow(
        "NVIDIA GeForce RTX 4090",
        r"NVIDIA GeForce RTX 4090",
        {"bfloat16": 165.2 * _T, "float16": 165.2 * _T, "tf32": 82.6 * _T, "float32": 82.6 * _T},
        "NVIDIA Ada GPU Architecture white paper, without sparsity, FP32 accumulate",
    ),
    PeakRow(
        "NVIDIA GeForce RTX 5090",
        r"NVIDIA GeForce RTX 5090",
        {"bfloat16": 209.5 * _T, "float16": 209.5 * _T, "tf32": 104.8 * _T, "float8": 419 * _T, "float32": 104.8 * _T},
        "NVIDIA RTX Blackwell GPU Architecture white paper, without sparsity, FP32 accumulate",
    ),
    PeakRow(
        "AMD Instinct MI210",
        r"AMD Instinct MI210",
        {"bfloat16": 181 * _T, "float16": 181 * _T},
        "AMD Instinct MI210 Accelerator data sheet",
    ),
    PeakRow(
        "AMD Instinct MI250X, one of its two dies",
        r"AMD Instinct MI250X",
        {"bfloat16": 191.5 * _T, "float16": 191.5 * _T},
        "AMD Instinct MI250X data sheet, half of the card's number: frameworks show each die as a device",
    ),
    PeakRow(
        "AMD Instinct MI300X",
        r"AMD Instinct MI300X( VF)?",
        {
            "bfloat16": 1307.4 * _T,
            "float16": 1307.4 * _T,
            "tf32": 653.7 * _T,
            "float8": 2614.9 * _T,
            "float32": 163.4 * _T,
        },
        "AMD Instinct MI300X Accelerator data sheet, without sparsity",
    ),
    PeakRow(
        "AMD Instinct MI325X",
        r"AMD Instinct MI325X( VF)?",
        {
            "bfloat16": 1307.4 * _T,
            "float16": 1307.4 * _T,
            "tf32": 653.7 * _T,
            "float8": 2614.9 * _T,
            "float32": 163.4 * _T,
        },
        "AMD Instinct MI325X Accelerator data sheet, without sparsity",
    ),
    PeakRow(
        "AMD Instinct MI355X",
        r"AMD Instinct MI355X( VF)?",
        {"bfloat16": 2516.6 * _T, "float16": 2516.6 * _T, "float8": 5033.2 * _T, "float32": 157.3 * _T},
        "AMD Instinct MI355X GPU data sheet, without sparsity",
    ),
    PeakRow(
        "Google TPU v4",
        r"TPU v4",
        {"bfloat16": 275 * _T},
        "Google Cloud TPU documentation, TPU v4; PaLM, arXiv 2204.02311",
    ),
    PeakRow("Google TPU v5e", r"TPU (v5e|v5 lite)", {"bfloat16": 197 * _T}, "Google Cloud TPU documentation, TPU v5e"),
    PeakRow("Google TPU v5p", r"TPU v5p?", {"bfloat16": 459 * _T}, "Google Cloud TPU documentation, TPU v5p"),
    PeakRow("Google TPU v6e", r"TPU (v6e|v6 lite)", {"bfloat16": 918 * _T}, "Google Cloud TPU documentation, TPU v6e"),
    PeakRow(
        "Google TPU7x, one of its two TensorCores",
        r"TPU ?(v?7x)",
        {"bfloat16": 1153.5 * _T, "float8": 2307 * _T},
        "Google Cloud TPU documentation, TPU7x, half of the chip's number: JAX shows each TensorCore as a device",
    ),
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
    """The row of a device, or None."""
    name = device_name.strip()
    for row in PEAKS:
        if name == row.device or re.fullmatch(row.pattern, name):
            return row
    return None
