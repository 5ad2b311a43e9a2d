"""The two pictures of a profile: time by block with attention apart, and memory by block."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from deep500_timing.adapters import CPU, charts

# PyTorch's operators, forward and backward; the flash-attn and xformers packages; kernels by themselves.
ATTENTION_NAMES = re.compile(
    r"^aten::\w*attention|^aten::_transformer_encoder_layer_fwd|flash_attn|flash_fwd|flash_bwd|FlashAttn|fmha"
    r"|memory_efficient_attention|xformers.*attention",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class RangeTime:
    """One run through a range: a call of a block, or of a function that was recorded."""

    name: str
    """The block's path, or the name that the user gave."""
    start_us: float
    """When it began, on the profiler's clock, in microseconds."""
    cpu_us: float
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
        if event.name in names and event.device_type.name == CPU:
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
        if ATTENTION_NAMES.search(inner.name):
            # The operators that it dispatches to lie within it.
            found = float(inner.device_time_total if on_device else inner.cpu_time_total)
        else:
            found = _attention_us(inner, on_device=on_device)
        if found is not None:
            total = (total or 0.0) + found
    return total


_COLOURS = "#0072B2", "#E69F00"
"""Of Okabe and Ito's palette, told apart without red and green."""
_MIB = 1024**2


def plot_times(path: Path, ranges: Sequence[RangeTime], title: str) -> None:
    """Draw the mean time of each block, in the order in which they are called, with the part of attention.

    A range that holds others, such as a whole step, would dwarf them and is left out.
    """
    calls = [one for one in ranges if not one.holds_others]
    blocks = {name: [one for one in calls if one.name == name] for name in dict.fromkeys(one.name for one in calls)}
    where = "the device" if any(one.device_us is not None for one in calls) else "the CPU"
    whole = [(name, fmean(one.time_us for one in of) / 1e3) for name, of in blocks.items()]
    attention = [(name, fmean(one.attention_us or 0.0 for one in of) / 1e3) for name, of in blocks.items()]
    share = 100 * sum(ms for _, ms in attention) / (sum(ms for _, ms in whole) or 1)
    title += f", mean of {len(calls) // max(len(blocks), 1)} calls"
    series = {"all operations": whole}
    if share:
        series[f"of which attention ({share:.0f} % of the sum)"] = attention
    else:
        title += ", no attention operator was found"
    _draw(path, "bar", title, f"mean time on {where} (ms)", series)


def plot_memory(path: Path, samples: Sequence[MemorySample], title: str) -> None:
    """Draw the memory of tensors and of the allocator after each block."""
    if any(one.allocated_bytes is not None for one in samples):
        what = "memory of the device (MiB)"
        sizes = {
            "allocated (tensors)": [one.allocated_bytes for one in samples],
            "reserved (allocator)": [one.reserved_bytes for one in samples],
        }
    else:
        what = "memory of the host (MiB); no device"
        sizes = {"resident set of the process": [one.host_bytes for one in samples]}
        if all(one.host_bytes is None for one in samples):
            title += ": neither a device nor psutil, no memory could be read"
    names = [f"{place} {one.name}" for place, one in enumerate(samples)]
    mib = {
        label: [(name, size / _MIB) for name, size in zip(names, found, strict=True) if size is not None]
        for label, found in sizes.items()
    }
    _draw(path, "line", title, what, mib)


def _draw(path: Path, mark: str, title: str, what: str, series: dict[str, list[tuple[str, float]]]) -> None:
    values = [
        {"name": name, "place": place, "value": value, "series": label}
        for label, points in series.items()
        for place, (name, value) in enumerate(points)
    ]
    axis = {"title": "in the order of the calls", "labelAngle": -60, "labelLimit": 160, "labelOverlap": True}
    x = {"field": "name", "type": "nominal", "sort": {"field": "place"}, "axis": axis}
    y = charts.quantity("value", stack=None, title=what, scale={"zero": mark == "bar"})
    colours = dict(zip(series, _COLOURS, strict=False))
    spec = charts.layer(mark, values, x=x, y=y, color=charts.coloured("series", colours, legend={"orient": "top"}))
    spec |= {"title": {"text": title, "anchor": "start"}, "height": 300}
    width = min(max(700, 14 * len({value["name"] for value in values})), 1600)
    charts.save_picture(charts.styled(spec, width), path, caller="Drawing a profile")
