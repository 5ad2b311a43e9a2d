"""One line below a table: how busy the device was in a step, and the CPU's pace."""

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
LEAST_COUNT = 3
"""Fewest times for a median."""
_WIDTH = 32


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
    """The line, or none."""
    step = next((node for node in tree.named(BATCH) if node.gpu is not None and node.total_s), None)
    busy = None if step is None else busy_in(step)
    if step is None or busy is None:
        return []
    whole_s, busy_s = busy
    said = f"busy for {share(busy_s / whole_s)} of BATCH with the regions timed on it"
    longest = max((child for child in step.children if child.gpu is not None), key=_on_device_s)
    if longest.gpu is None or longest.count < LEAST_COUNT or longest.median_s is None or not longest.gpu.median_s:
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
