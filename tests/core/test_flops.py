"""Model FLOP/s, MFU and HFU."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from deep500_timing import TimingWarning
from deep500_timing.flops import PEAKS, dtype_name, given_flops, peak_flops, transformer_flops, utilization

pytestmark = pytest.mark.one_form

PALM = {"layers": 118, "heads": 48, "head_dim": 256, "sequence_length": 2048}


@pytest.mark.parametrize(("attention", "percent"), [(False, "45.7"), (True, "46.2")])
def test_palm(attention, percent):
    """PaLM 540B on 6144 TPU v4 reached 45.7 %, and 46.2 % with the attention counted (arXiv 2204.02311)."""
    model = transformer_flops(540.35e9, **PALM, attention=attention)
    used = utilization(238.3e3, model, peak_flops("TPU v4", "bfloat16"), devices=6144)
    assert f"{used.ratio * 100:.1f}" == percent
    assert used.kind == "MFU"
    assert used.peak_flops_per_s == 6144 * 275e12


def test_a_result_carries_what_it_stands_on():
    """Formula, peak, dtype, device and source are in the result and in its line."""
    used = utilization(1e3, transformer_flops(1e9, attention=False), peak_flops("NVIDIA H200", "bf16"), devices=2)
    assert (used.dtype, used.device, used.devices) == ("bfloat16", "NVIDIA H200 SXM", 2)
    assert used.formula == "6·N, N=1e+09"
    assert "data sheet" in used.peak_source
    line = str(used)
    assert line.startswith("MFU 0.3 % (6e+12 FLOP/s of 2 × NVIDIA H200 SXM bfloat16, peak 1.979e+15 FLOP/s; 6·N")


def test_recomputed_operations_make_it_hfu():
    """A forward pass done again is a third more, and another name."""
    once = transformer_flops(1e9, **PALM)
    again = transformer_flops(1e9, **PALM, recomputed=1.0)
    assert again.flops == pytest.approx(once.flops * 4 / 3)
    assert utilization(1.0, again, peak_flops("TPU v4")).kind == "HFU"
    assert "100 % of the forward pass again" in again.formula


def test_a_count_and_a_peak_may_be_given():
    """Neither a formula nor the table is needed."""
    model = given_flops(3e12, "step", formula="counted by hand")
    used = utilization(10.0, model, peak_flops("my chip", "float32", given=60e12))
    assert (used.ratio, used.peak_source, used.formula) == (pytest.approx(0.5), "given", "counted by hand")


def test_an_unknown_device_gives_none_with_one_message():
    """Never a guess: the message names the device and the remedy, and is said once."""
    with pytest.warns(TimingWarning, match="'NVIDIA A2' is not known here, so there is no MFU.*given="):
        assert peak_flops("NVIDIA A2") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peak_flops("NVIDIA A2") is None
    assert utilization(10.0, given_flops(1.0), None) is None


def test_an_unknown_dtype_gives_none_with_one_message():
    """A T4 has no bfloat16."""
    with pytest.warns(TimingWarning, match="NVIDIA T4 for bfloat16 is not known.*float16, float32"):
        assert peak_flops("Tesla T4", "bfloat16") is None


def test_no_rate_gives_no_result():
    """``ThroughputTimer.average`` is None before there is a rate."""
    assert utilization(None, given_flops(1.0), peak_flops("TPU v4")) is None
    assert utilization(1.0, None, peak_flops("TPU v4")) is None


def test_more_than_there_can_be_is_flagged():
    """Above 100 % the result says so, in its line too, and one warning names what to check."""
    with pytest.warns(TimingWarning, match="IMPOSSIBLE.*Check the rate"):
        used = utilization(1.0, given_flops(276e12), peak_flops("TPU v4"))
    assert used.above_peak
    assert "IMPOSSIBLE: above the peak" in str(used)
    assert not utilization(1.0, given_flops(275e12), peak_flops("TPU v4")).above_peak


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100"),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100"),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100"),
        ("Tesla V100-SXM2-16GB", "NVIDIA V100 SXM"),
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", "NVIDIA A10G"),
        ("NVIDIA L40", "NVIDIA L40"),
        ("NVIDIA A100-SXM-80GB", "NVIDIA A100"),
        ("NVIDIA H100 NVL", "NVIDIA H100 NVL"),
        ("NVIDIA H200 NVL", "NVIDIA H200 NVL"),
        ("NVIDIA H20", "NVIDIA H20"),
        ("NVIDIA H800", "NVIDIA H800 SXM"),
        ("NVIDIA H800 PCIe", "NVIDIA H800 PCIe"),
        ("NVIDIA A800-SXM4-80GB", "NVIDIA A800"),
        ("NVIDIA A800 80GB PCIe", "NVIDIA A800"),
        ("NVIDIA GeForce RTX 5090", "NVIDIA GeForce RTX 5090"),
        ("NVIDIA GB300", "NVIDIA GB300"),
        ("NVIDIA GH200 480GB", "NVIDIA GH200"),
        ("NVIDIA GB200", "NVIDIA GB200"),
        ("NVIDIA B300 SXM6 AC", "NVIDIA B300"),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada"),
        ("AMD Instinct MI300X VF", "AMD Instinct MI300X"),
        ("AMD Instinct MI210", "AMD Instinct MI210"),
        ("AMD Instinct MI325X", "AMD Instinct MI325X"),
        ("AMD Instinct MI355X", "AMD Instinct MI355X"),
        ("TPU7x", "Google TPU7x, one of its two TensorCores"),
        ("TPU v5 lite", "Google TPU v5e"),
        ("TPU v5", "Google TPU v5p"),
    ],
)
def test_names_that_frameworks_give(name, device):
    """The table is looked up by the name that PyTorch or JAX gives a device."""
    dtype = "float16" if "V100" in name else "bfloat16"
    assert peak_flops(name, dtype).device == device


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A2",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "cpu",
        "",
    ],
)
def test_names_that_only_look_alike_are_unknown(name):
    """Another chip, a slice of one, or a laptop's has another peak."""
    with pytest.warns(TimingWarning, match="not known here"):
        assert peak_flops(name) is None


def test_every_row_names_its_source():
    """Each row of the table has a source, and dense peaks that make sense next to each other."""
    for row in PEAKS:
        assert len(row.source) > 10
        assert row.dtypes
        assert all(1e12 < peak < 1e16 for peak in row.dtypes.values())
        half, single = row.dtypes.get("float16"), row.dtypes.get("float32")
        assert half is None or single is None or half > single
        if "float8" in row.dtypes:
            assert row.dtypes["float8"] == pytest.approx(2 * row.dtypes["bfloat16"], rel=0.02)
    assert len({row.device for row in PEAKS}) == len(PEAKS)


def test_dtypes_by_any_name():
    """Strings, short names and a framework's objects are understood."""
    names = ["bf16", "BFloat16", "torch.bfloat16", "<class 'jax.numpy.bfloat16'>"]
    assert ["bfloat16"] * 4 == [dtype_name(name) for name in names]
    assert (dtype_name("torch.float8_e4m3fn"), dtype_name("fp16")) == ("float8", "float16")


def test_dtypes_of_frameworks_and_policies():
    """TensorFlow's types bear a name, and a mixed policy of Keras is the type that it computes in."""

    class DType:
        name = "bfloat16"

        def __str__(self):
            return "<dtype: 'bfloat16'>"

    class DTypePolicy:
        name = "mixed_bfloat16"
        compute_dtype = "bfloat16"

    assert ["bfloat16"] * 3 == [dtype_name(dtype) for dtype in (DType(), DTypePolicy(), "mixed_bfloat16")]
    assert ["float16", "float32"] == [dtype_name(dtype) for dtype in (np.float16, np.dtype("float32"))]
    assert peak_flops("NVIDIA H100 80GB HBM3", DTypePolicy()) == peak_flops("NVIDIA H100 80GB HBM3", "bf16")


def test_a_plausible_share_is_not_warned_about():
    """Only a value above the peak is called wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        used = utilization(1.0, given_flops(0.46e15), peak_flops("x", given=1e15))
        nothing = utilization(1.0, given_flops(0), peak_flops("x", given=1e15))
    assert (0.46, False, 0.0) == (used.ratio, used.above_peak, nothing.ratio)


@pytest.mark.parametrize("given", [0.0, -1.0, float("inf"), float("nan")])
def test_a_given_peak_is_a_finite_number_above_zero(given):
    """Neither bound is a peak."""
    with pytest.raises(ValueError, match="a peak is a finite number above 0"):
        peak_flops("x", given=given)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: transformer_flops(-1.0, attention=False), "parameters"),
        (lambda: transformer_flops(1e9), "without layers, heads, head_dim, sequence_length"),
        (lambda: transformer_flops(1e9, attention=False, recomputed=1.5), "recomputed"),
        (lambda: given_flops(math.nan), "given_flops"),
        (lambda: peak_flops("x", given=0.0), "given"),
        (lambda: utilization(1.0, given_flops(1.0), peak_flops("TPU v4"), devices=0), "devices"),
        (lambda: utilization(math.inf, given_flops(1.0), peak_flops("TPU v4")), "rate"),
    ],
)
def test_a_number_that_cannot_be_is_an_error(call, complaint):
    """It names the argument."""
    with pytest.raises(ValueError, match=complaint):
        call()
