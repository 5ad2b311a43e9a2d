"""How much of the time a device had something timed to do, and how far the host ran ahead of it."""

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
    """What ``Timer.gpu_busy`` says; None where nothing was timed on the device.

    Attributes:
        share: Of the wall time, the part in which at least one timed region ran on a device, 0 to 1.
        busy_s: That part, in seconds; regions that overlap count once.
        wall_s: From the start of the first region on the device to the end of the last, in seconds.
        mean_lead_s: By how much a region began later on the device than on the host, in seconds: the work that was
            queued before it. Near 0 the device waits for the host.
        max_lead_s: The most, in seconds.
        uncertainty_s: How far off the place of a device's time on the host's clock may be, either way, in seconds.
        regions: How many regions this stands on: those that are kept.
    """

    share: float | None
    busy_s: float
    wall_s: float
    mean_lead_s: float | None
    max_lead_s: float | None
    uncertainty_s: float
    regions: int


def device_use(stores: Sequence[Intervals], leads: Sequence[tuple[int, int, int]], uncertainty_ns: int) -> DeviceUse:
    """Put together what is kept of every region on the device.

    Args:
        stores: The intervals, on the host's clock.
        leads: Count, sum and maximum in ns of what each region was late by.
        uncertainty_ns: Of the places.
    """
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
    # What the intervals cover together, and from where to where they reach, in ns.
    if not len(pairs):
        return 0, 0
    ordered = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate([ordered[:1, 0], reached[:-1]])
    covered = np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], before), 0)
    return int(covered.sum()), int(reached[-1] - ordered[0, 0])
