"""How the ranks compare in each region: scores, and what each takes longer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    ByRegion = dict[str, dict[int, float]]


def regions_of_ranks(
    ranks: tuple[int, ...], regions: tuple[str, ...], own: Floats, over: Floats, parts: int
) -> tuple[ByRegion, ByRegion, ByRegion]:
    """For each region, for each rank: its relative score, its individual score, its excess over the median of ranks.

    Args:
        ranks: Their numbers.
        regions: Their names. One that some rank does not have gets no scores.
        own: Own times in seconds, of shape ``(steps, ranks, regions)``.
        over: The same, less the median of ranks in each step.
        parts: Into how many windows the steps are divided.
    """
    import numpy as np

    medians, typical = np.median(own, axis=0), np.median(over, axis=0)
    relative: ByRegion = {}
    individual: ByRegion = {}
    excess: ByRegion = {}
    windows = np.array([np.median(part, axis=0) for part in np.array_split(own, min(parts, len(own)))])
    for place, region in enumerate(regions):
        excess[region] = dict(zip(ranks, typical[:, place].tolist(), strict=True))
        column = medians[:, place]
        if (column <= 0).any():
            continue
        best = float(column.min())
        relative[region] = {r: best / float(v) for r, v in zip(ranks, column, strict=True)}
        last, least = windows[-1, :, place], windows[:, :, place].min(axis=0)
        individual[region] = {
            r: float(low / now) if now > 0 else 1.0 for r, low, now in zip(ranks, least, last, strict=True)
        }
    return relative, individual, excess
