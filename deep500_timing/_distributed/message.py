"""The part of a snapshot that goes to another rank: JSON, compressed by zlib.

Count, total and extremes of each region are exact. The sender's own median and p95 are sent ready. The histogram's
bins are merged ``2 ** level`` at a time, with the smallest level that keeps the message within :data:`LIMIT_BYTES`.
"""

from __future__ import annotations

import json
import zlib
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from deep500_timing._recording.intervals import BIN_COUNT
from deep500_timing._summary.histogram import HISTOGRAM_ERROR
from deep500_timing._summary.snapshot import COUNTERS

if TYPE_CHECKING:
    from deep500_timing._summary.snapshot import RegionTimes, Snapshot

VERSION = 2
LIMIT_BYTES = 8000
"""The size of a message of up to :data:`LIMIT_REGIONS` regions; one of more takes its share more."""
LIMIT_REGIONS = 30
COARSEST = 6
"""At this level a power of two is one bin."""


def bin_error(level: int) -> float:
    """The relative error of a quantile that is read from bins of a level.

    A coarse bin's times are taken to lie in the fine bin above its middle: half a coarse and half a fine bin from
    where they may be, and a power of two has 64 fine ones.
    """
    return ((1 << level) + 1) / 128 if level else HISTOGRAM_ERROR


def pack_snapshot(snapshot: Snapshot, *, limit_bytes: int | None = None) -> bytes:
    """What another rank merges with its own snapshot: no memory, and of the percentiles the 50th and 95th."""
    regions = [_fields(region) for region in snapshot]
    if limit_bytes is None:
        limit_bytes = LIMIT_BYTES * max(len(regions), LIMIT_REGIONS) // LIMIT_REGIONS
    message = b""
    for level in range(COARSEST + 1):
        found = [fields | _bins(region, level) for fields, region in zip(regions, snapshot, strict=True)]
        plain = {
            "version": VERSION, "host": snapshot.host, "unix": snapshot.unix_time_s, "level": level, "regions": found,
        }  # fmt: skip
        message = zlib.compress(json.dumps(plain, separators=(",", ":")).encode(), 6)
        if len(message) <= limit_bytes:
            break
    return message


def _fields(region: RegionTimes) -> dict[str, Any]:
    found: dict[str, Any] = {"name": region.name, "device": region.device}
    found["counters"] = {name: getattr(region, name) for name in COUNTERS if getattr(region, name)}
    own, stats = region.distribution, region.stats
    if own is not None and stats is not None and own.count:
        found["moments"] = [own.count, own.total_ns, own.min_ns, own.max_ns, own.m2_ns2]
        found["each"] = [stats.median, stats.p95, stats.skipped]
    return found


def _bins(region: RegionTimes, level: int) -> dict[str, Any]:
    if region.distribution is None:
        return {}
    bins, counts = region.distribution.used_bins()
    coarse, place = np.unique(bins >> level, return_inverse=True)
    together = np.bincount(place, weights=counts, minlength=len(coarse)).astype(np.int64)
    return {"gaps": np.diff(coarse, prepend=0).tolist(), "counts": together.tolist()}


def unpack_snapshot(message: bytes) -> dict[str, Any]:
    """The inverse of :func:`pack_snapshot`, with the bins of each region at the finest level."""
    try:
        plain: dict[str, Any] = json.loads(zlib.decompress(message))
        if plain["version"] != VERSION:
            raise ValueError(
                f"it is of version {plain['version']}, this reads {VERSION}; every rank must run the same "
                "deep500-timing"
            )
        level = int(plain["level"])
        for region in plain["regions"]:
            # The fine bin in the middle of each coarser one. Lists: of few bins, arrays would take ten times as long.
            half = (1 << level) >> 1
            bins = [(bin_ << level) + half for bin_ in accumulate(region.pop("gaps", ()))]
            region["bins"], counts = bins, region.setdefault("counts", [])
            if len(bins) != len(counts) or (bins and not 0 <= bins[0] <= bins[-1] < BIN_COUNT):
                raise ValueError("its bins are not where bins can be")
    except (zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"Reading a rank's snapshot: {error}.") from error
    return plain
