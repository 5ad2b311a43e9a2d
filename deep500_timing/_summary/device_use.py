"""The share of time in which a device was busy with timed regions, and the host's lead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from deep500_timing._summary.reading import kept_intervals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from deep500_timing._recording.intervals import Intervals


@dataclass(frozen=True)
class DeviceUse:
    """The result of ``Timer.gpu_busy``; None for unknown values.

    Attributes:
        share: Share of the wall time in which at least one timed region ran on a device, 0 to 1.
        busy_s: The same in seconds; overlapping regions count once.
        wall_s: From the start of the first region on the device to the end of the last, in seconds.
        mean_lead_s: Mean time from the start of a region on the host to its start on the device, in seconds. Near 0 the
            device waits for the host.
        max_lead_s: The largest, in seconds.
        uncertainty_s: Uncertainty (±) of device times on the host clock, in seconds.
        regions: Number of kept intervals used.
    """

    share: float | None
    busy_s: float
    wall_s: float
    mean_lead_s: float | None
    max_lead_s: float | None
    uncertainty_s: float
    regions: int


def device_use(stores: Sequence[Intervals], leads: Sequence[tuple[int, int, int]], uncertainty_ns: int) -> DeviceUse:
    """Compute it from the kept device intervals."""
    pairs = kept_intervals(stores)
    count = sum(count for count, _, _ in leads)
    busy_ns, wall_ns = _union(pairs)
    return DeviceUse(
        share=busy_ns / wall_ns if wall_ns else None,
        busy_s=busy_ns / 1e9,
        wall_s=wall_ns / 1e9,
        mean_lead_s=sum(total for _, total, _ in leads) / count / 1e9 if count else None,
        max_lead_s=max(most for _, _, most in leads) / 1e9 if count else None,
        uncertainty_s=uncertainty_ns / 1e9,
        regions=len(pairs),
    )


def _union(pairs: NDArray[np.int64]) -> tuple[int, int]:
    # The length of the union of the intervals and of their span, in ns.
    if not len(pairs):
        return 0, 0
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate([ordered[:1, 0], reached[:-1]])
    covered = np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], before), 0)
    return int(covered.sum()), int(reached[-1] - ordered[0, 0])
