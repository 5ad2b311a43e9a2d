"""memory-grows: memory that rises from step to step after the warm-up."""

from __future__ import annotations

from math import floor, log10
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._summary.text import format_bytes
from deep500_timing._views.findings import _thresholds as at_least
from deep500_timing._views.findings._evidence import name_of
from deep500_timing._views.findings._finding import Finding
from deep500_timing._views.findings._statistics import trend_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from deep500_timing._views.findings._evidence import Evidence
    from deep500_timing._views.findings._statistics import Trend

_WARM_UP = 0.25
"""Share of the samples in which caches and pools fill."""
_SYSTEM_WIDE = ("system.", "gpu")
_CAPACITY = "memory.device_total_bytes"
_ON_DEVICE = "memory.device_"


def memory_grows(evidence: Evidence) -> Iterator[Finding]:
    """A reading of this process's memory has a slope that is more than noise."""
    worst: tuple[float, Finding] | None = None
    for (rank, metric, region), (at, values) in sorted(evidence.samples.items()):
        of_memory = metric.endswith("_bytes") and ("memory" in metric or "rss" in metric) and ".max_" not in metric
        if (
            not of_memory
            or metric.startswith(_SYSTEM_WIDE)
            or metric == _CAPACITY
            or len(values) < at_least.SAMPLES_LEAST
        ):
            continue
        kept = slice(int(_WARM_UP * len(values)), None)
        found = trend_of(values[kept])
        if found is None or found.chance > at_least.DRIFT_LEVEL or found.growth < at_least.GROWTH_SHARE:
            continue
        grown = found.end - found.start
        if grown < at_least.GROWTH_BYTES:
            continue
        steps = evidence.steps
        during = 0
        if steps is not None:
            low, high = np.searchsorted(steps.starts_s, [at[kept][0], at[kept][-1]])
            during = int(high - low)
        rate = f"{format_bytes(grown / during)} a step" if during else f"{format_bytes(grown)} so far"
        where = f"read at the end of {name_of(region)}" if region else ""
        on = f" of rank {rank}" if len(evidence.by_rank) > 1 else ""
        finding = Finding(
            "memory-grows",
            f"Memory{on} grows by {rate}, from {format_bytes(found.start)} to {format_bytes(found.end)} "
            f"({name_of(metric)})",
            where=where,
            why=_when_full(evidence, rank, metric, region, found, during),
            anchor="memory",
            rank=rank,
        )
        if worst is None or grown > worst[0]:
            worst = (grown, finding)
    if worst is not None:
        yield worst[1]


def _when_full(evidence: Evidence, rank: int, metric: str, region: str, found: Trend, during: int) -> str:
    # A device's size is sampled too. The host's limit is not known.
    sizes = evidence.samples.get((rank, _CAPACITY, region))
    if not metric.startswith(_ON_DEVICE) or sizes is None or not during:
        return ""
    size = float(sizes[1][-1])
    left = (size - found.end) * during
    least, most = found.rise_ci
    if left <= 0 or least <= 0:
        return ""
    about, soonest, latest = (_two_digits(left / rise) for rise in (found.end - found.start, most, least))
    within = f" ({soonest} to {latest})" if soonest != latest else ""
    return f"at this rate the {format_bytes(size)} of the device are full in {about} steps{within}"


def _two_digits(count: float) -> str:
    step = 10 ** max(floor(log10(max(count, 1))) - 1, 0)
    return str(round(count / step) * step)
