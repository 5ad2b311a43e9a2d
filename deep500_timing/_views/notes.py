"""Two lines below a table: regions with a long first interval, and how busy the device was in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deep500_timing._base.names import BATCH
from deep500_timing._summary.text import safe_name, shorten
from deep500_timing._views.columns import share, times

if TYPE_CHECKING:
    from deep500_timing._summary.tree import Node, Tree

AHEAD = 0.7
"""The CPU runs ahead if its time is below this share of the device's."""
ALIKE = 0.1
"""Largest relative difference of equal times."""
_LEAST_ON_DEVICE = 3
_RATIO, _LEAST, _LEAST_SHARE = 3.0, 6, 0.01
"""A first interval is named from so many medians on, of so many intervals, if it takes this share of the run."""
_MOST, _WIDTH = 3, 32


def first_note(tree: Tree) -> list[tuple[str, str]]:
    """The line on first intervals, or none. Regions inside a named one are left out."""
    whole = sum(root.total_s or 0.0 for root in tree.roots)
    found = [
        (node, node.first_s, node.first_s / node.median_s)
        for node in tree.walk()
        if node.first_s is not None
        and node.median_s
        and node.count >= _LEAST
        and node.first_s >= max(_RATIO * node.median_s, _LEAST_SHARE * whole)
    ]
    paths = {node.path for node, _, _ in found}
    outer = [of for of in found if not any(of[0].path[:end] in paths for end in range(1, len(of[0].path)))]
    outer.sort(key=lambda of: -of[1])
    said = []
    for node, first_s, ratio in outer[:_MOST]:
        times_it = f"{ratio:.1f}" if ratio < 10 else f"{ratio:.0f}"
        said.append(f"{shorten(safe_name(node.name), _WIDTH)} {times([first_s])[0]}, {times_it} × its median")
    return [("first", "; ".join(said))] if said else []


def busy_in(step: Node) -> tuple[float, float] | None:
    """The seconds of a region, and in how many of them a region directly inside it was timed on the device.

    None without such regions: the region's own device time includes idle time.
    """
    inside = [child.gpu.total_s for child in step.children if child.gpu is not None]
    if step.gpu is None or step.total_s is None or not inside:
        return None
    whole_s = max(step.total_s, step.gpu.total_s)
    return whole_s, min(sum(inside), whole_s)


def device_note(tree: Tree) -> list[tuple[str, str]]:
    step = next((node for node in tree.named(BATCH) if node.gpu is not None and node.total_s), None)
    busy = None if step is None else busy_in(step)
    if step is None or busy is None:
        return []
    whole_s, busy_s = busy
    said = f"busy for {share(busy_s / whole_s)} of BATCH with the regions timed on it"
    longest = max((child for child in step.children if child.gpu is not None), key=_on_device_s)
    if longest.gpu is None or longest.count < _LEAST_ON_DEVICE or longest.median_s is None or not longest.gpu.median_s:
        return [("device", said)]
    on_cpu, on_device = times([longest.median_s])[0], times([longest.gpu.median_s])[0]
    pace = _pace(longest.median_s / longest.gpu.median_s)
    name = shorten(safe_name(longest.name), _WIDTH)
    return [("device", f"{said}; in {name} the CPU {pace}: {on_cpu} against {on_device}")]


def _on_device_s(node: Node) -> float:
    return 0.0 if node.gpu is None else node.gpu.total_s


def _pace(ratio: float) -> str:
    if ratio < AHEAD:
        return "runs ahead of it"
    if abs(ratio - 1) <= ALIKE:
        return "takes as long, so one waits for the other"
    return "takes longer, so it waits" if ratio > 1 else "takes less"
