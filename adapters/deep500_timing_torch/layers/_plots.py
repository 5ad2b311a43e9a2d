"""The two pictures of a profile: time by block with attention apart, and memory by block. Drawn by matplotlib."""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from deep500_timing.adapters import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


# PyTorch's operators, forward and backward; the flash-attn and xformers packages; kernels by themselves.
_ATTENTION_NAMES = re.compile(
    r"^aten::\w*attention|^aten::_transformer_encoder_layer_fwd|flash_attn|flash_fwd|flash_bwd|FlashAttn|fmha"
    r"|memory_efficient_attention|xformers.*attention",
    re.IGNORECASE,
)


def is_attention(name: str) -> bool:
    """Whether an operator or a kernel of that name computes attention."""
    return _ATTENTION_NAMES.search(name) is not None


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


_TIME, _ATTENTION, _OTHER = (
    "#0072B2",
    "#E69F00",
    "#999999",
)  # Okabe and Ito's palette, told apart without red and green.
_MIB = 1024**2
_TICKS = 24
"""Labels on the axis at most, so that they do not overlap with a hundred blocks."""


def plot_times(path: Path, ranges: Sequence[RangeTime], title: str) -> None:
    """Draw the mean time of each block, in the order in which they are called, with the part of attention.

    A range that holds others, such as a whole step, would dwarf them and is left out.
    """
    calls = [one for one in ranges if not one.holds_others]
    names = list(dict.fromkeys(one.name for one in calls))
    on_device = any(one.device_us is not None for one in calls)
    whole = [fmean(one.time_us for one in calls if one.name == name) / 1e3 for name in names]
    attention = [fmean(one.attention_us or 0.0 for one in calls if one.name == name) / 1e3 for name in names]
    figure, axes = _figure(len(names))
    places = range(len(names))
    axes.bar(places, whole, width=0.85, color=_TIME, label="all operations")
    if any(attention):
        share = 100 * sum(attention) / sum(whole)
        axes.bar(
            places, attention, width=0.85, color=_ATTENTION, label=f"of which attention ({share:.0f} % of the sum)"
        )
    else:
        axes.plot([], [], " ", label="no attention operator was found")
    axes.set_ylabel("mean time on the device (ms)" if on_device else "mean time on the CPU (ms)")
    axes.set_ylim(0, max(whole, default=0.0) * 1.08 or 1.0)
    axes.set_title(f"{title}, mean of {len(calls) // max(len(names), 1)} calls", loc="left")
    _finish(figure, axes, names, path)


def plot_memory(path: Path, samples: Sequence[MemorySample], title: str) -> None:
    """Draw the memory of tensors and of the allocator after each block."""
    figure, axes = _figure(len(samples))
    places = range(len(samples))
    if any(sample.allocated_bytes is not None for sample in samples):
        axes.plot(places, _mib([one.allocated_bytes for one in samples]), color=_TIME, label="allocated (tensors)")
        axes.plot(
            places,
            _mib([one.reserved_bytes for one in samples]),
            color=_ATTENTION,
            ls="--",
            label="reserved (allocator)",
        )
        axes.set_ylabel("memory of the device (MiB)")
    elif any(sample.host_bytes is not None for sample in samples):
        axes.plot(places, _mib([one.host_bytes for one in samples]), color=_OTHER, label="resident set of the process")
        axes.set_ylabel("memory of the host (MiB); no device")
    else:
        axes.text(
            0.5, 0.5, "neither a device nor psutil: no memory could be read", ha="center", transform=axes.transAxes
        )
    axes.set_title(title, loc="left")
    _finish(figure, axes, [one.name for one in samples], path)


def _figure(count: int) -> tuple[Any, Any]:
    require("matplotlib", extra="plots", caller="Drawing a profile")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Not by pyplot, to leave the user's state alone.
    figure = Figure(figsize=(min(max(7.0, 0.14 * count), 16.0), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _finish(figure: Any, axes: Any, names: Sequence[str], path: Path) -> None:
    every = max(1, -(-len(names) // _TICKS))
    places = list(range(0, len(names), every))
    axes.set_xticks(places, [_shorten(names[place]) for place in places], rotation=60, ha="right", fontsize=8)
    axes.set_xlabel("in the order of the calls" + (f" (one label in {every})" if every > 1 else ""))
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper right", frameon=False, ncols=2, fontsize=9)
    figure.savefig(path, dpi=130)


def _shorten(name: str) -> str:
    return name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}"


def _mib(sizes: Sequence[int | None]) -> list[float]:
    return [float("nan") if size is None else size / _MIB for size in sizes]
