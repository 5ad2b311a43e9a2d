"""Our histograms as exponential ones, as OpenTelemetry has them. Single times are not needed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from deep500_timing._summary.distribution import middle_of

if TYPE_CHECKING:
    from deep500_timing._summary.distribution import Distribution

SCALE = 5
"""Finest resolution: ``2 ** SCALE`` buckets for each doubling, each 2.2 % wide. Our bins are 0.8 to 1.6 % wide."""
MAX_BUCKETS = 160
"""Buckets at most, as in OpenTelemetry's own aggregation; the scale is reduced until they fit."""


class Exponential(NamedTuple):
    """Counts of times in seconds.

    Bucket ``i`` of ``counts`` holds those over ``base ** (offset + i)`` and up to ``base ** (offset + i + 1)``.
    """

    scale: int
    """``base = 2 ** 2 ** -scale``."""
    zero_count: int
    """Times of 0 s."""
    offset: int
    """Index of the first bucket."""
    counts: tuple[int, ...]
    """Times in each bucket, the empty ones between others included."""


def exponential_of(distribution: Distribution, scale: int = SCALE, max_buckets: int = MAX_BUCKETS) -> Exponential:
    """Convert a histogram. Each of our bins goes to the bucket that holds its middle.

    The mapping of a value to a bucket is that of OpenTelemetry's data model, section ExponentialHistogram.

    Args:
        distribution: Times in nanoseconds.
        scale: The finest scale.
        max_buckets: The most buckets.
    """
    bins, counts = distribution.used_bins()
    zero_count, buckets = 0, dict[int, int]()
    for place, count in zip(bins.tolist(), counts.tolist(), strict=True):
        middle_ns = middle_of(place)
        if middle_ns == 0:
            zero_count += count
        else:
            index = math.ceil(math.log2(middle_ns / 1e9) * 2**scale) - 1
            buckets[index] = buckets.get(index, 0) + count
    while buckets and max(buckets) - min(buckets) >= max_buckets:
        scale -= 1
        merged: dict[int, int] = {}
        for index, count in buckets.items():
            merged[index >> 1] = merged.get(index >> 1, 0) + count
        buckets = merged
    if not buckets:
        return Exponential(scale, zero_count, 0, ())
    first, last = min(buckets), max(buckets)
    return Exponential(scale, zero_count, first, tuple(buckets.get(index, 0) for index in range(first, last + 1)))
