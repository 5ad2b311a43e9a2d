"""Draws the report's picture: the cost of a pair of calls, warm and cold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks._contenders import CLOCK
from benchmarks._report import number

_COLOURS = {"limit": "#1b1b1b", "compiled": "#d1495b", "plain": "#edae49", "peer": "#a7b4bf"}
_MEANING = {
    "compiled": "deep500-timing, compiled",
    "plain": "deep500-timing, plain Python",
    "peer": "others",
    "limit": f"{CLOCK}, time.perf_counter_ns()",
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the picture as PNG: two panels of bars on log scales, in the order of the warm costs.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    shown = [
        (label, found)
        for label, found in results["contenders"].items()
        if found["chart"] and "warm_ns" in found and found["warm_ns"]["median"] > 0
    ]
    shown.sort(key=lambda item: item[1]["warm_ns"]["median"], reverse=True)
    with plt.rc_context({"font.family": "DejaVu Sans", "font.size": 10}):
        figure, axes = plt.subplots(
            1, 2, figsize=(12, 1.9 + 0.34 * len(shown)), sharey=True, width_ratios=(1, 1), layout="constrained"
        )
        panels = (
            ("warm_ns", "warm_ratio", "in a tight loop"),
            ("cold_ns", "cold_ratio", "with cold caches, as in training"),
        )
        for axis, (kind, ratio, title) in zip(axes, panels, strict=True):
            _panel(axis, shown, kind, ratio)
            axis.set_title(title, loc="left", fontsize=11, color="#444444")
        for tick, (_, found) in zip(axes[0].get_yticklabels(), shown, strict=True):
            if found["group"] in ("compiled", "plain"):
                tick.set_fontweight("bold")
        figure.suptitle(
            "What timing an empty region costs, and how many times two clock reads that is (log scales)",
            x=0.01,
            ha="left",
            fontsize=13,
            fontweight="bold",
        )
        handles = [plt.Rectangle((0, 0), 1, 1, color=_COLOURS[group]) for group in _MEANING]
        figure.legend(handles, _MEANING.values(), loc="outside lower left", ncols=4, frameon=False, fontsize=9)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _panel(axis: Any, shown: list[tuple[str, dict[str, Any]]], kind: str, ratio: str) -> None:
    present = [
        (row, label, found) for row, (label, found) in enumerate(shown) if found.get(kind, {}).get("median", 0) > 0
    ]
    axis.set_yticks(range(len(shown)), [label for label, _ in shown])
    axis.set_xscale("log")
    if not present:
        return
    values = [found[kind]["median"] for _, _, found in present]
    low, high = min(values), max(values)
    axis.set_xlim(low / 1.8, high * 14)
    axis.barh(
        [row for row, _, _ in present],
        [value - low / 1.8 for value in values],
        left=low / 1.8,
        height=0.72,
        color=[_COLOURS[found["group"]] for _, _, found in present],
    )
    for (row, label, found), value in zip(present, values, strict=True):
        axis.hlines(row, found[kind]["low"], found[kind]["high"], color="#555555", linewidth=1)
        multiple = "" if label == CLOCK else f"   {number(found[ratio]['median'], 2)}×"
        edge = max(value, found[kind]["high"])
        axis.annotate(
            f"{_time(value)}{multiple}",
            (edge, row),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            fontweight="bold" if found["group"] in ("compiled", "plain") else "normal",
            color="#222222",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
        if label == CLOCK:
            axis.axvline(value, color=_COLOURS["limit"], linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="both", length=0)
    axis.set_xticks([], [])
    axis.set_xticks([], [], minor=True)


def _time(nanoseconds: float) -> str:
    return f"{number(nanoseconds, 2)} ns" if nanoseconds < 1000 else f"{number(nanoseconds / 1000, 2)} µs"
